#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "comm/control_message.hpp"
#include "comm/sockets/blob.hpp"

namespace crossdock::comm {

/// Every message on a connection between nodes: this header, then payload_bytes bytes. A connection
/// begins with kHello from the process that opened it, and with kWelcome from the other process if
/// it keeps the connection (pair_connection.hpp); everything else is refused before that.
struct FrameHeader {
  static constexpr uint32_t kMagic = 0x46534443;  // "CDSF": Crossdock sockets, frame
  enum class Kind : uint32_t {
    kHello = 1,    // payload: Hello
    kControl = 2,  // payload: ControlMessage
    kData = 3,     // payload: the next bytes of the stream to the receiver
    kCredit = 4,   // position: bytes of the receiver's stream that the sender has consumed so far
    kWelcome = 5   // no payload
  };

  uint32_t magic = kMagic;
  Kind kind = Kind::kData;
  uint32_t payload_bytes = 0;
  uint32_t reserved = 0;
  uint64_t channel = 0;   // the communicator that it belongs to; 0 with kHello, kWelcome
  uint64_t position = 0;  // kData: position of the payload in the stream; kCredit: see above
};
static_assert(sizeof(FrameHeader) == 32);

/// Largest payload; SocketsOptions::chunk_bytes is at most this.
inline constexpr uint32_t kMaxPayloadBytes = 1U << 20;

/// The first frame of a connection.
struct Hello {
  uint32_t version = kSocketsVersion;
  int32_t rank = -1;   // of the sender, in the world of the blobs
  uint64_t world = 0;  // hash of all blobs
  Secret secret{};     // of the receiver
};
static_assert(sizeof(Hello) == 32);

/// Whether the header is valid in this protocol: a known kind with the right payload size.
/// `is_known`: the sender has said a valid hello; before that only kHello is valid, and afterwards
/// it is not.
bool is_valid(const FrameHeader& header, bool is_known);

/// The header at the beginning of `bytes`; nullopt if there are fewer bytes than a header has.
std::optional<FrameHeader> read_header(std::span<const std::byte> bytes);

/// The payload as a plain struct. REQUIRES: payload has its size.
template <typename Payload>
Payload read_payload(std::span<const std::byte> payload);

extern template Hello read_payload<Hello>(std::span<const std::byte>);
extern template ControlMessage read_payload<ControlMessage>(std::span<const std::byte>);

}  // namespace crossdock::comm
