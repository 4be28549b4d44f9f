#pragma once

#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "core/check.hpp"

namespace crossdock {

/// Starts a std::thread. Throws Error(kUnsupported) if none can be started; `purpose` completes
/// "cannot start a thread for" and may add what to do.
template <typename Body>
std::thread start_thread(std::string_view purpose, Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::kUnsupported,
                concat("cannot start a thread (", error.code().message(), ") for ", purpose));
  }
}

}  // namespace crossdock
