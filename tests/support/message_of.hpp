#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>

#include "crossdock/error.hpp"

namespace crossdock {

/// The message of the Error that `call` throws, which must have this code if one is passed;
/// "nothing was thrown" if it throws none.
inline std::string message_of(const std::function<void()>& call,
                              std::optional<ErrorCode> code = std::nullopt) {
  try {
    call();
  } catch (const Error& error) {
    if (code) {
      EXPECT_EQ(error.code(), *code);
    }
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace crossdock
