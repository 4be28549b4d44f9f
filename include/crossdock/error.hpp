#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

/// Marks what the library exports. It is compiled with hidden visibility: a shared libcrossdock
/// exports what the headers of include/crossdock declare, and nothing else.
#if defined(__GNUC__)
#define CROSSDOCK_API __attribute__((visibility("default")))
#else
#define CROSSDOCK_API
#endif

namespace crossdock {

enum class ErrorCode {
  kInvalidArgument,  // an input breaks a rule; agreed by all ranks, the group stays usable
  kMismatch,       // the ranks do not do the same thing (configuration, call); agreed, group usable
  kUnsupported,    // not built in, or not possible on this machine
  kCapacity,       // more rows than the caller gave room for; the message holds the size needed
  kPeerFailed,     // a rank left, threw or died; the group is poisoned
  kTimeout,        // a rank did not come in time; the group is poisoned
  kCommunication,  // the engine below failed; the group is poisoned
  kCuda,           // a CUDA call failed
  kInternal        // a bug in Crossdock
};

/// "invalid argument", "timeout", ...
CROSSDOCK_API const char* name_of(ErrorCode code) noexcept;

/// Where in the exchange between ranks an error was found. -1 / 0 / "" where it does not apply.
struct ErrorContext {
  int culprit = -1;            // rank that caused it, in the group that exchanged
  uint64_t sequence = 0;       // number of the collective in its group
  const char* operation = "";  // "plan", "dispatch", ...; a string literal
};

/// What the library throws. Beside it only std::bad_alloc can leave it, where memory runs out.
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
