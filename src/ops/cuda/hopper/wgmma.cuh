#pragma once

#include <cstdint>

#include "crossdock/dtype.hpp"
#include "ops/cuda/hopper/barriers.cuh"
#include "ops/cuda/hopper/tile_shape.hpp"

// Products of a warpgroup on the tensor cores. For code that is compiled for sm_90a only.

namespace crossdock::ops::hopper {

/// An operand in shared memory, as the copy engine wrote it with 128-byte swizzle: blocks of 64
/// lines of 128 bytes. A line runs along the inner dimension; if the operand is transposed, it runs
/// across and the block's lines follow the inner dimension.
template <bool is_transposed>
struct WgmmaOperand {
  /// Distance between adjacent 16-deep parts of a step, in the units of a descriptor.
  static constexpr uint64_t kPart = is_transposed ? 16 * 128 / 16 : 16 * 2 / 16;

  /// block_bytes: distance between adjacent blocks of a transposed operand.
  static __device__ uint64_t descriptor(SharedAddress first, uint64_t block_bytes = kBlockBytes) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
    constexpr uint64_t kGroupBytes = 8 * 128;                        // 8 lines
    const uint64_t across_bytes = is_transposed ? block_bytes : 16;  // ignored if not transposed
    return (uint64_t{first} & 0x3ffff) >> 4 | (across_bytes >> 4) << 16 | (kGroupBytes >> 4) << 32 |
           kSwizzle128;
  }
};

/// sums (+)= A B, with A of 64 rows and B of kColumns columns, 16 deep. Lane 4g + t of warp w has
/// sums[4j .. 4j + 3]: columns 8j + 2t and 8j + 2t + 1 of rows 16w + g and 16w + g + 8.
/// Asynchronous: the sums belong to the tensor cores until wait_for_products.
template <typename Element, int kColumns>
struct Wgmma;

// An asm statement names each of its up to 128 registers.
#define CROSSDOCK_REGISTERS_0_TO_15 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define CROSSDOCK_REGISTERS_0_TO_31 \
  CROSSDOCK_REGISTERS_0_TO_15       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CROSSDOCK_REGISTERS_0_TO_63                                                  \
  CROSSDOCK_REGISTERS_0_TO_31                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CROSSDOCK_REGISTERS_0_TO_95                                                  \
  CROSSDOCK_REGISTERS_0_TO_63                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CROSSDOCK_REGISTERS_96_TO_127                                                    \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
#define CROSSDOCK_SUMS_8(s, i)                                                        \
  "+f"(s[i]), "+f"(s[(i) + 1]), "+f"(s[(i) + 2]), "+f"(s[(i) + 3]), "+f"(s[(i) + 4]), \
      "+f"(s[(i) + 5]), "+f"(s[(i) + 6]), "+f"(s[(i) + 7])
#define CROSSDOCK_SUMS_16(s, i) CROSSDOCK_SUMS_8(s, i), CROSSDOCK_SUMS_8(s, (i) + 8)
#define CROSSDOCK_SUMS_32(s, i) CROSSDOCK_SUMS_16(s, i), CROSSDOCK_SUMS_16(s, (i) + 16)

#define CROSSDOCK_WGMMA_32(element, type)                                                    \
  template <>                                                                                \
  struct Wgmma<element, 32> {                                                                \
    template <bool a_transposed, bool b_transposed>                                          \
    static __device__ __forceinline__ void multiply(float (&s)[16], uint64_t a, uint64_t b,  \
                                                    bool adds) {                             \
      asm volatile(                                                                          \
          "{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"                                 \
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                        \
          " {" CROSSDOCK_REGISTERS_0_TO_15 "}, %16, %17, adds, 1, 1, %19, %20;\n}"           \
          : CROSSDOCK_SUMS_16(s, 0)                                                          \
          : "l"(a), "l"(b), "r"(int{adds}), "n"(int{a_transposed}), "n"(int{b_transposed})); \
    }                                                                                        \
  };

#define CROSSDOCK_WGMMA_64(element, type)                                                    \
  template <>                                                                                \
  struct Wgmma<element, 64> {                                                                \
    template <bool a_transposed, bool b_transposed>                                          \
    static __device__ __forceinline__ void multiply(float (&s)[32], uint64_t a, uint64_t b,  \
                                                    bool adds) {                             \
      asm volatile(                                                                          \
          "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"                                 \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                        \
          " {" CROSSDOCK_REGISTERS_0_TO_31 "}, %32, %33, adds, 1, 1, %35, %36;\n}"           \
          : CROSSDOCK_SUMS_32(s, 0)                                                          \
          : "l"(a), "l"(b), "r"(int{adds}), "n"(int{a_transposed}), "n"(int{b_transposed})); \
    }                                                                                        \
  };

#define CROSSDOCK_WGMMA_128(element, type)                                                   \
  template <>                                                                                \
  struct Wgmma<element, 128> {                                                               \
    template <bool a_transposed, bool b_transposed>                                          \
    static __device__ __forceinline__ void multiply(float (&s)[64], uint64_t a, uint64_t b,  \
                                                    bool adds) {                             \
      asm volatile(                                                                          \
          "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"                                 \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
          " {" CROSSDOCK_REGISTERS_0_TO_63 "}, %64, %65, adds, 1, 1, %67, %68;\n}"           \
          : CROSSDOCK_SUMS_32(s, 0), CROSSDOCK_SUMS_32(s, 32)                                \
          : "l"(a), "l"(b), "r"(int{adds}), "n"(int{a_transposed}), "n"(int{b_transposed})); \
    }                                                                                        \
  };

#define CROSSDOCK_WGMMA_192(element, type)                                                   \
  template <>                                                                                \
  struct Wgmma<element, 192> {                                                               \
    template <bool a_transposed, bool b_transposed>                                          \
    static __device__ __forceinline__ void multiply(float (&s)[96], uint64_t a, uint64_t b,  \
                                                    bool adds) {                             \
      asm volatile(                                                                          \
          "{\n.reg .pred adds;\nsetp.ne.b32 adds, %98, 0;\n"                                 \
          "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type                       \
          " {" CROSSDOCK_REGISTERS_0_TO_95 "}, %96, %97, adds, 1, 1, %99, %100;\n}"          \
          : CROSSDOCK_SUMS_32(s, 0), CROSSDOCK_SUMS_32(s, 32), CROSSDOCK_SUMS_32(s, 64)      \
          : "l"(a), "l"(b), "r"(int{adds}), "n"(int{a_transposed}), "n"(int{b_transposed})); \
    }                                                                                        \
  };

#define CROSSDOCK_WGMMA_256(element, type)                                                   \
  template <>                                                                                \
  struct Wgmma<element, 256> {                                                               \
    template <bool a_transposed, bool b_transposed>                                          \
    static __device__ __forceinline__ void multiply(float (&s)[128], uint64_t a, uint64_t b, \
                                                    bool adds) {                             \
      asm volatile(                                                                          \
          "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"                                \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                       \
          " {" CROSSDOCK_REGISTERS_0_TO_95 CROSSDOCK_REGISTERS_96_TO_127                     \
          "}, %128, %129, adds, 1, 1, %131, %132;\n}"                                        \
          : CROSSDOCK_SUMS_32(s, 0), CROSSDOCK_SUMS_32(s, 32), CROSSDOCK_SUMS_32(s, 64),     \
            CROSSDOCK_SUMS_32(s, 96)                                                         \
          : "l"(a), "l"(b), "r"(int{adds}), "n"(int{a_transposed}), "n"(int{b_transposed})); \
    }                                                                                        \
  };

CROSSDOCK_WGMMA_32(BF16, "bf16")
CROSSDOCK_WGMMA_32(F16, "f16")
CROSSDOCK_WGMMA_64(BF16, "bf16")
CROSSDOCK_WGMMA_64(F16, "f16")
CROSSDOCK_WGMMA_128(BF16, "bf16")
CROSSDOCK_WGMMA_128(F16, "f16")
CROSSDOCK_WGMMA_192(BF16, "bf16")
CROSSDOCK_WGMMA_192(F16, "f16")
CROSSDOCK_WGMMA_256(BF16, "bf16")
CROSSDOCK_WGMMA_256(F16, "f16")

#undef CROSSDOCK_WGMMA_32
#undef CROSSDOCK_WGMMA_64
#undef CROSSDOCK_WGMMA_128
#undef CROSSDOCK_WGMMA_192
#undef CROSSDOCK_WGMMA_256
#undef CROSSDOCK_SUMS_32
#undef CROSSDOCK_SUMS_16
#undef CROSSDOCK_SUMS_8
#undef CROSSDOCK_REGISTERS_0_TO_15
#undef CROSSDOCK_REGISTERS_0_TO_31
#undef CROSSDOCK_REGISTERS_0_TO_63
#undef CROSSDOCK_REGISTERS_0_TO_95
#undef CROSSDOCK_REGISTERS_96_TO_127

/// Before the first product of a step.
__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// After the last product of a step.
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most kPending steps are unfinished.
template <int kPending>
__device__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from reading sums before the wait.
template <int kCount>
__device__ __forceinline__ void settle(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace crossdock::ops::hopper
