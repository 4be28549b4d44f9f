#pragma once

#include <cstdint>

namespace crossdock::router {

/// 64 well mixed bits from 64 (the finaliser of splitmix64).
inline uint64_t mix(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15U;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

/// The random factors of one token: the same whenever and wherever it is asked for.
template <typename T>
class TokenJitter {
 public:
  TokenJitter(double size, uint64_t seed, int64_t token)
      : size_(static_cast<T>(size)), key_(mix(mix(seed) ^ static_cast<uint64_t>(token))) {}

  /// In [1 - size, 1 + size), for value d of the token.
  T factor(int64_t d) const {
    const uint64_t bits = mix(key_ + static_cast<uint64_t>(d)) >> 40;  // 24 bits
    return T{1} + size_ * (static_cast<T>(bits) * T{0x1p-23} - T{1});
  }

 private:
  T size_;
  uint64_t key_;
};

}  // namespace crossdock::router
