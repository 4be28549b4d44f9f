#pragma once

#include <cstdlib>
#include <string>

namespace crossdock {

/// The value of an environment variable. An empty one counts as not set, whatever the variable.
inline std::string environment_variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

}  // namespace crossdock
