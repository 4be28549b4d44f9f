#ifndef CROSSDOCK_C_DISPATCHER_H
#define CROSSDOCK_C_DISPATCHER_H

/// Dispatchers: carry tokens to the ranks that own their experts, and the results back. A part of
/// crossdock.h.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct crossdock_dispatcher crossdock_dispatcher;
/// One routing, agreed by all ranks: the final row of every route. Read-only.
typedef struct crossdock_plan crossdock_plan;
/// A pending call, made by crossdock_begin_dispatch or crossdock_begin_combine.
typedef struct crossdock_pending crossdock_pending;

enum { CROSSDOCK_DROP_BY_POSITION = 0, CROSSDOCK_DROP_BY_WEIGHT = 1 };       // drop_policy
enum { CROSSDOCK_NONFINITE_REJECT = 0, CROSSDOCK_NONFINITE_PROPAGATE = 1 };  // nonfinite
enum {                              // partial_sums: what combine and dispatch_backward send
  CROSSDOCK_PARTIAL_SUMS_NONE = 0,  // every row
  CROSSDOCK_PARTIAL_SUMS_FP32 = 1,  // sums per rank or node, in fp32 (fp64 for fp64 rows)
  CROSSDOCK_PARTIAL_SUMS_ROWS = 2   // the same, each rounded once to the dtype of the rows
};
enum {                             // copies of a token that dispatch sends between GPUs of one node
  CROSSDOCK_COPIES_AUTO = 0,       // per rank if the ranks are on several GPUs, else per route
  CROSSDOCK_COPIES_PER_ROUTE = 1,  // one per row
  CROSSDOCK_COPIES_PER_RANK = 2    // one per rank, copied there to the token's other rows
};

/// Must be identical on every rank of a group.
typedef struct crossdock_dispatch_config {
  size_t struct_size;
  int64_t num_experts;       // E
  int64_t top_k;             // K, the number of slots per token; up to E
  int64_t width;             // D
  int64_t alignment;         // of segment starts, in rows: 1 (0), 8, 16, 32, 64, 128 or 256
  int64_t max_rows;          // limit on R; 0: none. With it, no call waits for a GPU
  const int32_t* placement;  // [E] expert -> rank; NULL: contiguous, as even as possible. Copied
  const char* strategy;      // "direct", "hierarchical", "alltoall", "allgather"; NULL: "auto"
  double capacity_factor;    // at most ceil((T * K / E) * factor) rows per expert and source rank;
                             // 0: no capacity
  int64_t capacity_tokens;   // with pad_to_capacity: the largest T of any rank and step
  int32_t pad_to_capacity;   // 1: every segment has exactly that many rows per source
  int32_t drop_policy;       // which routes beyond the capacity are dropped
  int32_t nonfinite;         // whether weights may be infinite or NaN
  int32_t partial_sums;      // sum per rank before rows are sent back: less traffic, different bits
  int32_t keep_empty_segments;  // 1: each local expert has at least one row (one alignment unit), a
                                // pad row if it has no routes, for kernels that cannot handle an
                                // empty expert
  int32_t copies;               // in dispatch on GPUs, with direct and hierarchical
  int64_t max_routes_per_token;  // dense maps: the largest number of set bits in a token, from
                                 // top_k to E, and the K of their plans; more are refused. 0: no
                                 // bound; K comes from the maps, and a plan then waits for a GPU
} crossdock_dispatch_config;
#define CROSSDOCK_DISPATCH_CONFIG_INIT \
  { .struct_size = sizeof(crossdock_dispatch_config) }

/// Not collective. An invalid configuration is reported by the first crossdock_plan_create, on all
/// ranks.
CROSSDOCK_C_API crossdock_status
crossdock_dispatcher_create(crossdock_group* group, const crossdock_dispatch_config* config,
                            crossdock_dispatcher** dispatcher);
CROSSDOCK_C_API void crossdock_dispatcher_destroy(crossdock_dispatcher* dispatcher);
/// The strategy that "auto" stands for. Valid as long as the dispatcher.
CROSSDOCK_C_API crossdock_status
crossdock_dispatcher_strategy(const crossdock_dispatcher* dispatcher, const char** name);

/// How a dispatcher works on a GPU. May differ between ranks.
typedef struct crossdock_device_options {
  size_t struct_size;
  void* stream;  // a cudaStream_t, in which all work is queued in order; NULL: the default stream
                 // (for ranks that are threads, the calling thread's own)
  void* nccl_comm;  // an ncclComm_t with the group's ranks, for rows between nodes; optional. Must
                    // be set before the first plan and must not change
  int32_t max_sms;  // SM limit of a call; 0: none
  int32_t max_begun_sms;  // the same for pending calls and dispatches that overlap experts; 0:
                          // max_sms
} crossdock_device_options;
#define CROSSDOCK_DEVICE_OPTIONS_INIT \
  { .struct_size = sizeof(crossdock_device_options) }

/// Applies to later calls with tensors on a GPU. A new stream waits for the dispatcher's work in
/// the previous one, which must still exist. Not collective.
CROSSDOCK_C_API crossdock_status crossdock_set_device_options(
    crossdock_dispatcher* dispatcher, const crossdock_device_options* options);
/// Returns the failure that poisoned the group, or one that a GPU has reported since the last call.
/// Does not wait for the GPU.
CROSSDOCK_C_API crossdock_status crossdock_dispatcher_check(crossdock_dispatcher* dispatcher);

// ---- Plans ----

/// The routes of every token: by slot, or as a dense map. If they are on a GPU, the tensors of all
/// calls with the plan must be too.
typedef struct crossdock_routing {
  size_t struct_size;
  crossdock_tensor expert_ids;  // [T, K] int32 or int64: an expert, or -1 for no route; distinct
                                // per token
  crossdock_tensor map;         // [T, E] bool, instead of expert_ids: a token's slots are its set
                                // bits in ascending expert order. Any number may be set: the K of
                                // the plan (shape of its weights) is max_routes_per_token or,
                                // without it, the largest number of bits on any rank, at least
                                // top_k
  crossdock_tensor weights;     // [T, K], or [T, E] with a map; ignored where there is no route.
                                // fp64, fp32, bf16 or fp16; fp64 on the CPU only with fp64 tokens
  crossdock_tensor mask;        // [T] bool, optional: true = padding, the token has no routes
} crossdock_routing;
#define CROSSDOCK_ROUTING_INIT \
  { .struct_size = sizeof(crossdock_routing) }

/// All ranks agree on the number of rows each receives and on the final row of every route.
/// Collective. The plan may be used only with this dispatcher.
CROSSDOCK_C_API crossdock_status crossdock_plan_create(crossdock_dispatcher* dispatcher,
                                                       const crossdock_routing* routing,
                                                       crossdock_plan** plan);
CROSSDOCK_C_API void crossdock_plan_destroy(crossdock_plan* plan);

/// Sizes of a plan. Pointers are on the plan's device and valid as long as the plan.
typedef struct crossdock_plan_info {
  size_t struct_size;
  uint64_t id;
  int64_t num_tokens;             // T
  int64_t capacity_rows;          // R of every tensor of rows: exact, or max_rows on a GPU
  int64_t num_local_experts;      // E_local
  const int64_t* segment_starts;  // [E_local + 1]; the last entry is the number of rows in use.
                                  // Expert e has rows [starts[e], starts[e] + counts[e]); those
                                  // from there to starts[e + 1] are pad rows: zero, weight 0
  const int64_t* segment_counts;  // [E_local]
  crossdock_tensor weights;       // [T, K] fp32 (fp64 if given in fp64 on the CPU): of kept routes,
                                  // 0 elsewhere
  int32_t device_kind;
  int32_t device_index;
} crossdock_plan_info;
#define CROSSDOCK_PLAN_INFO_INIT \
  { .struct_size = sizeof(crossdock_plan_info) }

/// Never waits for the GPU.
CROSSDOCK_C_API crossdock_status crossdock_plan_describe(const crossdock_plan* plan,
                                                         crossdock_plan_info* info);
/// crossdock_plan_create and crossdock_plan_describe in one call. Collective. For a plan in host
/// memory, rows_per_expert, unless NULL, receives the number of rows of each local expert
/// [E_local], pad rows included.
CROSSDOCK_C_API crossdock_status crossdock_plan_create_described(crossdock_dispatcher* dispatcher,
                                                                 const crossdock_routing* routing,
                                                                 crossdock_plan_info* info,
                                                                 int64_t* rows_per_expert,
                                                                 crossdock_plan** plan);
/// Rows in use on this rank, pad rows included. May wait for the GPU.
CROSSDOCK_C_API crossdock_status crossdock_plan_num_rows(const crossdock_plan* plan,
                                                         int64_t* num_rows);
/// Copies to host memory, for each expert [E], the number of this rank's routes that capacity
/// dropped. May wait for the GPU.
CROSSDOCK_C_API crossdock_status crossdock_plan_dropped(const crossdock_plan* plan,
                                                        int64_t* dropped);

// ---- Rows ----
//
// All calls are collective, except crossdock_finish_* and crossdock_allocate_rows. On a GPU they
// queue their work in the stream of crossdock_set_device_options. R is capacity_rows. An output
// must not overlap an input or another output.

typedef struct crossdock_dispatch_result {
  size_t struct_size;
  crossdock_output rows;         // [R, D] dtype of x, grouped by local expert; pad rows are zero
  crossdock_output row_scales;   // [R, ...] dtype of scales, with fp8 only
  crossdock_output row_weights;  // [R] dtype of the plan's weights, with with_row_weights only; 0
                                 // in pad rows
} crossdock_dispatch_result;
#define CROSSDOCK_DISPATCH_RESULT_INIT \
  { .struct_size = sizeof(crossdock_dispatch_result) }

typedef struct crossdock_dispatch_args {
  size_t struct_size;
  crossdock_tensor x;        // [T, D] fp64 (CPU only), fp32, bf16, fp16 or fp8 e4m3
  crossdock_tensor scales;   // with fp8: [T, ceil(D/128)] fp32 or [T, ceil(D/32)] e8m0
  int32_t with_row_weights;  // 1: dispatch the weights too
  int32_t num_chunks;        // at most this many chunks of whole local experts; 0: 1
  /// (optional) Called after each chunk, in expert order: the rows of local experts
  /// [first_expert, last_expert) and all row weights are complete. Set on all ranks or on none. It
  /// must not use the group. Any status other than CROSSDOCK_OK fails the call on all ranks. The
  /// owners in `result` are NULL.
  crossdock_status (*on_chunk)(void* context, const crossdock_dispatch_result* result,
                               int64_t first_expert, int64_t last_expert);
  void* on_chunk_context;
} crossdock_dispatch_args;
#define CROSSDOCK_DISPATCH_ARGS_INIT \
  { .struct_size = sizeof(crossdock_dispatch_args) }

/// The chunk that crossdock_pass_chunk describes to its callback.
typedef struct crossdock_chunk {
  void (*callback)(struct crossdock_chunk* chunk);  // set by the caller
  const crossdock_dispatch_result* result;          // the arguments of on_chunk
  int64_t first_expert;
  int64_t last_expert;
  int32_t status;  // CROSSDOCK_COMMUNICATION, until the callback sets another one
  int32_t padding;
} crossdock_chunk;
/// An on_chunk for languages whose callbacks may end without returning a value, as in Python when a
/// signal arrives. Its context is a crossdock_chunk, which may be used for all chunks of a call.
CROSSDOCK_C_API crossdock_status crossdock_pass_chunk(void* chunk,
                                                      const crossdock_dispatch_result* result,
                                                      int64_t first_expert, int64_t last_expert);

/// x [T, D] -> rows [R, D].
CROSSDOCK_C_API crossdock_status crossdock_dispatch(crossdock_dispatcher* dispatcher,
                                                    const crossdock_plan* plan,
                                                    const crossdock_dispatch_args* args,
                                                    crossdock_dispatch_result* result);
/// Backward of dispatch: grad_rows [R, D] -> grad_x [T, D], the unweighted sum.
CROSSDOCK_C_API crossdock_status crossdock_dispatch_backward(crossdock_dispatcher* dispatcher,
                                                             const crossdock_plan* plan,
                                                             const crossdock_tensor* grad_rows,
                                                             crossdock_output* grad_x);

/// y [R, D] -> out [T, D]: the sum over each token's routes, weighted by the plan's weights.
CROSSDOCK_C_API crossdock_status crossdock_combine(crossdock_dispatcher* dispatcher,
                                                   const crossdock_plan* plan,
                                                   const crossdock_tensor* y,
                                                   crossdock_output* out);
/// Like combine with all weights 1, for experts that applied the weights themselves.
CROSSDOCK_C_API crossdock_status crossdock_combine_unweighted(crossdock_dispatcher* dispatcher,
                                                              const crossdock_plan* plan,
                                                              const crossdock_tensor* y,
                                                              crossdock_output* out);

typedef struct crossdock_combine_backward_args {
  size_t struct_size;
  crossdock_tensor grad_out;  // [T, D]
  crossdock_tensor y;         // [R, D] as in combine
} crossdock_combine_backward_args;
#define CROSSDOCK_COMBINE_BACKWARD_ARGS_INIT \
  { .struct_size = sizeof(crossdock_combine_backward_args) }

typedef struct crossdock_combine_backward_result {
  size_t struct_size;
  crossdock_output grad_rows;     // [R, D] = weight * grad_out of the row's token; 0 in pad rows
  crossdock_output grad_weights;  // [T, K] = <y row, grad_out>; 0 in slots without a kept route
} crossdock_combine_backward_result;
#define CROSSDOCK_COMBINE_BACKWARD_RESULT_INIT \
  { .struct_size = sizeof(crossdock_combine_backward_result) }

CROSSDOCK_C_API crossdock_status crossdock_combine_backward(
    crossdock_dispatcher* dispatcher, const crossdock_plan* plan,
    const crossdock_combine_backward_args* args, crossdock_combine_backward_result* result);

/// Returns one value per row to its route: rows [R] fp32 or fp64 -> routes [T, K]; 0 in slots
/// without a kept route. For example, the gradients of weights that the experts applied.
CROSSDOCK_C_API crossdock_status crossdock_collect_routes(crossdock_dispatcher* dispatcher,
                                                          const crossdock_plan* plan,
                                                          const crossdock_tensor* rows,
                                                          crossdock_output* routes);

/// Memory for rows [R, D] of this plan that combine and dispatch_backward can read without a copy.
CROSSDOCK_C_API crossdock_status crossdock_allocate_rows(crossdock_dispatcher* dispatcher,
                                                         const crossdock_plan* plan, int32_t dtype,
                                                         crossdock_output* rows);

// dispatch and combine in two halves, to overlap them with computation. On a GPU, begin queues the
// call in a separate stream, and finish makes the caller's stream wait for it; on the CPU, begin
// completes the call. Inputs and outputs must not be used in between, except the rows of chunks
// that crossdock_next_chunk has returned; those in memory that the library allocated may be
// released. on_chunk is refused on a GPU. begin reads the outputs
// that the caller provides in `given` (NULL: none). finish sets the result, whose owners must be
// NULL and whose tensors are ignored, and frees `pending`, unless an argument is invalid. A begun
// call is finished by the same dispatcher, or dropped with crossdock_pending_destroy.

CROSSDOCK_C_API crossdock_status crossdock_begin_dispatch(crossdock_dispatcher* dispatcher,
                                                          const crossdock_plan* plan,
                                                          const crossdock_dispatch_args* args,
                                                          const crossdock_dispatch_result* given,
                                                          crossdock_pending** pending);
/// The next chunk of a pending dispatch (num_chunks), in expert order: the rows and row weights of
/// local experts [*first_expert, *last_expert), both -1 after the last chunk. On a GPU the caller's
/// stream waits for them and the host does not; rows of later chunks must not be used yet. The
/// owners in `arrived` are NULL. Not collective.
CROSSDOCK_C_API crossdock_status crossdock_next_chunk(crossdock_dispatcher* dispatcher,
                                                      crossdock_pending* pending,
                                                      crossdock_dispatch_result* arrived,
                                                      int64_t* first_expert, int64_t* last_expert);
CROSSDOCK_C_API crossdock_status crossdock_finish_dispatch(crossdock_dispatcher* dispatcher,
                                                           crossdock_pending* pending,
                                                           crossdock_dispatch_result* result);
CROSSDOCK_C_API crossdock_status crossdock_begin_combine(crossdock_dispatcher* dispatcher,
                                                         const crossdock_plan* plan,
                                                         const crossdock_tensor* y,
                                                         const crossdock_output* given,
                                                         crossdock_pending** pending);
CROSSDOCK_C_API crossdock_status crossdock_finish_combine(crossdock_dispatcher* dispatcher,
                                                          crossdock_pending* pending,
                                                          crossdock_output* out);
/// Ends a call without finish and releases its results; for example, after an error. On a GPU the
/// caller's stream waits for it. Not collective; also valid after the dispatcher was destroyed.
CROSSDOCK_C_API void crossdock_pending_destroy(crossdock_pending* pending);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_DISPATCHER_H
