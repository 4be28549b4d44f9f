#include <algorithm>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "core/cuda/row_vector.cuh"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "ops/cuda/device_rows.hpp"

namespace crossdock::ops {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kWordsPerThread = 4;  // at least, if a block of rows has that many
constexpr int64_t kMaxPieces = 1024;    // of a block of rows

// Blocks are passed as a kernel argument, which is limited to 4 KiB: no memory to allocate, copy or
// keep, and a graph can capture the launch.
struct BlockTable {
  static constexpr size_t kCapacity = 128;
  BlockCopy blocks[kCapacity];
};

// Thread blocks with the same y copy the block of rows y, taking pieces in turn; a thread copies
// single words.
template <typename Word>
__global__ void copy_blocks_kernel(const Word* from, Word* to,
                                   const __grid_constant__ BlockTable table,
                                   int64_t words_per_row) {
  const BlockCopy& block = table.blocks[blockIdx.y];
  const Word* source = from + block.from * words_per_row;
  Word* target = to + block.to * words_per_row;
  const int64_t num_words = block.count * words_per_row;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_words; i += stride) {
    target[i] = source[i];
  }
}

template <typename Word>
void launch(const CopyBlocksArgs& args, cudaStream_t stream) {
  const int64_t words_per_row = args.row_bytes / static_cast<int64_t>(sizeof(Word));
  for (size_t first = 0; first < args.blocks.size(); first += BlockTable::kCapacity) {
    const auto part = args.blocks.subspan(
        first, std::min(size_t{BlockTable::kCapacity}, args.blocks.size() - first));
    BlockTable table;
    std::copy(part.begin(), part.end(), table.blocks);
    int64_t most_rows = 0;
    for (const BlockCopy& block : part) most_rows = std::max(most_rows, block.count);
    const int64_t pieces = most_rows * words_per_row / (kThreads * kWordsPerThread);
    const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(pieces, 1, kMaxPieces)),
                    static_cast<unsigned>(part.size()));
    copy_blocks_kernel<Word>
        <<<grid, kThreads, 0, stream>>>(reinterpret_cast<const Word*>(args.from),
                                        reinterpret_cast<Word*>(args.to), table, words_per_row);
    CROSSDOCK_CUDA(cudaGetLastError());
  }
}

bool is_multiple(const CopyBlocksArgs& args, int64_t size) {
  const auto from = reinterpret_cast<uintptr_t>(args.from);
  const auto to = reinterpret_cast<uintptr_t>(args.to);
  const auto word = static_cast<uintptr_t>(size);
  return from % word == 0 && to % word == 0 && args.row_bytes % size == 0;
}

// A thread adds vectors of kCount elements in turn. Floor: 3 * sizeof(Element) bytes per element.
template <typename Element, int kCount>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const Element* term, Element* sum, int64_t num_vectors) {
  using Vector = cuda::RowVector<Element, kCount>;
  const auto* terms = reinterpret_cast<const Vector*>(term);
  auto* sums = reinterpret_cast<Vector*>(sum);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_vectors; i += stride) {
    const Vector added = cuda::load_once(terms + i);
    Vector values = cuda::load_once(sums + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      values.elements[j] =
          cuda::narrow<Element>(cuda::widen(values.elements[j]) + cuda::widen(added.elements[j]));
    }
    cuda::store_once(sums + i, values);
  }
}

// Blocks whose threads take num_vectors vectors in turn.
unsigned num_blocks(int64_t num_vectors) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  return static_cast<unsigned>(
      std::clamp<int64_t>((num_vectors + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

template <typename Element, int kCount>
void launch_add(const AddArgs& args, cudaStream_t stream) {
  const int64_t num_vectors = args.sum.num_elements() / kCount;
  add_kernel<Element, kCount><<<num_blocks(num_vectors), kThreads, 0, stream>>>(
      pointer<Element>(args.term), pointer<Element>(args.sum), num_vectors);
  CROSSDOCK_CUDA(cudaGetLastError());
}

// A thread rounds vectors of kCount elements in turn. Floor: 4 + sizeof(Element) bytes per element.
template <typename Element, int kCount>
__global__ void __launch_bounds__(kThreads)
    round_kernel(const float* sums, Element* out, int64_t num_vectors) {
  const auto* from = reinterpret_cast<const cuda::RowVector<float, kCount>*>(sums);
  auto* to = reinterpret_cast<cuda::RowVector<Element, kCount>*>(out);
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < num_vectors; i += stride) {
    const auto values = cuda::load_once(from + i);
    cuda::RowVector<Element, kCount> rounded;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      rounded.elements[j] = cuda::narrow<Element>(values.elements[j]);
    }
    to[i] = rounded;
  }
}

template <typename Element, int kCount>
void launch_round(const ConstTensorView& sums, const TensorView& out, cudaStream_t stream) {
  const int64_t num_vectors = out.num_elements() / kCount;
  round_kernel<Element, kCount><<<num_blocks(num_vectors), kThreads, 0, stream>>>(
      pointer<float>(sums), pointer<Element>(out), num_vectors);
  CROSSDOCK_CUDA(cudaGetLastError());
}

template <typename Element>
void launch_widest_round(const ConstTensorView& sums, const TensorView& out, cudaStream_t stream) {
  constexpr int kCount = cuda::kWide<float>;
  const bool is_aligned = reinterpret_cast<uint64_t>(sums.data) % (kCount * sizeof(float)) == 0 &&
                          reinterpret_cast<uint64_t>(out.data) % (kCount * sizeof(Element)) == 0;
  if (is_aligned && out.num_elements() % kCount == 0) {
    launch_round<Element, kCount>(sums, out, stream);
  } else {
    launch_round<Element, 1>(sums, out, stream);
  }
}

__global__ void write_segment_kernel(int64_t num_rows, int64_t* memory) {
  memory[0] = 0;
  memory[1] = num_rows;
  memory[2] = num_rows;
}

template <typename Element>
void load_add() {
  cuda::load_kernels(add_kernel<Element, cuda::kWide<Element>>, add_kernel<Element, 1>);
}

}  // namespace

void load_device_rows() {
  cuda::load_kernels(copy_blocks_kernel<uint4>, copy_blocks_kernel<uint32_t>,
                     copy_blocks_kernel<uint8_t>, write_segment_kernel);
  constexpr int kCount = cuda::kWide<float>;
  cuda::load_kernels(round_kernel<BF16, kCount>, round_kernel<BF16, 1>, round_kernel<F16, kCount>,
                     round_kernel<F16, 1>);
  load_add<float>();
  load_add<BF16>();
  load_add<F16>();
}

void add_on_device(const AddArgs& args, Stream stream) {
  CROSSDOCK_ASSERT(args.term.dtype == args.sum.dtype && args.term.shape == args.sum.shape);
  if (args.sum.num_elements() == 0) return;
  const cuda::CallGuard guard(args.sum.device.index);
  const uint64_t bits = reinterpret_cast<uint64_t>(args.term.data) |
                        reinterpret_cast<uint64_t>(args.sum.data) |
                        static_cast<uint64_t>(args.sum.num_bytes());
  cuda::with_element(args.sum.dtype, [&]<typename Element>(Element) {
    if (bits % sizeof(uint4) == 0) {
      launch_add<Element, cuda::kWide<Element>>(args, cuda::handle_of(stream));
    } else {
      launch_add<Element, 1>(args, cuda::handle_of(stream));
    }
  });
}

void round_on_device(const ConstTensorView& sums, const TensorView& out, Stream stream) {
  CROSSDOCK_ASSERT(sums.dtype == DType::kF32 && sums.shape == out.shape);
  CROSSDOCK_ASSERT(out.dtype == DType::kBF16 || out.dtype == DType::kF16);
  if (out.num_elements() == 0) return;
  const cuda::CallGuard guard(out.device.index);
  if (out.dtype == DType::kBF16) {
    launch_widest_round<BF16>(sums, out, cuda::handle_of(stream));
  } else {
    launch_widest_round<F16>(sums, out, cuda::handle_of(stream));
  }
}

Segments write_segment_on_device(int64_t num_rows, const TensorView& memory, Stream stream) {
  const cuda::CallGuard guard(memory.device.index);
  auto* words = pointer<int64_t>(memory);
  write_segment_kernel<<<1, 1, 0, cuda::handle_of(stream)>>>(num_rows, words);
  CROSSDOCK_CUDA(cudaGetLastError());
  return {.starts = words, .counts = words + 2, .num_segments = 1, .device = memory.device};
}

void copy_blocks_on_device(const CopyBlocksArgs& args, Device device, Stream stream) {
  const cuda::CallGuard guard(device.index);
  if (is_multiple(args, sizeof(uint4))) {
    launch<uint4>(args, cuda::handle_of(stream));
  } else if (is_multiple(args, sizeof(uint32_t))) {
    launch<uint32_t>(args, cuda::handle_of(stream));
  } else {
    launch<uint8_t>(args, cuda::handle_of(stream));
  }
}

void fill_on_device(std::byte* data, uint8_t value, int64_t num_bytes, Device device,
                    Stream stream) {
  const cuda::CallGuard guard(device.index);
  CROSSDOCK_CUDA(
      cudaMemsetAsync(data, value, static_cast<size_t>(num_bytes), cuda::handle_of(stream)));
}

}  // namespace crossdock::ops
