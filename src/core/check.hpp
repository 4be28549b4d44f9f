#pragma once

#include <sstream>
#include <string>

#include "crossdock/error.hpp"

namespace crossdock {

/// The parts, one after the other, as << prints them.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace crossdock

/// For what a caller can get wrong; always on. The message says what must hold, what came, and what
/// to do where that is not plain.
#define CROSSDOCK_CHECK(condition, ...)                                  \
  do {                                                                   \
    if (!(condition)) {                                                  \
      throw ::crossdock::Error(::crossdock::ErrorCode::kInvalidArgument, \
                               ::crossdock::concat(__VA_ARGS__));        \
    }                                                                    \
  } while (false)

/// For what only a bug in Crossdock can break; always on, so keep it out of inner loops.
#define CROSSDOCK_ASSERT(condition)                                                                \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      throw ::crossdock::Error(::crossdock::ErrorCode::kInternal,                                  \
                               ::crossdock::concat("internal error: ", #condition, " [", __FILE__, \
                                                   ":", __LINE__, "]; please report it"));         \
    }                                                                                              \
  } while (false)
