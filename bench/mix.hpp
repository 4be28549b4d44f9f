#pragma once

#include <cstdint>

namespace crossdock::bench {

// Random numbers that depend on a key alone, not on the order of drawing (splitmix64).

inline constexpr uint64_t kMixStep = 0x9e3779b97f4a7c15U;

/// A bijection; every bit of the result depends on every bit of the input. 0 stays 0.
inline uint64_t mix_bits(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

/// The same for keys that may be 0.
inline uint64_t mix(uint64_t key) {
  return mix_bits(key + kMixStep);
}

}  // namespace crossdock::bench
