#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <vector>

#include "crossdock/testing/layer_worlds.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/testing/reference_router.hpp"

namespace crossdock::conformance {

/// What gradients hold before a backward that accumulates.
inline constexpr double kInitialGradient = 0.5;

/// The ranks of `rank`'s group, ascending. `groups` [P] as in LayerSpec; empty: all ranks.
std::vector<int> members_of(const std::vector<int64_t>& groups, int num_ranks, int rank);

/// The tokens with which a rank takes part: all of its own, or its slice of replicated tokens.
LayerTokens slice_of(const LayerSpec& spec, const std::vector<LayerTokens>& ranks, int rank);

/// The experts of a rank, ascending.
std::vector<int64_t> experts_of(const LayerSpec& spec, int rank);

reference::MlpConfig mlp_of(const LayerSpec& spec, int64_t inner);

/// The router's input for a rank's slice; x is multiplied by the jitter.
reference::RouterInput router_input(const LayerWorld& world, const LayerTokens& slice);

/// Random numbers that are the same with every standard library.
class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(seed) {}

  uint64_t bits() { return generator_(); }
  /// In [first, last].
  int64_t between(int64_t first, int64_t last) {
    const auto count = static_cast<uint64_t>(last - first + 1);
    return first + static_cast<int64_t>(generator_() % count);
  }
  bool percent(int64_t chance) { return between(0, 99) < chance; }
  template <typename T>
  T pick(const std::vector<T>& values) {
    return values[static_cast<size_t>(between(0, std::ssize(values) - 1))];
  }
  /// In [-1, 1).
  double signed_unit() { return static_cast<double>(generator_() >> 11) * 0x1p-52 - 1.0; }
  /// Values with standard deviation `scale`, rounded to the dtype.
  std::vector<double> values(int64_t count, double scale, DType dtype) {
    std::vector<double> all(static_cast<size_t>(count));
    for (double& value : all) {
      value = reference::round_to(dtype, scale * std::numbers::sqrt3 * signed_unit());
    }
    return all;
  }

 private:
  std::mt19937_64 generator_;
};

}  // namespace crossdock::conformance
