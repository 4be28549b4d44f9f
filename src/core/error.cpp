#include "crossdock/error.hpp"

#include <algorithm>

#include "core/text.hpp"

namespace crossdock {

const char* name_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kMismatch:
      return "mismatch between ranks";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kCapacity:
      return "capacity exceeded";
    case ErrorCode::kPeerFailed:
      return "peer failed";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kCommunication:
      return "communication failure";
    case ErrorCode::kCuda:
      return "CUDA failure";
    case ErrorCode::kInternal:
      return "internal error";
    case ErrorCode::kOutOfMemory:
      return "out of memory";
  }
  return "unknown";
}

size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (length > text.size()) return 0;
  const std::string_view rest = text.substr(1, length - 1);
  if (!std::all_of(rest.begin(), rest.end(), [](char c) { return (c & 0xc0) == 0x80; })) return 0;
  // Overlong encodings, surrogates, and code points beyond the last.
  if ((lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90)) return 0;
  if ((lead == 0xed && byte(1) > 0x9f) || (lead == 0xf4 && byte(1) > 0x8f)) return 0;
  return length;
}

}  // namespace crossdock
