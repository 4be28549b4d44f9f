#include "crossdock/error.hpp"

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

}  // namespace crossdock
