#include <algorithm>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/row_vector.cuh"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "ops/fp8_rows.hpp"

// Both kernels: some lanes of a warp share a group, each with a vector of it. A block takes
// kGroupsPerLane * kThreads / lanes contiguous groups at a time, and a lane loads all its vectors
// before it uses the first one.

namespace crossdock::ops {
namespace {

constexpr int kThreads = 256;
constexpr int kGroupsPerLane = 4;
constexpr int kBlocksPerSm = 4;  // at least: 64 KB of loads in flight

// ---- Which groups ----

// A distance in groups, and the same in columns and elements, if it does not end in another row.
struct Step {
  int64_t groups = 0;
  int64_t elements = 0;
  int columns = 0;  // less than those of a row
};

// The groups of all rows, which are numbered row by row, and the steps of a lane through them.
struct GroupGrid {
  int64_t num_groups;  // of all rows
  int columns;         // groups of a row
  int width;           // D
  int to_next_row;  // elements from a row's group to the same column of the next row, if the last
                    // group is whole, minus those; at most 0
  Step next;        // to the next group that a lane takes together with this one
  Step jump;        // from the last of these to the first one of the next round
};

// Groups that a block takes at a time, divided by kGroupsPerLane.
constexpr int64_t stripe(int lanes) {
  return kThreads / lanes;
}

GroupGrid grid_of(const Shape& shape, int64_t group_size, int lanes, unsigned* blocks) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  const int64_t D = shape[1];
  const int64_t columns = (D + group_size - 1) / group_size;
  const int64_t num_groups = shape[0] * columns;
  const int64_t per_block = kGroupsPerLane * stripe(lanes);
  const int64_t num_blocks =
      std::clamp<int64_t>((num_groups + per_block - 1) / per_block, 1, kMaxBlocks);
  *blocks = static_cast<unsigned>(num_blocks);
  const auto step = [&](int64_t groups) -> Step {
    const int64_t row = groups / columns;
    const int64_t column = groups % columns;
    return {groups, row * D + column * group_size, static_cast<int>(column)};
  };
  return {.num_groups = num_groups,
          .columns = static_cast<int>(columns),
          .width = static_cast<int>(D),
          .to_next_row = static_cast<int>(D - columns * group_size),
          .next = step(stripe(lanes)),
          .jump = step(num_blocks * per_block - (kGroupsPerLane - 1) * stripe(lanes))};
}

// A lane's vector of a group, perhaps beyond the last group.
struct Place {
  int64_t group;
  int64_t element;  // the first one of the vector
  int column;       // of the group, in its row

  __device__ void advance(const GroupGrid& grid, const Step& step) {
    group += step.groups;
    element += step.elements;
    column += step.columns;
    if (column >= grid.columns) {
      column -= grid.columns;
      element += grid.to_next_row;
    }
  }
};

template <int kGroup, int kVector>
__device__ Place first_place(const GroupGrid& grid) {
  constexpr int kLanes = kGroup / kVector;
  const int64_t group = int64_t{blockIdx.x} * (kGroupsPerLane * (kThreads / kLanes)) +
                        static_cast<int>(threadIdx.x) / kLanes;
  // A division of 64-bit numbers takes as long as rounding a vector.
  const int64_t row = group >> 32 == 0
                          ? static_cast<uint32_t>(group) / static_cast<uint32_t>(grid.columns)
                          : group / grid.columns;
  const auto column = static_cast<int>(group - row * grid.columns);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  return {group, row * grid.width + int64_t{column} * kGroup + lane * kVector, column};
}

// ---- Vectors ----

// A lane's vector: its first element, and how many are inside the row.
struct Part {
  int64_t element;
  int count;
};

template <int kGroup, int kVector>
__device__ Part part_of(const GroupGrid& grid, const Place& place) {
  constexpr int kLanes = kGroup / kVector;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int rest = grid.width - place.column * kGroup - lane * kVector;
  const int inside = rest < 0 ? 0 : rest > kVector ? kVector : rest;
  return {place.element, place.group < grid.num_groups ? inside : 0};
}

// kWhole: a vector is inside its row or outside, and aligned; else single elements are moved.
template <bool kWhole, typename Element, int kVector>
__device__ cuda::RowVector<Element, kVector> load(const Element* from, const Part& part) {
  using Vector = cuda::RowVector<Element, kVector>;
  Vector value{};
  if constexpr (kWhole) {
    if (part.count > 0) {
      value = cuda::load_once(reinterpret_cast<const Vector*>(from + part.element));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < part.count) value.elements[i] = from[part.element + i];
    }
  }
  return value;
}

template <bool kWhole, typename Element, int kVector>
__device__ void store(Element* to, const Part& part,
                      const cuda::RowVector<Element, kVector>& value) {
  using Vector = cuda::RowVector<Element, kVector>;
  if constexpr (kWhole) {
    if (part.count > 0) *reinterpret_cast<Vector*>(to + part.element) = value;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < part.count) to[part.element + i] = value.elements[i];
    }
  }
}

// ---- Magnitudes ----

// The largest magnitude of some values, as integers: one fp32 value, or two of 16 bits.
template <typename Element, int kVector>
__device__ uint32_t largest(const cuda::RowVector<Element, kVector>& x) {
  constexpr int kWords = kVector * static_cast<int>(sizeof(Element)) / 4;
  uint32_t words[kWords];
  __builtin_memcpy(words, &x, sizeof(words));
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(Element) == 4) {
      most = max(most, words[i] & 0x7fffffffu);
    } else {
      most = __vmaxu2(most, words[i] & 0x7fff7fffu);
    }
  }
  return most;
}

// The largest magnitude of the lanes that share a group, as the bits of a float. Every thread of
// the warp takes part.
template <typename Element, int kLanes>
__device__ uint32_t amax_bits(uint32_t most) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, most, distance);
    if constexpr (sizeof(Element) == 4) {
      most = max(most, other);
    } else {
      most = __vmaxu2(most, other);
    }
  }
  if constexpr (sizeof(Element) == 4) {
    return most;
  } else {
    const auto half = static_cast<uint16_t>(max(most & 0xffffu, most >> 16));
    return __float_as_uint(to_float(Element{half}));
  }
}

// ---- Rounding ----

// Two values as fp8, `first` in the low byte. REQUIRES: not NaN.
__device__ uint32_t round_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return to_f8e4m3(first).bits | static_cast<uint32_t>(to_f8e4m3(second).bits) << 8;
#endif
}

template <typename Element, int kVector>
__device__ cuda::RowVector<F8E4M3, kVector> round_values(const cuda::RowVector<Element, kVector>& x,
                                                         float factor) {
  cuda::RowVector<F8E4M3, kVector> rounded;
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const uint32_t pair = round_pair(__fmul_rn(to_float(x.elements[i]), factor),
                                     __fmul_rn(to_float(x.elements[i + 1]), factor));
    rounded.elements[i].bits = static_cast<uint8_t>(pair);
    rounded.elements[i + 1].bits = static_cast<uint8_t>(pair >> 8);
  }
  return rounded;
}

template <typename Element, int kVector>
__device__ cuda::RowVector<F8E4M3, kVector> round_nonfinite(
    const cuda::RowVector<Element, kVector>& x) {
  cuda::RowVector<F8E4M3, kVector> rounded;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float value = to_float(x.elements[i]);
    rounded.elements[i] = isnan(value) ? F8E4M3{0x7f} : to_f8e4m3(value);
  }
  return rounded;
}

// ---- Kernels ----

template <typename Element>
inline constexpr int kVectorOf = cuda::kWide<Element>;

template <typename Scale>
inline constexpr int kGroupOf = 128;
template <>
inline constexpr int kGroupOf<E8M0> = 32;

template <typename Element, typename Scale>
struct QuantiseCall {
  const Element* x;
  F8E4M3* values;
  Scale* scales;
  Fp8Scale scale;
  float amax_floor;
  GroupGrid grid;
};

// A lane rounds the elements of 16 bytes. Floor: sizeof(Element) + 1 bytes per element, and scales.
template <typename Element, typename Scale, bool kWhole>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    quantise_kernel(const __grid_constant__ QuantiseCall<Element, Scale> call) {
  constexpr int kGroup = kGroupOf<Scale>;
  constexpr int kVector = kVectorOf<Element>;
  constexpr int kLanes = kGroup / kVector;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const GroupGrid& grid = call.grid;
  Place place = first_place<kGroup, kVector>(grid);
  // The same number of rounds for all threads: the lanes of a warp exchange magnitudes.
  const int64_t first_of_block = place.group - static_cast<int>(threadIdx.x) / kLanes;
  const int64_t round_groups = grid.jump.groups + (kGroupsPerLane - 1) * grid.next.groups;
  for (int64_t first = first_of_block; first < grid.num_groups; first += round_groups) {
    cuda::RowVector<Element, kVector> x[kGroupsPerLane];
    Part parts[kGroupsPerLane];
    const int64_t group = place.group;
#pragma unroll
    for (int i = 0; i < kGroupsPerLane; ++i) {
      if (i > 0) place.advance(grid, grid.next);
      parts[i] = part_of<kGroup, kVector>(grid, place);
      x[i] = load<kWhole, Element, kVector>(call.x, parts[i]);
    }
#pragma unroll
    for (int i = 0; i < kGroupsPerLane; ++i) {
      const uint32_t amax = amax_bits<Element, kLanes>(largest(x[i]));
      const GroupScale scale = group_scale(amax, call.amax_floor, call.scale);
      store<kWhole>(
          call.values, parts[i],
          amax < kInfinityBits ? round_values(x[i], scale.factor) : round_nonfinite(x[i]));
      if (lane == 0 && parts[i].count > 0) {
        call.scales[group + i * grid.next.groups] = stored_scale<Scale>(scale.scale);
      }
    }
    place.advance(grid, grid.jump);
  }
}

template <typename Element, typename Scale>
struct DequantiseCall {
  const F8E4M3* values;
  const Scale* scales;
  Element* out;
  GroupGrid grid;
};

// A lane multiplies 8 values (4 for fp32). Floor: sizeof(Element) + 1 bytes per element, and
// scales.
template <typename Element, typename Scale, bool kWhole>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dequantise_kernel(const __grid_constant__ DequantiseCall<Element, Scale> call) {
  constexpr int kGroup = kGroupOf<Scale>;
  constexpr int kVector = kVectorOf<Element>;
  const GroupGrid& grid = call.grid;
  Place place = first_place<kGroup, kVector>(grid);
  while (place.group < grid.num_groups) {
    cuda::RowVector<F8E4M3, kVector> values[kGroupsPerLane];
    float scales[kGroupsPerLane];
    Part parts[kGroupsPerLane];
#pragma unroll
    for (int i = 0; i < kGroupsPerLane; ++i) {
      if (i > 0) place.advance(grid, grid.next);
      parts[i] = part_of<kGroup, kVector>(grid, place);
      values[i] = load<kWhole, F8E4M3, kVector>(call.values, parts[i]);
      scales[i] = parts[i].count > 0 ? to_float(call.scales[place.group]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kGroupsPerLane; ++i) {
      cuda::RowVector<Element, kVector> out;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        out.elements[j] = from_float<Element>(scaled(values[i].elements[j], scales[i]));
      }
      store<kWhole>(call.out, parts[i], out);
    }
    place.advance(grid, grid.jump);
  }
}

// ---- Launches ----

template <typename Element>
bool is_whole(const ConstTensorView& wide, const ConstTensorView& values) {
  constexpr int kVector = kVectorOf<Element>;
  return wide.shape[1] % kVector == 0 && reinterpret_cast<uintptr_t>(wide.data) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(values.data) % kVector == 0;
}

template <typename Element, typename Scale>
void launch(const QuantiseRowsArgs& a) {
  unsigned blocks = 0;
  const QuantiseCall<Element, Scale> call{
      .x = pointer<Element>(a.x),
      .values = pointer<F8E4M3>(a.values),
      .scales = pointer<Scale>(a.scales),
      .scale = a.scale,
      .amax_floor = a.amax_floor,
      .grid = grid_of(a.x.shape, kGroupOf<Scale>, kGroupOf<Scale> / kVectorOf<Element>, &blocks)};
  const auto kernel = is_whole<Element>(a.x, a.values) ? quantise_kernel<Element, Scale, true>
                                                       : quantise_kernel<Element, Scale, false>;
  kernel<<<blocks, kThreads, 0, cuda::handle_of(a.stream)>>>(call);
  CROSSDOCK_CUDA(cudaGetLastError());
}

template <typename Element, typename Scale>
void launch(const DequantiseRowsArgs& a) {
  unsigned blocks = 0;
  const DequantiseCall<Element, Scale> call{
      .values = pointer<F8E4M3>(a.values),
      .scales = pointer<Scale>(a.scales),
      .out = pointer<Element>(a.out),
      .grid = grid_of(a.out.shape, kGroupOf<Scale>, kGroupOf<Scale> / kVectorOf<Element>, &blocks)};
  const auto kernel = is_whole<Element>(a.out, a.values) ? dequantise_kernel<Element, Scale, true>
                                                         : dequantise_kernel<Element, Scale, false>;
  kernel<<<blocks, kThreads, 0, cuda::handle_of(a.stream)>>>(call);
  CROSSDOCK_CUDA(cudaGetLastError());
}

template <typename Args>
void launch_for(const Args& args, const ConstTensorView& wide) {
  const cuda::CallGuard guard(wide.device.index);
  cuda::with_element(wide.dtype, [&](auto element) {
    if (args.scales.dtype == DType::kF32) {
      launch<decltype(element), float>(args);
    } else {
      launch<decltype(element), E8M0>(args);
    }
  });
}

template <typename Element, typename Scale>
void load_kernels_of() {
  cuda::load_kernels(quantise_kernel<Element, Scale, true>, quantise_kernel<Element, Scale, false>,
                     dequantise_kernel<Element, Scale, true>,
                     dequantise_kernel<Element, Scale, false>);
}

template <typename Element>
void load_kernels_of() {
  load_kernels_of<Element, float>();
  load_kernels_of<Element, E8M0>();
}

}  // namespace

void load_fp8_rows() {
  load_kernels_of<float>();
  load_kernels_of<BF16>();
  load_kernels_of<F16>();
}

void quantise_rows_on_device(const QuantiseRowsArgs& args) {
  launch_for(args, args.x);
}

void dequantise_rows_on_device(const DequantiseRowsArgs& args) {
  launch_for(args, args.out);
}

}  // namespace crossdock::ops
