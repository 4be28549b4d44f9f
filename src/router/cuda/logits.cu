#include <cstddef>

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/load_kernels.hpp"
#include "ops/fma_product.cuh"
#include "ops/mma_product.cuh"
#include "router/cuda/gate_bias.cuh"
#include "router/cuda/hopper/logits.hpp"
#include "router/cuda/logits.hpp"
#include "router/cuda/token_matrix.cuh"

namespace crossdock::router {
namespace {

// Tiles of tensor-core products, in tokens x experts. All give the same bits.
using LargeTile = ops::MmaTile<128, 128, 2, 4, 4, 1>;
using MiddleTile = ops::MmaTile<64, 128, 2, 4, 4, 2>;
using SquareTile = ops::MmaTile<64, 64, 2, 2, 4, 3>;
using SmallTile = ops::MmaTile<32, 32, 2, 2, 6, 4>;

// The first token and expert of a block's tile. Blocks of the same tokens are neighbours, so that x
// is read from memory once.
struct TilePlace {
  int64_t token;
  int64_t expert;

  template <typename Tile>
  static __device__ TilePlace of(int64_t E) {
    const int64_t across = (E + Tile::kColumns - 1) / Tile::kColumns;
    return {blockIdx.x / across * Tile::kRows, blockIdx.x % across * Tile::kColumns};
  }
};

__device__ void store_logit(const LogitsArgs& args, int64_t token, int64_t e, float value) {
  if (token < args.T && e < args.E) args.logits[token * args.E + e] = value + bias_of(args, e);
}

// A block computes one tile.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    fma_logits_kernel(const __grid_constant__ LogitsArgs args, ops::DeviceMatrix x,
                      ops::DeviceMatrix gate) {
  const TilePlace place = TilePlace::of<Tile>(args.E);
  const ops::OperandByRows<TokenMatrix> a{{x, args.jitter, nullptr}, args.T};
  const ops::OperandByRows<ops::DeviceMatrix> b{gate, args.E};
  ops::fma_product<Tile>(a, b, {place.token, place.expert, 0, args.D},
                         [&](int64_t token, int64_t e, const float(&values)[4]) {
#pragma unroll
                           for (int j = 0; j < 4; ++j) store_logit(args, token, e + j, values[j]);
                         });
}

// A block computes one tile.
template <typename Element, typename Tile, bool kCopiesVectors>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    mma_logits_kernel(const __grid_constant__ LogitsArgs args) {
  extern __shared__ __align__(16) std::byte logits_memory[];
  const TilePlace place = TilePlace::of<Tile>(args.E);
  const ops::MmaOperands<Element> operands{static_cast<const Element*>(args.x),
                                           static_cast<const Element*>(args.gate), args.T, args.E,
                                           args.D};
  ops::MmaProduct<Element, Tile, kCopiesVectors> product(operands, place.token, place.expert,
                                                         reinterpret_cast<Element*>(logits_memory));
  product.run([&](int64_t token, int64_t e, float first, float second) {
    store_logit(args, token, e, first);
    store_logit(args, token, e + 1, second);
  });
}

template <typename Tile>
int64_t num_tiles(const LogitsArgs& args) {
  return (args.T + Tile::kRows - 1) / Tile::kRows *
         ((args.E + Tile::kColumns - 1) / Tile::kColumns);
}

template <typename Tile>
void launch_fma(const LogitsArgs& args, cudaStream_t stream) {
  fma_logits_kernel<Tile>
      <<<static_cast<unsigned>(num_tiles<Tile>(args)), Tile::kThreads, 0, stream>>>(
          args, ops::device_matrix(args.x, args.x_dtype, args.D),
          ops::device_matrix(args.gate, args.gate_dtype, args.D));
}

template <typename Element, typename Tile, bool kCopiesVectors>
void launch_mma(const LogitsArgs& args, cudaStream_t stream) {
  mma_logits_kernel<Element, Tile, kCopiesVectors>
      <<<static_cast<unsigned>(num_tiles<Tile>(args)), Tile::kThreads, Tile::kSharedBytes,
         stream>>>(args);
}

template <typename Tile>
bool fits_in_shared_memory() {
  return cuda::shared_memory_per_block(cuda::current_device()) >= Tile::kSharedBytes;
}

// Whether a tile leaves hardly any SM without work.
template <typename Tile>
bool is_worthwhile(const LogitsArgs& args) {
  const int64_t num_sms = cuda::num_sms(cuda::current_device());
  return fits_in_shared_memory<Tile>() && num_tiles<Tile>(args) * 10 >= num_sms * 9;
}

// With the largest tile that keeps the GPU busy and is not mostly empty.
template <typename Element>
void launch_mma(const LogitsArgs& args, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.gate) |
                    static_cast<uintptr_t>(args.D * 2);
  if (bits % 16 != 0) {
    launch_mma<Element, SmallTile, false>(args, stream);
  } else if (args.E > 64 && is_worthwhile<LargeTile>(args)) {
    launch_mma<Element, LargeTile, true>(args, stream);
  } else if (args.E > 64 && is_worthwhile<MiddleTile>(args)) {
    launch_mma<Element, MiddleTile, true>(args, stream);
  } else if (args.E > 32 && is_worthwhile<SquareTile>(args)) {
    launch_mma<Element, SquareTile, true>(args, stream);
  } else {
    launch_mma<Element, SmallTile, true>(args, stream);
  }
}

template <typename Element, typename Tile, bool kCopiesVectors>
void load_mma() {
  if (!fits_in_shared_memory<Tile>()) return;
  cuda::load_kernels(mma_logits_kernel<Element, Tile, kCopiesVectors>);
  CROSSDOCK_CUDA(cudaFuncSetAttribute(mma_logits_kernel<Element, Tile, kCopiesVectors>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      Tile::kSharedBytes));
}

template <typename Element>
void load_mma() {
  load_mma<Element, LargeTile, true>();
  load_mma<Element, MiddleTile, true>();
  load_mma<Element, SquareTile, true>();
  load_mma<Element, SmallTile, true>();
  load_mma<Element, SmallTile, false>();
}

}  // namespace

void load_logits() {
  cuda::load_kernels(fma_logits_kernel<ops::WideFmaTile>, fma_logits_kernel<ops::SmallFmaTile>);
  load_mma<BF16>();
  load_mma<F16>();
}

void launch_logits(const LogitsArgs& args, ops::hopper::TensorMaps* maps, cudaStream_t stream) {
  const bool is_16_bit = args.x_dtype == args.gate_dtype && args.x_dtype != DType::kF32;
  const bool on_tensor_cores = is_16_bit && args.jitter.size == 0.0f;
  if (args.T > 0 && on_tensor_cores && maps != nullptr && hopper::takes(args)) {
    return hopper::launch_logits(args, *maps, stream);
  }
  CROSSDOCK_CUDA(cudaMemsetAsync(
      args.counts, 0, static_cast<size_t>(args.num_counts) * sizeof(*args.counts), stream));
  if (args.T == 0) return;
  if (on_tensor_cores) {
    if (args.x_dtype == DType::kBF16) {
      launch_mma<BF16>(args, stream);
    } else {
      launch_mma<F16>(args, stream);
    }
  } else if (args.E > 32) {
    launch_fma<ops::WideFmaTile>(args, stream);
  } else {
    launch_fma<ops::SmallFmaTile>(args, stream);
  }
  CROSSDOCK_CUDA(cudaGetLastError());
}

}  // namespace crossdock::router
