#pragma once

#include <cstdint>

#include "crossdock/router.hpp"

namespace crossdock::router {

/// A warp holds a row of E logits in registers, and a lane one slot.
inline constexpr int kMaxDeviceExperts = 1024;
inline constexpr int kMaxDeviceSlots = 32;

/// How logits become scores, and scores weights.
struct ScoreRules {
  Score score;
  bool normalises;
  float scaling;
  int32_t E;
  int32_t K;
};

}  // namespace crossdock::router
