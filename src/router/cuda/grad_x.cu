#include <cstddef>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "router/cuda/kernels.hpp"
#include "router/cuda/split_product.cuh"
#include "router/cuda/token_matrix.cuh"

namespace crossdock::router {
namespace {

using GradXTile = SplitTile<64>;

// A block's tile of grad_x in shared memory, behind the operands: what is there already is read in
// advance, and results are stored in whole vectors.
template <typename Element>
struct TileOfGradX {
  static constexpr int kPitch = GradXTile::kColumns + 16 / static_cast<int>(sizeof(Element));
  static constexpr int kSharedBytes =
      GradXTile::kSharedBytes + GradXTile::kRows * kPitch * static_cast<int>(sizeof(Element));
};

// Adds kCount results of a row of grad_x, or stores them.
template <typename Element, int kCount>
__device__ void store_neighbours(const GradXArgs& args, int64_t token, int64_t d,
                                 const float (&values)[kCount]) {
  struct alignas(kCount * sizeof(Element)) Neighbours {
    Element elements[kCount];
  };
  Element* to = static_cast<Element*>(args.grad_x) + token * args.D + d;
  const bool is_whole =
      d + kCount <= args.D && reinterpret_cast<uintptr_t>(to) % sizeof(Neighbours) == 0;
  Neighbours all{};
  if (args.accumulates && is_whole) all = *reinterpret_cast<const Neighbours*>(to);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (args.accumulates && !is_whole && d + j < args.D) all.elements[j] = to[j];
    const float before = args.accumulates ? to_float(all.elements[j]) : 0.0f;
    all.elements[j] = from_float<Element>(args.accumulates ? before + values[j] : values[j]);
  }
  if (is_whole) {
    *reinterpret_cast<Neighbours*>(to) = all;
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if (d + j < args.D) to[j] = all.elements[j];
  }
}

// Multiplies kCount results by the jitter and stores those that are inside grad_x.
template <int kCount>
__device__ void store_grad_x(const GradXArgs& args, int64_t token, int64_t d,
                             float (&values)[kCount]) {
  if (token >= args.T || d >= args.D) return;
  if (args.jitter.size != 0.0f) {
    const TokenJitter<float> jitter = jitter_of_token(args.jitter, token);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] *= jitter.factor(d + j);
  }
  if (args.x_dtype == DType::kF32) return store_neighbours<float>(args, token, d, values);
  if (args.x_dtype == DType::kBF16) return store_neighbours<BF16>(args, token, d, values);
  store_neighbours<F16>(args, token, d, values);
}

// The first token and column of a block's tile.
template <typename Tile>
__device__ int64_t first_token_of_tile(int64_t D) {
  return blockIdx.x / ((D + Tile::kColumns - 1) / Tile::kColumns) * Tile::kRows;
}
template <typename Tile>
__device__ int64_t first_column_of_tile(int64_t D) {
  return blockIdx.x % ((D + Tile::kColumns - 1) / Tile::kColumns) * Tile::kColumns;
}

// A block computes one tile.
__global__ void __launch_bounds__(WideFmaTile::kThreads)
    fma_grad_x_kernel(const __grid_constant__ GradXArgs args, DeviceMatrix grad_logits,
                      DeviceMatrix gate) {
  using Tile = WideFmaTile;
  const OperandByRows<DeviceMatrix> a{grad_logits, args.T};
  const OperandByColumns<DeviceMatrix> b{gate, args.D};
  const FmaPart part{first_token_of_tile<Tile>(args.D), first_column_of_tile<Tile>(args.D), 0,
                     args.E};
  fma_product<Tile>(a, b, part, [&](int64_t token, int64_t d, float(&values)[4]) {
    store_grad_x(args, token, d, values);
  });
}

__device__ SplitOperands split_operands(const GradXArgs& args) {
  return {args.grad_logits, static_cast<const BF16*>(args.gate), nullptr, args.T, args.D, args.E};
}

// A block computes one tile. Floor: T * D elements, read and written if they are added to.
// REQUIRES: rows of all matrices are aligned to 16 bytes.
template <typename Element>
__global__ void __launch_bounds__(GradXTile::kThreads, GradXTile::kBlocksPerSm)
    split_grad_x_kernel(const __grid_constant__ GradXArgs args) {
  using Tile = GradXTile;
  constexpr int kPitch = TileOfGradX<Element>::kPitch;
  constexpr int kCount = 16 / static_cast<int>(sizeof(Element));
  constexpr int kChunks = Tile::kColumns / kCount;
  extern __shared__ __align__(16) std::byte grad_x_memory[];
  auto* const tile = reinterpret_cast<Element*>(grad_x_memory + Tile::kSharedBytes);
  auto* const grad_x = static_cast<Element*>(args.grad_x);
  const int64_t first_token = first_token_of_tile<Tile>(args.D);
  const int64_t first_column = first_column_of_tile<Tile>(args.D);
  if (args.accumulates) {  // arrives with the first operands
    copy_part<Tile::kRows, Tile::kColumns, kPitch, Tile::kThreads, true>(
        grad_x, {first_token, args.T, first_column, args.D, args.D}, tile);
  }
  SplitProduct<Tile, false, true> product(split_operands(args),
                                          {first_token, first_column, 0, args.E}, grad_x_memory);
  product.run([&](int64_t token, int64_t d, float first, float second) {
    if (args.jitter.size != 0.0f && token < args.T) {
      const TokenJitter<float> jitter = jitter_of_token(args.jitter, token);
      first *= jitter.factor(d);
      second *= jitter.factor(d + 1);
    }
    Element* const to = tile + (token - first_token) * kPitch + (d - first_column);
    to[0] = from_float<Element>(args.accumulates ? to_float(to[0]) + first : first);
    to[1] = from_float<Element>(args.accumulates ? to_float(to[1]) + second : second);
  });
  __syncthreads();
#pragma unroll 4
  for (int chunk = static_cast<int>(threadIdx.x); chunk < Tile::kRows * kChunks;
       chunk += Tile::kThreads) {
    const int row = chunk / kChunks;
    const int column = chunk % kChunks * kCount;
    if (first_token + row >= args.T || first_column + column >= args.D) continue;
    *reinterpret_cast<uint4*>(grad_x + (first_token + row) * args.D + first_column + column) =
        *reinterpret_cast<const uint4*>(tile + row * kPitch + column);
  }
}

// The same for rows that are not aligned.
__global__ void __launch_bounds__(GradXTile::kThreads, GradXTile::kBlocksPerSm)
    unaligned_split_grad_x_kernel(const __grid_constant__ GradXArgs args) {
  extern __shared__ __align__(16) std::byte grad_x_memory[];
  SplitProduct<GradXTile, false, false> product(
      split_operands(args),
      {first_token_of_tile<GradXTile>(args.D), first_column_of_tile<GradXTile>(args.D), 0, args.E},
      grad_x_memory);
  product.run([&](int64_t token, int64_t d, float first, float second) {
    float values[2] = {first, second};
    store_grad_x(args, token, d, values);
  });
}

template <typename Tile>
unsigned num_grad_x_tiles(const GradXArgs& args) {
  return static_cast<unsigned>((args.T + Tile::kRows - 1) / Tile::kRows *
                               ((args.D + Tile::kColumns - 1) / Tile::kColumns));
}

template <typename Element>
void load_split() {
  cuda::load_kernels(split_grad_x_kernel<Element>);
  CROSSDOCK_CUDA(cudaFuncSetAttribute(split_grad_x_kernel<Element>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      TileOfGradX<Element>::kSharedBytes));
}

template <typename Element>
void launch_split(const GradXArgs& args, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(args.grad_logits) |
                    reinterpret_cast<uintptr_t>(args.gate) |
                    reinterpret_cast<uintptr_t>(args.grad_x) | static_cast<uintptr_t>(args.E * 4) |
                    static_cast<uintptr_t>(args.D * 2);
  const unsigned tiles = num_grad_x_tiles<GradXTile>(args);
  if (bits % 16 == 0) {
    split_grad_x_kernel<Element>
        <<<tiles, GradXTile::kThreads, TileOfGradX<Element>::kSharedBytes, stream>>>(args);
  } else {
    unaligned_split_grad_x_kernel<<<tiles, GradXTile::kThreads, GradXTile::kSharedBytes, stream>>>(
        args);
  }
}

}  // namespace

void load_grad_x() {
  cuda::load_kernels(fma_grad_x_kernel, unaligned_split_grad_x_kernel);
  CROSSDOCK_CUDA(cudaFuncSetAttribute(unaligned_split_grad_x_kernel,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      GradXTile::kSharedBytes));
  load_split<float>();
  load_split<BF16>();
  load_split<F16>();
}

void launch_grad_x(const GradXArgs& args, cudaStream_t stream) {
  if (args.T == 0) return;
  if (args.gate_dtype != DType::kBF16) {
    fma_grad_x_kernel<<<num_grad_x_tiles<WideFmaTile>(args), WideFmaTile::kThreads, 0, stream>>>(
        args, device_matrix(args.grad_logits, DType::kF32, args.E),
        device_matrix(args.gate, args.gate_dtype, args.D));
  } else if (args.x_dtype == DType::kF32) {
    launch_split<float>(args, stream);
  } else if (args.x_dtype == DType::kBF16) {
    launch_split<BF16>(args, stream);
  } else {
    launch_split<F16>(args, stream);
  }
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::router
