#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/memory/descriptor_socket.hpp"
#include "comm/memory/shared_file.hpp"
#include "comm/polled/control_message.hpp"
#include "comm/polled/process_end.hpp"
#include "comm/sockets/socket.hpp"
#include "core/process.hpp"

namespace crossdock::comm {

/// Version of blobs, frames and shared memory: ranks with different versions refuse each other.
inline constexpr uint32_t kSocketsVersion = 3;

/// Everything that other processes must know about a process to connect to it.
struct SocketsBlob {
  uint32_t version = kSocketsVersion;
  ProcessIdentity process;
  uint64_t machine = 0;        // identify_this_machine()
  SocketAddress address;       // where it listens
  int32_t directory = -1;      // descriptor of its directory (directory.hpp), in its process
  Secret secret{};             // needed to connect to it
  int64_t window_bytes = 0;    // SocketsOptions, compared by join
  int32_t ranks_per_node = 0;  // SocketsOptions, compared by join
};

std::vector<std::byte> encode(const SocketsBlob& blob);

/// A blob, or why the bytes are not one. A blob of another version is decoded only up to its
/// version.
struct DecodedBlob {
  std::optional<SocketsBlob> blob;
  std::string flaw;  // completes "the blob of rank 3 "; empty if there is a blob
  bool is_foreign_version = false;
};
DecodedBlob decode_blob(std::span<const std::byte> bytes);

/// A page in a process's memory file that says where its streams are: the descriptor of the
/// memory file of each communicator, and why it could not make some of them. The ranks of a node
/// thus find each other's streams without a message, even after a failure.
struct DirectoryPage {
  static constexpr uint32_t kMagic = 0x44534443;  // "CDSD": Crossdock sockets, directory
  static constexpr size_t kMaxCommunicators = 1024;
  static constexpr size_t kNumRefusals = 16;
  struct Entry {
    std::atomic<uint64_t> comm_id;  // 0: free; written after the descriptor
    std::atomic<int32_t> descriptor;
  };
  struct Refusal {
    std::atomic<uint64_t> comm_id;  // 0: none; written after the message
    ControlMessage message;         // kAbort
  };

  uint32_t magic;
  uint32_t version;
  std::atomic<uint32_t> is_closed;  // its process makes no more communicators
  Secret secret;                    // as in the blob: shows that it is the page of that process
  std::array<Entry, kMaxCommunicators> entries;
  std::array<Refusal, kNumRefusals> refusals;  // the latest
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// This process's directory.
class Directory {
 public:
  explicit Directory(const Secret& secret);
  /// Tells the others that nothing more will be published; not in a forked child.
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  int descriptor() const { return file_->descriptor(); }

  /// Makes the streams of a communicator known. Throws kCapacity if too many communicators are
  /// open.
  void publish(uint64_t comm_id, int descriptor);
  void withdraw(uint64_t comm_id);
  /// Announces that this process has failed to make a communicator.
  void refuse(uint64_t comm_id, const ControlMessage& message);

 private:
  DirectoryPage& page() const;

  const std::unique_ptr<SharedFile> file_;
  const uint64_t generation_ = fork_generation();
  std::mutex mutex_;  // for writing
  size_t num_refusals_ = 0;
};

/// The directory of another process on this node.
class PeerDirectory {
 public:
  /// Null, with the reason in `why`, if the memory of that process cannot be opened, for example
  /// because it runs in another container or as another user.
  static std::unique_ptr<PeerDirectory> open(const SocketsBlob& blob, std::string& why);

  /// The descriptor of the streams of a communicator, in that process; nullopt: not known yet.
  std::optional<int> find(uint64_t comm_id) const;
  /// Why that process has failed to make a communicator; nullopt: it has not.
  std::optional<ControlMessage> refusal_of(uint64_t comm_id) const;
  /// Whether that process has given up or has closed all its communicators.
  bool is_closed() const;

 private:
  explicit PeerDirectory(std::unique_ptr<SharedFile> file) : file_(std::move(file)) {}
  const std::unique_ptr<SharedFile> file_;
};

}  // namespace crossdock::comm
