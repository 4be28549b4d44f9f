#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/sockets/socket.hpp"
#include "crossdock/error.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// The exchange of blobs through rank 0, for processes that have no other means. Rank 0 listens on
/// the first free port from `port` on; the others try these ports until one of them answers for
/// their job. The exchange ends when every rank has all blobs. Rank 0 tells those that are
/// connected who is missing, and any rank that gives up tells all others why.
struct StoreArgs {
  std::string host;  // of rank 0
  int port = 0;
  uint64_t key = 0;  // identical on every rank of a job, different for each of its communicators
  int rank = 0;
  int size = 1;
  std::vector<std::byte> blob;
  std::chrono::nanoseconds deadline{};
  std::function<bool()> interrupt{};  // may be empty; see SocketsOptions
  OnWait on_wait{};                   // likewise
  std::chrono::nanoseconds notice_after{};
};

inline constexpr int kNumStorePorts = 16;
inline constexpr uint32_t kMaxBlobBytes = 4096;

/// The blobs of all ranks, in order. Throws kTimeout, with the missing ranks in the message, if
/// they do not arrive in time; kMismatch if two processes claim one rank; the error of a rank that
/// gives up.
std::vector<std::vector<std::byte>> exchange_blobs(const StoreArgs& args);

/// Tells the other ranks that this one has no blob, and why. Tries for a few seconds, or until
/// StoreArgs::deadline; does not throw.
void refuse_exchange(const StoreArgs& args, const Error& cause) noexcept;

// The messages. A client sends StoreRequest and its blob. The store answers at once with kWaiting,
// which it repeats when the missing ranks change, and with kBlobs when all blobs have arrived. A
// client that gives up sends its ControlMessage, of kind kAbort; the store then sends kFailed to
// all. Requests up to `size`, and the replies kRefused, are the same in every version.

struct StoreRequest {
  static constexpr uint32_t kMagic = 0x51534443;  // "CDSQ": Crossdock store, question
  uint32_t magic = kMagic;
  uint32_t version = 0;
  uint64_t key = 0;
  int32_t rank = 0;
  int32_t size = 0;
  uint32_t blob_bytes = 0;  // 0: a ControlMessage follows instead, because the rank gives up
  uint32_t reserved = 0;
};
static_assert(sizeof(StoreRequest) == 32);

struct StoreReply {
  static constexpr uint32_t kMagic = 0x41534443;  // "CDSA": Crossdock store, answer
  enum class Kind : uint32_t {
    kWaiting = 1,  // payload: the lowest missing ranks (int32_t)
    kBlobs = 2,    // payload: for each rank the size of its blob (uint32_t) and the blob
    kRefused = 3,  // payload: text
    kFailed = 4    // payload: ControlMessage
  };
  uint32_t magic = kMagic;
  Kind kind = Kind::kWaiting;
  uint64_t payload_bytes = 0;
};
static_assert(sizeof(StoreReply) == 16);

/// Whether a request is one of this job, but from another version of Crossdock.
bool is_of_other_version(const StoreRequest& request, const StoreArgs& args);

/// Whether a request can be one of this job; if not, the connection is dropped without an answer.
bool is_valid(const StoreRequest& request, const StoreArgs& args);

/// The blobs in the payload of kBlobs; empty if it is malformed.
std::vector<std::vector<std::byte>> read_blobs(const std::vector<std::byte>& payload, int size);

}  // namespace crossdock::comm
