#ifndef CROSSDOCK_C_SEQUENCE_H
#define CROSSDOCK_C_SEQUENCE_H

/// Sequences cut among ranks, packed sequences, and sequences divided among data-parallel ranks. A
/// part of crossdock.h; docs/sequences.md has pictures.
///
/// Only crossdock_gather_tokens is collective. A tensor of tokens has the dimensions of the shard,
/// or one dimension for all tokens, followed by the dimensions of a row: [B, L, D], [B * L, D], or
/// [B * L] for one value per token. Any dtype; bits are copied. Functions with a `stream` (a
/// cudaStream_t) also take tensors on a GPU: the work is queued there.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/// The tokens of one rank. Read-only.
typedef struct crossdock_sequence_shard crossdock_sequence_shard;

enum { CROSSDOCK_BATCH_FIRST = 0, CROSSDOCK_SEQUENCE_FIRST = 1 };  // order: [B, L] or [L, B]
enum {                                                             // cut of L tokens among n ranks
  CROSSDOCK_CUT_CONTIGUOUS = 0,  // chunks of ceil(L / n): rank r holds chunk r
  CROSSDOCK_CUT_ZIGZAG = 1       // chunks of ceil(L / 2n): rank r holds r and 2n - 1 - r
};

/// All tokens, how they are cut among ranks, and one of these ranks.
typedef struct crossdock_sequence_layout {
  size_t struct_size;
  int64_t batch;      // B; 0: 1. At most 2^24 if batch-first sequences are cut
  int64_t length;     // L
  int32_t num_ranks;  // ranks that share each sequence; 0: 1
  int32_t rank;
  int32_t order;
  int32_t cut;
  /// [N + 1] int32 or int64 in host memory, optional: N packed sequences instead of [B, L], each
  /// cut by itself. Begins with 0 and never decreases.
  crossdock_tensor cu_seqlens;
  /// As cu_seqlens, optional: where sequences begin if they are padded.
  crossdock_tensor cu_seqlens_padded;
  int64_t num_tokens;  // with cu_seqlens: number of tokens, including padding after the last
                       // sequence; 0: no such padding
} crossdock_sequence_layout;
#define CROSSDOCK_SEQUENCE_LAYOUT_INIT \
  { .struct_size = sizeof(crossdock_sequence_layout) }

CROSSDOCK_C_API crossdock_status crossdock_sequence_shard_create(
    const crossdock_sequence_layout* layout, crossdock_sequence_shard** shard);
CROSSDOCK_C_API void crossdock_sequence_shard_destroy(crossdock_sequence_shard* shard);

typedef struct crossdock_sequence_shard_info {
  size_t struct_size;
  int64_t num_tokens;         // T, of this rank; may be 0
  int64_t num_global_tokens;  // of all ranks
  int64_t num_sequences;      // of all ranks, at least 1: num_sequences of a layer's forward
  int64_t num_runs;           // for crossdock_sequence_shard_runs
  int64_t shape[2];           // [B, L_local] or [L_local, B]; packed: [T, 0]
  int64_t global_shape[2];    // [B, L] or [L, B]; packed: [num_global_tokens, 0]
} crossdock_sequence_shard_info;
#define CROSSDOCK_SEQUENCE_SHARD_INFO_INIT \
  { .struct_size = sizeof(crossdock_sequence_shard_info) }

CROSSDOCK_C_API crossdock_status crossdock_sequence_shard_describe(
    const crossdock_sequence_shard* shard, crossdock_sequence_shard_info* info);

/// Tokens that are contiguous both on this rank and globally. Never changes.
typedef struct crossdock_token_run {
  int64_t local;   // first token on this rank
  int64_t global;  // the same token among all
  int64_t count;
} crossdock_token_run;
/// Copies the [num_runs] runs, in local order.
CROSSDOCK_C_API crossdock_status
crossdock_sequence_shard_runs(const crossdock_sequence_shard* shard, crossdock_token_run* runs);
/// The global index of local token i.
CROSSDOCK_C_API crossdock_status crossdock_sequence_shard_global_index(
    const crossdock_sequence_shard* shard, int64_t i, int64_t* global_index);

/// Fills host tensors in the form that a layer's forward takes; each may be NULL: sequence_ids [T]
/// int32 (the same numbers on every rank), positions [T] int64 (index within the sequence), mask
/// [T] bool (true = padding).
CROSSDOCK_C_API crossdock_status crossdock_describe_tokens(const crossdock_sequence_shard* shard,
                                                           const crossdock_tensor* sequence_ids,
                                                           const crossdock_tensor* positions,
                                                           const crossdock_tensor* mask);

/// local[i] = global[global index of i].
CROSSDOCK_C_API crossdock_status crossdock_shard_tokens(const crossdock_sequence_shard* shard,
                                                        const crossdock_tensor* global,
                                                        const crossdock_tensor* local,
                                                        void* stream);
/// global[global index of i] = local[i]; leaves the tokens of other ranks as they are.
CROSSDOCK_C_API crossdock_status crossdock_place_tokens(const crossdock_sequence_shard* shard,
                                                        const crossdock_tensor* local,
                                                        const crossdock_tensor* global,
                                                        void* stream);
/// Places the tokens of all ranks of the shard's layout; `locals` has one tensor per rank.
CROSSDOCK_C_API crossdock_status crossdock_gather_shards(const crossdock_sequence_shard* shard,
                                                         const crossdock_tensor* locals,
                                                         const crossdock_tensor* global,
                                                         void* stream);
/// Gathers the tokens of all ranks of the group, on every rank. Collective. Host memory only. The
/// shard must be this rank's among all ranks of the group.
CROSSDOCK_C_API crossdock_status crossdock_gather_tokens(crossdock_group* group,
                                                         const crossdock_sequence_shard* shard,
                                                         const crossdock_tensor* local,
                                                         crossdock_output* global);

/// padded [T_padded, ...] = x [T, ...] followed by zero rows. The backward of
/// crossdock_trim_tokens.
CROSSDOCK_C_API crossdock_status crossdock_pad_tokens(const crossdock_tensor* x,
                                                      const crossdock_tensor* padded, void* stream);
/// x [T, ...] = the first rows of padded [T_padded, ...]. The backward of crossdock_pad_tokens.
CROSSDOCK_C_API crossdock_status crossdock_trim_tokens(const crossdock_tensor* padded,
                                                       const crossdock_tensor* x, void* stream);
/// padded [T_padded] bool = `mask` [num_tokens] bool (NULL: all false), followed by true.
CROSSDOCK_C_API crossdock_status crossdock_pad_mask(int64_t num_tokens,
                                                    const crossdock_tensor* mask,
                                                    const crossdock_tensor* padded, void* stream);

enum { CROSSDOCK_LONGEST_FIRST = 0, CROSSDOCK_KEEP_ORDER = 1 };  // policy

typedef struct crossdock_balance_args {
  size_t struct_size;
  const int64_t* lengths;      // [num_sequences] tokens of each; may be NULL if there are none
  int64_t num_sequences;       // N
  int32_t num_ranks;           // at most 65536; 0: 1
  int32_t policy;              // contiguous ranges in the given order, or longest first
  double cost_per_token;       // a sequence of l tokens costs cost_per_token * l
  double cost_per_token_pair;  // + cost_per_token_pair * l^2. Both 0: each token costs 1
} crossdock_balance_args;
#define CROSSDOCK_BALANCE_ARGS_INIT \
  { .struct_size = sizeof(crossdock_balance_args) }

/// Divides sequences among data-parallel ranks: sets ranks[s] for each of N sequences, and
/// `imbalance` (may be NULL), the largest cost of a rank divided by the mean. Not collective.
CROSSDOCK_C_API crossdock_status crossdock_balance_sequences(const crossdock_balance_args* args,
                                                             int32_t* ranks, double* imbalance);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_SEQUENCE_H
