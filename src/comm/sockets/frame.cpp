#include "comm/sockets/frame.hpp"

#include <cstring>
#include <type_traits>

#include "core/check.hpp"

namespace crossdock::comm {

static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<ControlMessage>);

bool is_valid(const FrameHeader& header, bool is_known) {
  using Kind = FrameHeader::Kind;
  if (header.magic != FrameHeader::kMagic || header.reserved != 0) return false;
  if (header.kind == Kind::kHello) {
    return !is_known && header.payload_bytes == sizeof(Hello) && header.channel == 0 &&
           header.position == 0;
  }
  if (header.kind == Kind::kWelcome) {
    return is_known && header.payload_bytes == 0 && header.channel == 0 && header.position == 0;
  }
  if (!is_known || header.channel == 0) return false;
  switch (header.kind) {
    case Kind::kControl:
      return header.payload_bytes == sizeof(ControlMessage) && header.position == 0;
    case Kind::kData:
      return header.payload_bytes > 0 && header.payload_bytes <= kMaxPayloadBytes;
    case Kind::kCredit:
      return header.payload_bytes == 0;
    default:
      return false;
  }
}

std::optional<FrameHeader> read_header(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(FrameHeader)) return std::nullopt;
  FrameHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  return header;
}

template <typename Payload>
Payload read_payload(std::span<const std::byte> payload) {
  CROSSDOCK_ASSERT(payload.size() == sizeof(Payload));
  Payload result;
  std::memcpy(&result, payload.data(), sizeof result);
  return result;
}

template Hello read_payload<Hello>(std::span<const std::byte>);
template ControlMessage read_payload<ControlMessage>(std::span<const std::byte>);

}  // namespace crossdock::comm
