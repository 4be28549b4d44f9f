#pragma once

#include "crossdock/extend/communicator.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// The memory of a buffer, in the form that communicators take.
inline SharedBytes shared_bytes(const Buffer& buffer) {
  return {.data = buffer.data(), .num_bytes = buffer.num_bytes(), .owner = buffer.owner()};
}

}  // namespace crossdock
