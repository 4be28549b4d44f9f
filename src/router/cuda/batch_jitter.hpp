#pragma once

#include <cstdint>

namespace crossdock::router {

/// The random factors on the tokens of a batch (RouterConfig::jitter).
struct BatchJitter {
  float size = 0.0f;  // 0: none
  uint64_t seed = 0;
  const int64_t* token_ids = nullptr;  // [T], on the device; null: 0 to T - 1
};

}  // namespace crossdock::router
