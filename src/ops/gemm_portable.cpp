#include <cmath>

#include "ops/gemm_blocked.hpp"

namespace crossdock::ops {
namespace {

// For machines without AVX2: plain C++, the same sums. Slow where std::fma is not an instruction.
template <typename T>
struct PortableUnit {
  using Scalar = T;
  static constexpr int64_t kLanes = 4;
  static constexpr int64_t kRows = 4;
  static constexpr int64_t kVectors = 2;
  struct Vector {
    T lanes[kLanes];
  };

  template <typename Lane>
  static Vector each(const Lane& lane) {
    Vector result;
    for (int64_t i = 0; i < kLanes; ++i) result.lanes[i] = lane(i);
    return result;
  }
  static Vector zero() {
    return each([](int64_t) { return T{0}; });
  }
  static Vector load(const T* from) {
    return each([from](int64_t i) { return from[i]; });
  }
  static void store(T* to, const Vector& value) {
    for (int64_t i = 0; i < kLanes; ++i) to[i] = value.lanes[i];
  }
  static Vector broadcast(const T* from) {
    return each([from](int64_t) { return *from; });
  }
  static Vector add(const Vector& a, const Vector& b) {
    return each([&](int64_t i) { return a.lanes[i] + b.lanes[i]; });
  }
  static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    return each([&](int64_t i) { return std::fma(a.lanes[i], b.lanes[i], c.lanes[i]); });
  }
  static void transpose(const T* source, int64_t stride, T* target, int64_t target_stride) {
    transpose_plainly<kLanes>(source, stride, target, target_stride);
  }
};

}  // namespace

void gemm_portable(const GemmArgs<float>& args, GemmScratch<float>& scratch) {
  BlockedGemm<PortableUnit<float>>::run(args, scratch);
}
void gemm_portable(const GemmArgs<double>& args, GemmScratch<double>& scratch) {
  BlockedGemm<PortableUnit<double>>::run(args, scratch);
}

}  // namespace crossdock::ops
