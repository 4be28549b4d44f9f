#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace crossdock::bench {

/// C [M, N] = A B, row-major, fp32. A is [M, K], or [K, M] when transposed; B is [K, N], or [N, K].
struct PlainProduct {
  int64_t M, N, K;
  bool transpose_a, transpose_b;
  const float* a;
  const float* b;
  float* c;
};

/// OpenBLAS, loaded at run time, with its best kernels for this machine: version 0.3.21 does not
/// recognise new processors by itself.
class PlainBlas {
 public:
  /// Null if OpenBLAS is not installed.
  static std::unique_ptr<PlainBlas> load(int num_threads);

  void multiply(const PlainProduct& product) const;

 private:
  using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k,
                         float alpha, const float* a, int a_stride, const float* b, int b_stride,
                         float beta, float* c, int c_stride);
  explicit PlainBlas(Sgemm sgemm) : sgemm_(sgemm) {}
  Sgemm sgemm_;
};

}  // namespace crossdock::bench
