#ifndef CROSSDOCK_C_FP8_H
#define CROSSDOCK_C_FP8_H

/// Rows in fp8 with scales, half the bytes of bf16: for crossdock_dispatch_args. A part of
/// crossdock.h.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {  // scale: how it follows from amax, the largest magnitude of a group
  CROSSDOCK_FP8_SCALE_POW2 = 0,  // the smallest power of two that is at least amax / 448
  CROSSDOCK_FP8_SCALE_EXACT = 1  // amax / 448; fp32 scales only
};

typedef struct crossdock_quantise_rows_args {
  size_t struct_size;
  crossdock_tensor x;       // [T, D] fp32, bf16 or fp16
  crossdock_tensor values;  // out [T, D] fp8 e4m3; given by the caller
  crossdock_tensor
      scales;         // out [T, ceil(D/128)] fp32 or [T, ceil(D/32)] e8m0; given by the caller
  double amax_floor;  // amax is at least this; finite, not negative
  int32_t scale;
  int32_t padding;  // 0
  void* stream;     // a cudaStream_t, for tensors on a GPU; NULL: the default stream
} crossdock_quantise_rows_args;
#define CROSSDOCK_QUANTISE_ROWS_ARGS_INIT \
  { .struct_size = sizeof(crossdock_quantise_rows_args) }

/// Rounds rows to fp8 e4m3, with a scale for each group of 128 values (fp32 scales) or 32 (e8m0).
/// docs/numerics.md has the formulas. CPU and GPU give the same bits. Not collective.
CROSSDOCK_C_API crossdock_status crossdock_quantise_rows(const crossdock_quantise_rows_args* args);

typedef struct crossdock_dequantise_rows_args {
  size_t struct_size;
  crossdock_tensor values;  // [R, D] fp8 e4m3
  crossdock_tensor scales;  // [R, ceil(D/128)] fp32 or [R, ceil(D/32)] e8m0
  crossdock_tensor out;     // out [R, D] fp32, bf16 or fp16; given by the caller
  void* stream;             // as above
} crossdock_dequantise_rows_args;
#define CROSSDOCK_DEQUANTISE_ROWS_ARGS_INIT \
  { .struct_size = sizeof(crossdock_dequantise_rows_args) }

/// Multiplies every value by the scale of its group. Not collective.
CROSSDOCK_C_API crossdock_status
crossdock_dequantise_rows(const crossdock_dequantise_rows_args* args);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_FP8_H
