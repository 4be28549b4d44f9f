#pragma once

#include <cstdint>

namespace crossdock::router {

/// The counts of one auxiliary loss, on the device.
struct ScopeCounts {
  double coeff = 0.0;               // 0: there is no such loss
  const int64_t* routes = nullptr;  // [B, E]
  const int64_t* tokens = nullptr;  // [B]
  int64_t num_sequences = 0;        // B
};

/// The losses of a router.
struct BalanceArgs {
  ScopeCounts batch{};  // its tokens are those of the z-loss, too
  ScopeCounts sequence{};
  ScopeCounts global_batch{};
  double z_coeff = 0.0;
  double total_sequences = 0.0;  // see LossCounts
  int64_t total_tokens = 0;

  constexpr bool has_aux() const {
    return batch.coeff != 0.0 || sequence.coeff != 0.0 || global_batch.coeff != 0.0;
  }
};

}  // namespace crossdock::router
