#include <immintrin.h>

#include "ops/gemm_blocked.hpp"

namespace crossdock::ops {
namespace {

struct Avx2F32 {
  using Scalar = float;
  using Vector = __m256;
  static constexpr int64_t kLanes = 8;
  static constexpr int64_t kRows = 6;
  static constexpr int64_t kVectors = 2;

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Vector value) { _mm256_storeu_ps(to, value); }
  static Vector broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

  // 8 x 8: pairs of rows, then pairs of pairs, within 128-bit lanes; then the lanes themselves.
  static void transpose(const float* source, int64_t stride, float* target, int64_t target_stride) {
    __m256 rows[8];
    __m256 pairs[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) rows[i] = load(source + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      rows[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      rows[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      rows[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      rows[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      store(target + i * target_stride, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20));
      store(target + (i + 4) * target_stride, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
    }
  }
};

struct Avx2F64 {
  using Scalar = double;
  using Vector = __m256d;
  static constexpr int64_t kLanes = 4;
  static constexpr int64_t kRows = 6;
  static constexpr int64_t kVectors = 2;

  static Vector zero() { return _mm256_setzero_pd(); }
  static Vector load(const double* from) { return _mm256_loadu_pd(from); }
  static void store(double* to, Vector value) { _mm256_storeu_pd(to, value); }
  static Vector broadcast(const double* from) { return _mm256_broadcast_sd(from); }
  static Vector add(Vector a, Vector b) { return _mm256_add_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
  static void transpose(const double* source, int64_t stride, double* target,
                        int64_t target_stride) {
    transpose_plainly<kLanes>(source, stride, target, target_stride);
  }
};

}  // namespace

void gemm_avx2(const GemmArgs<float>& args, GemmScratch<float>& scratch) {
  BlockedGemm<Avx2F32>::run(args, scratch);
}
void gemm_avx2(const GemmArgs<double>& args, GemmScratch<double>& scratch) {
  BlockedGemm<Avx2F64>::run(args, scratch);
}

}  // namespace crossdock::ops
