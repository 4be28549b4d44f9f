#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/router.hpp"

namespace crossdock::router {

/// A step of splitmix64: every bit of the result depends on every bit of the input.
CROSSDOCK_HOST_DEVICE inline uint64_t mix(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15U;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

/// The random factors of one token. They depend only on seed and token: the same on every device.
template <typename T>
class TokenJitter {
 public:
  CROSSDOCK_HOST_DEVICE TokenJitter(double size, uint64_t seed, int64_t token)
      : size_(static_cast<T>(size)), key_(mix(mix(seed) ^ static_cast<uint64_t>(token))) {}

  /// In [1 - size, 1 + size), for value d of the token.
  CROSSDOCK_HOST_DEVICE T factor(int64_t d) const {
    const uint64_t bits = mix(key_ + static_cast<uint64_t>(d)) >> 40;  // 24 bits
    return T{1} + size_ * (static_cast<T>(bits) * T{0x1p-23} - T{1});
  }

 private:
  T size_;
  uint64_t key_;
};

/// Chooses experts for one token at a time. Holds scratch memory: use one per thread. T is float or
/// double.
template <typename T>
class Choice {
 public:
  explicit Choice(const RouterConfig& config)
      : config_(config),
        biased_(static_cast<size_t>(config.num_experts)),
        is_open_(static_cast<size_t>(config.num_experts)),
        group_scores_(static_cast<size_t>(config.num_groups)) {}

  /// scores [E], bias [E] or null -> ids [K], best first, ties to the lower id. NaN scores
  /// are chosen last.
  void choose(const T* scores, const T* bias, int32_t* ids);

 private:
  // The best open expert in [begin, end), ties to the lower id; -1 if none is open.
  int64_t best_open(int64_t begin, int64_t end) const;
  T score_of_group(int64_t group);
  void close_weak_groups();

  const RouterConfig& config_;
  std::vector<T> biased_;         // [E]
  std::vector<uint8_t> is_open_;  // [E] still available
  std::vector<T> group_scores_;   // [G]
};

extern template class Choice<float>;
extern template class Choice<double>;

}  // namespace crossdock::router
