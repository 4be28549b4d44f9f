#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

/// Marks exported symbols. The library is compiled with hidden visibility: a shared libcrossdock
/// exports what the headers of include/crossdock declare, and nothing else.
#if defined(__GNUC__)
#define CROSSDOCK_API __attribute__((visibility("default")))
#else
#define CROSSDOCK_API
#endif

namespace crossdock {

enum class ErrorCode {
  kInvalidArgument,  // an invalid input; the same error on every rank, the group stays usable
  kMismatch,         // ranks differ in configuration or call; the group stays usable
  kUnsupported,      // not built in, or not possible on this machine
  kCapacity,         // more rows than there is room for; the message gives the size needed
  kPeerFailed,       // a rank left, threw or died; the group is poisoned
  kTimeout,          // a rank missed a deadline; the group is poisoned
  kCommunication,    // the communicator failed; the group is poisoned
  kCuda,             // a CUDA call failed
  kInternal,         // a bug in Crossdock
  kOutOfMemory       // a rank has not enough memory; after a refusal the group stays usable
};

/// "invalid argument", "timeout", ...
CROSSDOCK_API const char* name_of(ErrorCode code) noexcept;

/// Which rank and which call an error is about. Defaults mean "not applicable".
struct ErrorContext {
  int culprit = -1;            // rank that caused it, within the group of the call
  uint64_t sequence = 0;       // number of the collective in its group
  const char* operation = "";  // "plan", "dispatch", ...; a string literal
};

/// The library itself throws only this exception and std::bad_alloc.
class CROSSDOCK_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, ErrorContext context = {})
      : std::runtime_error(message), code_(code), context_(context) {}

  ErrorCode code() const noexcept { return code_; }
  const ErrorContext& context() const noexcept { return context_; }

 private:
  ErrorCode code_;
  ErrorContext context_;
};

}  // namespace crossdock
