#include <immintrin.h>

#include "ops/gemm_blocked.hpp"

namespace crossdock::ops {
namespace {

struct Avx512F32 {
  using Scalar = float;
  using Vector = __m512;
  static constexpr int64_t kLanes = 16;
  static constexpr int64_t kRows = 14;
  static constexpr int64_t kVectors = 2;

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Vector value) { _mm512_storeu_ps(to, value); }
  static Vector broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

  // 16 x 16: pairs of rows, then pairs of pairs, within 128-bit lanes; then the lanes themselves.
  static void transpose(const float* source, int64_t stride, float* target, int64_t target_stride) {
    __m512 rows[16];
    __m512 pairs[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = load(source + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      rows[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      rows[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
      rows[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      rows[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 low_even = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
      const __m512 low_odd = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xdd);
      const __m512 high_even = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
      const __m512 high_odd = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xdd);
      store(target + i * target_stride, _mm512_shuffle_f32x4(low_even, high_even, 0x88));
      store(target + (i + 4) * target_stride, _mm512_shuffle_f32x4(low_odd, high_odd, 0x88));
      store(target + (i + 8) * target_stride, _mm512_shuffle_f32x4(low_even, high_even, 0xdd));
      store(target + (i + 12) * target_stride, _mm512_shuffle_f32x4(low_odd, high_odd, 0xdd));
    }
  }
};

struct Avx512F64 {
  using Scalar = double;
  using Vector = __m512d;
  static constexpr int64_t kLanes = 8;
  static constexpr int64_t kRows = 14;
  static constexpr int64_t kVectors = 2;

  static Vector zero() { return _mm512_setzero_pd(); }
  static Vector load(const double* from) { return _mm512_loadu_pd(from); }
  static void store(double* to, Vector value) { _mm512_storeu_pd(to, value); }
  static Vector broadcast(const double* from) { return _mm512_set1_pd(*from); }
  static Vector add(Vector a, Vector b) { return _mm512_add_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }

  static void transpose(const double* source, int64_t stride, double* target,
                        int64_t target_stride) {
    transpose_plainly<kLanes>(source, stride, target, target_stride);
  }
};

}  // namespace

void gemm_avx512(const GemmArgs<float>& args, GemmScratch<float>& scratch) {
  BlockedGemm<Avx512F32>::run(args, scratch);
}
void gemm_avx512(const GemmArgs<double>& args, GemmScratch<double>& scratch) {
  BlockedGemm<Avx512F64>::run(args, scratch);
}

}  // namespace crossdock::ops
