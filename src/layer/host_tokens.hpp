#pragma once

#include <cstddef>
#include <vector>

#include "crossdock/tensor.hpp"
#include "layer/token_identity.hpp"

namespace crossdock {

/// Copies of GPU tokens in host memory.
class HostTokens {
 public:
  /// Waits for the stream.
  HostTokens(const LocalTokens& on_gpu, Stream stream);

  const LocalTokens& tokens() const { return tokens_; }

 private:
  std::vector<std::byte> x_;
  std::vector<std::byte> mask_;
  LocalTokens tokens_;
};

}  // namespace crossdock
