#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

// Sequences cut among ranks, packed sequences, and sequences divided among data-parallel ranks.
// docs/sequences.md has pictures. Invalid arguments throw Error(kInvalidArgument). Only
// gather_tokens is collective. All functions are thread-safe. Tensors may be on a GPU where a
// function takes a stream: the work is queued there, and the memory must live until it has run.
// Outputs must not overlap inputs.

/// Order of the tokens of [B, L] in memory.
enum class TokenOrder : uint8_t {
  kBatchFirst,    // [B, L]: a sequence is contiguous
  kSequenceFirst  // [L, B]: the tokens at one position are contiguous
};

/// How a sequence of L tokens is cut among n ranks. Chunks at the end may be shorter or empty.
enum class SequenceCut : uint8_t {
  kContiguous,  // n chunks of ceil(L / n) tokens: rank r holds chunk r
  kZigzag       // 2n chunks of ceil(L / 2n): rank r holds chunks r and 2n - 1 - r, so that causal
                // attention costs all ranks the same
};

struct PackedSequencesArgs {
  /// [N + 1] int32 or int64 in host memory: sequence s has cu_seqlens[s + 1] - cu_seqlens[s]
  /// tokens. Begins with 0 and never decreases.
  ConstTensorView cu_seqlens{};
  /// [N + 1] as cu_seqlens, optional: sequence s begins at token cu_seqlens_padded[s] and is padded
  /// up to cu_seqlens_padded[s + 1]. Default: cu_seqlens, without padding.
  ConstTensorView cu_seqlens_padded{};
  /// Number of tokens in the tensor; those after the last sequence are padding. Default: no such
  /// tokens.
  std::optional<int64_t> num_tokens{};
};

/// N sequences of different lengths, back to back in a tensor [T, ...] ("THD"). Sequence s occupies
/// tokens [starts[s], starts[s + 1]), of which the first lengths[s] are real and the others are
/// padding. Tokens from starts[N] on are padding. Sequences may be empty.
class CROSSDOCK_API PackedSequences {
 public:
  PackedSequences() = default;  // no sequences, no tokens
  explicit PackedSequences(const PackedSequencesArgs& args);

  int64_t num_sequences() const { return static_cast<int64_t>(lengths_.size()); }  // N
  int64_t num_tokens() const { return num_tokens_; }                               // T
  std::span<const int64_t> starts() const { return starts_; }                      // [N + 1]
  std::span<const int64_t> lengths() const { return lengths_; }                    // [N]

 private:
  std::vector<int64_t> starts_{0};
  std::vector<int64_t> lengths_;
  int64_t num_tokens_ = 0;
};

/// All tokens and how they are cut among ranks. Identical on every rank.
struct SequenceLayout {
  int64_t batch = 1;   // B; at most 2^24 if batch-first sequences are cut
  int64_t length = 0;  // L
  int num_ranks = 1;   // n, the ranks that share each sequence
  TokenOrder order = TokenOrder::kBatchFirst;
  SequenceCut cut = SequenceCut::kContiguous;
  /// Packed sequences instead of [B, L]; batch and length keep their defaults. Each sequence is cut
  /// by itself, padding included; so are the tokens after the last sequence.
  std::optional<PackedSequences> packed{};
};

/// `count` tokens that are contiguous both here and globally.
struct TokenRun {
  int64_t local = 0;   // first token on this rank
  int64_t global = 0;  // the same token among all
  int64_t count = 0;
};

/// The tokens of one rank, in ascending global order. A value: copy it freely.
class CROSSDOCK_API SequenceShard {
 public:
  SequenceShard(SequenceLayout layout, int rank);

  const SequenceLayout& layout() const { return layout_; }
  int rank() const { return rank_; }
  int64_t num_tokens() const { return num_tokens_; }  // T, on this rank; may be 0
  int64_t num_global_tokens() const;
  /// [B, L_local], [L_local, B] or, with packed sequences, [T].
  Shape shape() const;
  Shape global_shape() const;

  /// The runs in local order, as long as possible, none empty.
  std::span<const TokenRun> runs() const { return runs_; }
  /// The global index of local token i, in [0, num_tokens()). Logarithmic in the number of runs.
  int64_t global_index(int64_t i) const;

  /// With packed sequences: the part of every sequence that is on this rank, as packed sequences of
  /// their own. They keep their numbers, and real tokens still come before padding.
  [[nodiscard]] PackedSequences local_sequences() const;

 private:
  void append_runs(int64_t start, int64_t length, int64_t width);

  SequenceLayout layout_;
  int rank_;
  int64_t local_length_ = 0;  // L_local
  int64_t num_tokens_ = 0;
  std::vector<TokenRun> runs_;
};

// A tensor of tokens has the shape of the shard, or one dimension for all tokens, followed by the
// dimensions of a row: [B, L, D], [B * L, D], or [B * L] for one value per token (masks, ids,
// positions). Any dtype and row width; bits are copied.

/// local[i] = global[global_index(i)].
CROSSDOCK_API void shard_tokens(const SequenceShard& shard, const ConstTensorView& global,
                                const TensorView& local, Stream stream = {});

/// global[global_index(i)] = local[i]; leaves the tokens of other ranks as they are. With zeros
/// there, this is the backward of shard_tokens.
CROSSDOCK_API void place_tokens(const SequenceShard& shard, const ConstTensorView& local,
                                const TensorView& global, Stream stream = {});

/// Places the tokens of all ranks; `locals` has one tensor per rank.
CROSSDOCK_API void gather_shards(const SequenceLayout& layout,
                                 std::span<const ConstTensorView> locals, const TensorView& global,
                                 Stream stream = {});

/// Gathers the tokens of all ranks of `group`, on every rank. Collective: if an argument is invalid
/// or the layout differs on any rank, every rank throws the same error. `shard` must be the shard
/// of group.rank() among group.size() ranks. Host memory only: on GPUs, gather with NCCL or your
/// framework and call gather_shards. The result is `global` if the caller set it; otherwise it
/// comes from the group's pool, with the dimensions of global_shape() where `local` has those of
/// shape().
[[nodiscard]] CROSSDOCK_API OwnedTensor gather_tokens(Group& group, const SequenceShard& shard,
                                                      const ConstTensorView& local,
                                                      const TensorView& global = {});

/// The tokens of a shard, in the form that RouteArgs and MoeForwardArgs take. To describe all
/// tokens, pass the shard of a layout with one rank.
struct TokenDescription {
  OwnedTensor sequence_ids;   // [T] int32, the same numbers on every rank; set for padding too
  OwnedTensor positions;      // [T] int64: index within the sequence
  OwnedTensor mask;           // [T] bool: true = padding
  int64_t num_sequences = 1;  // of all ranks, including empty ones; at least 1
};
[[nodiscard]] CROSSDOCK_API TokenDescription describe_tokens(const SequenceShard& shard);

/// The smallest multiple of `alignment` that is at least num_tokens.
[[nodiscard]] CROSSDOCK_API int64_t align_num_tokens(int64_t num_tokens, int64_t alignment);

// For code that needs an aligned or equal number of tokens per rank; Crossdock does not. pad_tokens
// and trim_tokens are each other's backward.

/// padded[t] = x[t], followed by zero rows: x [T, ...], padded [T_padded, ...] of the same dtype.
CROSSDOCK_API void pad_tokens(const ConstTensorView& x, const TensorView& padded,
                              Stream stream = {});

/// x[t] = padded[t]: drops the last rows.
CROSSDOCK_API void trim_tokens(const ConstTensorView& padded, const TensorView& x,
                               Stream stream = {});

/// The mask of num_tokens tokens and the pad rows after them: `mask` [num_tokens] bool (optional:
/// no padding), then true. padded [T_padded] bool.
CROSSDOCK_API void pad_mask(int64_t num_tokens, const ConstTensorView& mask,
                            const TensorView& padded, Stream stream = {});

/// How sequences are divided among data-parallel ranks.
enum class BalancePolicy : uint8_t {
  kLongestFirst,  // the costliest sequence goes to the rank with the least cost so far: at most 4/3
                  // of the smallest possible maximum
  kKeepOrder      // contiguous ranges in the given order with the smallest possible maximum
};

struct BalanceArgs {
  std::span<const int64_t> lengths{};  // [N] tokens of each sequence; may be 0
  int num_ranks = 1;                   // at most kMaxMeshRanks
  BalancePolicy policy = BalancePolicy::kLongestFirst;
  /// A sequence of l tokens costs cost_per_token * l + cost_per_token_pair * l^2 (attention).
  double cost_per_token = 1.0;
  double cost_per_token_pair = 0.0;
};

/// Which rank gets which sequences.
struct CROSSDOCK_API SequenceBalance {
  std::vector<int64_t> sequences;        // [N] by rank, ascending within a rank
  std::vector<int64_t> offsets;          // [num_ranks + 1] into `sequences`
  std::vector<int64_t> tokens_per_rank;  // [num_ranks]
  std::vector<double> cost_per_rank;     // [num_ranks]
  double imbalance = 1.0;                // largest / mean cost of a rank; 1 if all costs are 0

  std::span<const int64_t> of_rank(int rank) const;
};

/// Deterministic: equal costs go to the lower index. Every sequence is assigned once; there may be
/// more ranks than sequences.
[[nodiscard]] CROSSDOCK_API SequenceBalance balance_sequences(const BalanceArgs& args);

}  // namespace crossdock
