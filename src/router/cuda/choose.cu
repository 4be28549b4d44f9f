#include <algorithm>
#include <climits>

#include "core/cuda/device.hpp"
#include "core/cuda/launch.hpp"
#include "router/cuda/kernels.hpp"
#include "router/cuda/score_row.cuh"

namespace crossdock::router {
namespace {

constexpr int kChooseBlocksPerSm = 2;  // few blocks, so that few counts are added up
// Counts that a block adds up in shared memory; with more it adds each route to the total at once.
constexpr int64_t kMaxBlockCounts = 4096;

// A score as a number that compares as Choice does: 0 is closed, 1 is NaN, -0 equals +0.
__device__ uint32_t key_of(float score) {
  const auto bits = static_cast<uint32_t>(ordered_bits(__float_as_int(score + 0.0f)));
  return isnan(score) ? 1 : bits ^ 0x80000000u;
}

// The elements of a row by their keys, of which the best are taken one after the other.
template <int kPer>
class OpenElements {
 public:
  __device__ explicit OpenElements(const uint32_t (&keys)[kPer]) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      keys_[i] = keys[i];
      places_[i] = element_of<kPer>(i);
    }
    if constexpr (kIsSorted) sort();
  }

  /// Closes the element with the largest key, the lowest of equals. True on the lane that holds it,
  /// with its place. REQUIRES: one is open.
  __device__ bool take_best(int32_t& place) {
    uint32_t best = keys_[0];
    place = kIsSorted ? places_[0] : element_of<kPer>(0);
    if constexpr (!kIsSorted) {
#pragma unroll
      for (int i = 1; i < kPer; ++i) {
        if (keys_[i] > best) {
          best = keys_[i];
          place = element_of<kPer>(i);
        }
      }
    }
    const uint32_t holders = __ballot_sync(~0u, best == __reduce_max_sync(~0u, best));
    const uint32_t own = 1u << lane_id();
    const bool is_here = (holders & (2 * own - 1)) == own;  // lower lanes have lower places
    if (is_here) close(place);
    return is_here;
  }

 private:
  // Whether a lane keeps its elements in the order in which they are taken.
  static constexpr bool kIsSorted = kPer <= 4;

  __device__ void sort() {
#pragma unroll
    for (int end = kPer - 1; end > 0; --end) {
#pragma unroll
      for (int i = 0; i < end; ++i) {
        if (keys_[i + 1] <= keys_[i]) continue;
        const uint32_t key = keys_[i];
        const int32_t place = places_[i];
        keys_[i] = keys_[i + 1];
        places_[i] = places_[i + 1];
        keys_[i + 1] = key;
        places_[i + 1] = place;
      }
    }
  }
  __device__ void close(int32_t place) {
    if constexpr (kIsSorted) {  // it is the first
#pragma unroll
      for (int i = 0; i + 1 < kPer; ++i) {
        keys_[i] = keys_[i + 1];
        places_[i] = places_[i + 1];
      }
      keys_[kPer - 1] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (element_of<kPer>(i) == place) keys_[i] = 0;
      }
    }
  }

  uint32_t keys_[kPer];
  int32_t places_[kPer];  // of the keys, if they are sorted
};

// The sum of the best `share` of `size` scores, the best first.
__device__ float group_score(const float* biased, int32_t size, int32_t share) {
  float sum = 0.0f;
  uint32_t last_key = UINT_MAX;
  int32_t last = 0;
  for (int32_t n = 0; n < min(share, size); ++n) {
    uint32_t best_key = 0;
    int32_t best = 0;
    for (int32_t i = 0; i < size; ++i) {
      const uint32_t key = key_of(biased[i]);
      const bool is_left = key < last_key || (key == last_key && i > last);
      if (is_left && key > best_key) {
        best_key = key;
        best = i;
      }
    }
    sum += biased[best];
    last_key = best_key;
    last = best;
  }
  return sum;
}

// Closes the experts of all but the best groups. A lane scores whole groups; `scratch` is a whole
// row of this warp.
template <int kPer>
__device__ void close_weak_groups(const ChooseArgs& args, const float (&biased)[kPer],
                                  float* scratch, uint32_t (&keys)[kPer]) {
  const int32_t E = args.rules.E;
  const int32_t num_groups = args.choice.num_groups;
  const int32_t size = E / num_groups;
  write_whole_row(biased, scratch);
  __syncwarp();
  uint32_t group_keys[kPer];  // a group has at least one expert, so there are not more
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t group = element_of<kPer>(i);
    group_keys[i] = group < num_groups
                        ? key_of(group_score(scratch + group * size, size, args.choice.group_share))
                        : 0;
  }
  __syncwarp();
  for (int32_t group = lane_id(); group < num_groups; group += 32) scratch[group] = 0.0f;
  __syncwarp();
  OpenElements<kPer> groups(group_keys);
  for (int32_t n = 0; n < args.choice.group_top_k; ++n) {
    int32_t group = 0;
    if (groups.take_best(group)) scratch[group] = 1.0f;  // kept
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (element_of<kPer>(i) < E && scratch[element_of<kPer>(i) / size] == 0.0f) keys[i] = 0;
  }
  __syncwarp();  // before the next token's scores
}

// The expert of slot `lane` by its score; -1 from slot K on.
template <int kPer>
__device__ int32_t best_expert(const ChooseArgs& args, const float (&scores)[kPer],
                               float* scratch) {
  float biased[kPer];
  uint32_t keys[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) biased[i] = scores[i];
  if (args.expert_bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int32_t e = element_of<kPer>(i);
      if (e < args.rules.E) biased[i] += args.expert_bias[e];
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    keys[i] = element_of<kPer>(i) < args.rules.E ? key_of(biased[i]) : 0;
  }
  if (args.choice.group_top_k < args.choice.num_groups) {
    close_weak_groups(args, biased, scratch, keys);
  }
  auto* const ids = reinterpret_cast<int32_t*>(scratch);  // of the slots
  OpenElements<kPer> experts(keys);
  for (int k = 0; k < args.rules.K; ++k) {
    int32_t id = 0;
    if (experts.take_best(id)) ids[k] = id;
  }
  __syncwarp();
  const int32_t id = lane_id() < args.rules.K ? ids[lane_id()] : -1;
  __syncwarp();  // before the scratch is used again
  return id;
}

// The expert that the caller forced on slot `lane`. Ids that are no experts stay so.
__device__ int32_t forced_expert(const ChooseArgs& args, int64_t token) {
  if (lane_id() >= args.rules.K) return -1;
  const int64_t route = token * args.rules.K + lane_id();
  if (!args.forced_ids_are_64_bit) return static_cast<const int32_t*>(args.forced_ids)[route];
  const int64_t id = static_cast<const int64_t*>(args.forced_ids)[route];
  return id >= -1 && id < args.rules.E ? static_cast<int32_t>(id) : INT_MAX;
}

// The token's sequence; -1: padding.
__device__ int32_t sequence_of(const ChooseArgs& args, int64_t token) {
  if (args.mask != nullptr && args.mask[token]) return -1;
  const int32_t sequence = args.sequence_ids != nullptr ? args.sequence_ids[token] : 0;
  return sequence >= 0 && sequence < args.num_sequences ? sequence : -1;
}

template <int kPer>
__device__ int32_t expert_of_slot(const ChooseArgs& args, const float (&scores)[kPer],
                                  int64_t token, float* scratch) {
  if (args.forced_ids != nullptr) return forced_expert(args, token);
  if (args.choice.force_balance) {
    const int64_t route = token * args.rules.K + lane_id();
    return lane_id() < args.rules.K ? static_cast<int32_t>(route % args.rules.E) : -1;
  }
  return best_expert(args, scores, scratch);
}

// Counts the routes of a block: in shared memory if there is room, else in the totals.
class RouteCounter {
 public:
  __device__ RouteCounter(const ChooseArgs& args, uint32_t* block_counts, bool has_room)
      : args_(args), block_counts_(block_counts), has_room_(has_room) {
    if (!has_room_) return;
    for (int64_t i = threadIdx.x; i < size(); i += blockDim.x) block_counts_[i] = 0;
    __syncthreads();
  }

  __device__ void add_route(int32_t sequence, int32_t expert) const {
    add(static_cast<int64_t>(sequence) * args_.rules.E + expert);
  }
  __device__ void add_token(int32_t sequence) const {
    add(args_.num_sequences * args_.rules.E + sequence);
  }

  // All threads of the block must call it.
  __device__ void finish() const {
    if (!has_room_) return;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < size(); i += blockDim.x) {
      const unsigned long long count = block_counts_[i];
      if (count != 0) atomicAdd(args_.counts + i, count);
    }
  }

 private:
  __device__ int64_t size() const { return args_.num_sequences * (args_.rules.E + 1); }
  __device__ void add(int64_t i) const {
    if (has_room_) {
      atomicAdd(block_counts_ + i, 1u);
    } else {
      atomicAdd(args_.counts + i, 1ull);
    }
  }

  const ChooseArgs& args_;
  uint32_t* block_counts_;
  bool has_room_;
};

// What a token's experts are chosen from.
template <int kPer>
struct TokenInput {
  int32_t sequence;
  float logits[kPer];

  __device__ void read(const ChooseArgs& args, int64_t token) {
    sequence = sequence_of(args, token);
    read_row(args.logits, token, args.rules.E, logits);
  }
};

template <int kPer>
__device__ void choose_token(const ChooseArgs& args, int64_t token, const TokenInput<kPer>& input,
                             float* scratch, const RouteCounter& counter) {
  const int32_t K = args.rules.K;
  const int32_t sequence = input.sequence;
  int32_t id = -1;
  float weight = 0.0f;
  if (sequence >= 0) {
    float scores[kPer];
    device_scores(args.rules.score, input.logits, args.rules.E, scores);
    id = expert_of_slot(args, scores, token, scratch);
    const bool has_route = id >= 0 && id < args.rules.E;
    const float score = score_of_slot(scores, has_route ? id : -1, scratch);
    weight = slot_weights(args.rules, has_route, score).weight * args.rules.scaling;
    if (has_route) counter.add_route(sequence, id);
    if (lane_id() == 0) counter.add_token(sequence);
  }
  if (lane_id() < K) {
    args.expert_ids[token * K + lane_id()] = id;
    args.weights[token * K + lane_id()] = weight;
  }
  if (lane_id() == 0) args.sequences[token] = sequence;
}

// Warps of a block: as many as leave room for a row of each in shared memory.
template <int kPer>
constexpr int kChooseWarps = kPer <= 8 ? 16 : 8;

// Whether a call is one of the usual ones.
bool is_plain(const ChooseArgs& args) {
  return args.expert_bias == nullptr && args.mask == nullptr && args.sequence_ids == nullptr &&
         args.forced_ids == nullptr && !args.choice.force_balance && args.num_sequences == 1 &&
         args.choice.group_top_k >= args.choice.num_groups && is_whole_row(args.rules.E);
}

/// A kernel for a score, for calls that are plain. Its code is short and runs straight on: code is
/// seldom in the cache, and what a token needs takes less time than reading it.
template <int kRowSize, Score kRowScore>
struct PlainChoice {
  static constexpr int kPer = kRowSize;

  static __device__ ChooseArgs known(ChooseArgs args) {
    args.rules.score = kRowScore;
    args.rules.E = 32 * kPer;
    args.expert_bias = nullptr;
    args.mask = nullptr;
    args.sequence_ids = nullptr;
    args.forced_ids = nullptr;
    args.num_sequences = 1;
    args.choice = {.num_groups = 1, .group_top_k = 1, .group_share = 1, .force_balance = false};
    return args;
  }
};

/// A kernel for all calls.
template <int kRowSize>
struct AnyChoice {
  static constexpr int kPer = kRowSize;
  static __device__ const ChooseArgs& known(const ChooseArgs& args) { return args; }
};

// A warp takes tokens in turn, and reads one ahead. Shared memory: a row for each warp, then the
// block's counts.
template <typename Kind>
__global__ void __launch_bounds__(kChooseWarps<Kind::kPer> * 32,
                                  Kind::kPer <= 8 ? kChooseBlocksPerSm : 1)
    choose_kernel(const __grid_constant__ ChooseArgs given, bool has_block_counts) {
  extern __shared__ __align__(16) float choose_memory[];
  constexpr int kPer = Kind::kPer;
  constexpr int kWarps = kChooseWarps<kPer>;
  const ChooseArgs& args = Kind::known(given);
  cuda::wait_for_previous_kernel();
  cuda::allow_next_kernel();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* const scratch = choose_memory + warp * 32 * kPer;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  TokenInput<kPer> next;
  if (first < args.T) next.read(args, first);
  const RouteCounter counter(args, reinterpret_cast<uint32_t*>(choose_memory + kWarps * 32 * kPer),
                             has_block_counts);
  for (int64_t token = first; token < args.T; token += stride) {
    const TokenInput<kPer> input = next;
    if (token + stride < args.T) next.read(args, token + stride);
    choose_token(args, token, input, scratch, counter);
  }
  counter.finish();
}

template <int kPer>
void load_row_size() {
  cuda::load_kernels(choose_kernel<PlainChoice<kPer, Score::kSoftmax>>,
                     choose_kernel<PlainChoice<kPer, Score::kSoftmaxAfterTopK>>,
                     choose_kernel<PlainChoice<kPer, Score::kSigmoid>>,
                     choose_kernel<PlainChoice<kPer, Score::kSqrtSoftplus>>,
                     choose_kernel<AnyChoice<kPer>>);
}

template <typename Kind>
void launch(const ChooseArgs& args, cudaStream_t stream) {
  constexpr int kWarps = kChooseWarps<Kind::kPer>;
  const int64_t num_counts = args.num_sequences * (args.rules.E + 1);
  const bool has_block_counts = num_counts <= kMaxBlockCounts;
  const int64_t num_words = kWarps * 32 * Kind::kPer + (has_block_counts ? num_counts : 0);
  const int64_t most_blocks = int64_t{cuda::num_sms(cuda::current_device())} * kChooseBlocksPerSm;
  const int64_t blocks = std::min((args.T + kWarps - 1) / kWarps, most_blocks);
  cuda::launch_early(choose_kernel<Kind>,
                     {.blocks = static_cast<unsigned>(blocks),
                      .threads = kWarps * 32,
                      .shared_bytes = static_cast<size_t>(num_words) * sizeof(uint32_t)},
                     stream, args, has_block_counts);
}

}  // namespace

void load_choose() {
  load_row_size<1>();
  load_row_size<2>();
  load_row_size<4>();
  load_row_size<8>();
  load_row_size<16>();
  load_row_size<32>();
}

void launch_choose(const ChooseArgs& args, cudaStream_t stream) {
  if (args.T == 0) return;
  with_row_size(args.rules.E, [&](auto size) {
    if (!is_plain(args)) return launch<AnyChoice<size.value>>(args, stream);
    with_score(args.rules.score,
               [&](auto score) { launch<PlainChoice<size.value, score.value>>(args, stream); });
  });
}

}  // namespace crossdock::router
