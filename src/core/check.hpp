#pragma once

#include <sstream>
#include <string>

#include "crossdock/error.hpp"

namespace crossdock {

/// The parts as operator<< prints them, concatenated.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace crossdock

/// Checks the caller's input; always on. The message says what must hold, what was given and,
/// unless obvious, what to do.
#define CROSSDOCK_CHECK(condition, ...)                                  \
  do {                                                                   \
    if (!(condition)) {                                                  \
      throw ::crossdock::Error(::crossdock::ErrorCode::kInvalidArgument, \
                               ::crossdock::concat(__VA_ARGS__));        \
    }                                                                    \
  } while (false)

/// Fails only if Crossdock has a bug; always on, so keep it out of inner loops.
#define CROSSDOCK_ASSERT(condition)                                                                \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      throw ::crossdock::Error(::crossdock::ErrorCode::kInternal,                                  \
                               ::crossdock::concat("internal error: ", #condition, " [", __FILE__, \
                                                   ":", __LINE__, "]; please report it"));         \
    }                                                                                              \
  } while (false)
