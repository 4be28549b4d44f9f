#ifndef CROSSDOCK_C_LAYER_H
#define CROSSDOCK_C_LAYER_H

/// Layers: router, dispatch, experts and combine, forward and backward, in host memory or on GPUs.
/// A part of crossdock.h.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct crossdock_layer crossdock_layer;
/// The routing, plan and values of one forward that its backward needs.
typedef struct crossdock_layer_saved crossdock_layer_saved;

enum {  // score: function from logits to scores
  CROSSDOCK_SOFTMAX = 0,
  CROSSDOCK_SOFTMAX_AFTER_TOP_K = 1,
  CROSSDOCK_SIGMOID = 2,
  CROSSDOCK_SQRT_SOFTPLUS = 3
};
enum { CROSSDOCK_GROUP_TOP_SHARE = 0, CROSSDOCK_GROUP_TOP_2 = 1 };  // group_score
enum {                                                              // aux_loss_scope
  CROSSDOCK_BALANCE_BATCH = 0,
  CROSSDOCK_BALANCE_SEQUENCE = 1,
  CROSSDOCK_BALANCE_GLOBAL_BATCH = 2
};

typedef struct crossdock_router_config {
  size_t struct_size;
  int64_t num_experts;    // E
  int64_t top_k;          // K
  int64_t width;          // D
  int64_t num_groups;     // experts are selected from the best group_top_k groups only; 0: 1
  int64_t group_top_k;    // 0: 1
  double scaling;         // factor on the final weights; 0: 1
  double aux_loss_coeff;  // 0: no auxiliary loss
  double z_loss_coeff;    // 0: no z-loss
  double jitter;          // x is multiplied by random factors in [1 - jitter, 1 + jitter)
  int32_t score;
  int32_t group_score;
  int32_t normalise;       // weights sum to 1: 1 yes, -1 no, 0: yes for sigmoid and sqrt_softplus
  int32_t aux_loss_scope;  // tokens whose routes the auxiliary loss counts
  int32_t force_balance;   // 1, for benchmarks: slot k of token t goes to expert (t * K + k) mod E
  int32_t padding;         // 0
  // Coefficients of several auxiliary losses at once; 0: none. aux_loss_coeff is added to the
  // coefficient of aux_loss_scope.
  double aux_batch_coeff;
  double aux_sequence_coeff;
  double aux_global_batch_coeff;
} crossdock_router_config;
#define CROSSDOCK_ROUTER_CONFIG_INIT \
  { .struct_size = sizeof(crossdock_router_config) }

/// Must be identical on every rank, except experts->recompute and, with tokens in host memory,
/// serial_shared.
typedef struct crossdock_layer_config {
  size_t struct_size;
  const crossdock_router_config* router;      // E, K and D of the layer
  const crossdock_experts_config* experts;    // F and dtype of the layer; E_local and D may be 0
  const crossdock_dispatch_config* dispatch;  // optional; E, K and D may be 0
  crossdock_group* counting_group;  // ranks over which the losses count; NULL: the layer's group.
                                    // Must outlive the layer
  int64_t shared_inner;             // F of the shared experts, one dense MLP; 0: none
  int64_t overlap_chunks;           // above 1: experts compute on chunks as they arrive; 0: 1
  int32_t serial_shared;            // 1: the shared experts do not compute during the dispatch
  int32_t padding;                  // 0
  int64_t etp;  // expert tensor parallelism: ranks that share each expert, fastest in the group;
                // each holds a part of F. experts->inner is F of a whole expert. 0: 1
  crossdock_group* sequence_group;   // ranks that share sequences, if not those of counting_group.
                                     // Must outlive the layer
  crossdock_group* replicated_over;  // ranks that hold the same tokens: each takes part with a
                                     // slice of them, and gets all results. Must outlive the layer
  int32_t allow_equal_tokens;  // 1: tokens that are bit-identical on several ranks are accepted, as
                               // distinct tokens
  int32_t padding2;            // 0
} crossdock_layer_config;
#define CROSSDOCK_LAYER_CONFIG_INIT \
  { .struct_size = sizeof(crossdock_layer_config) }

/// Not collective. An invalid configuration is reported by the first forward, on all ranks.
CROSSDOCK_C_API crossdock_status crossdock_layer_create(crossdock_group* group,
                                                        const crossdock_layer_config* config,
                                                        crossdock_layer** layer);
CROSSDOCK_C_API void crossdock_layer_destroy(crossdock_layer* layer);
/// E_local of this rank: the first dimension of its experts' weights.
CROSSDOCK_C_API crossdock_status crossdock_layer_num_local_experts(const crossdock_layer* layer,
                                                                   int64_t* num_local_experts);
/// Applies to later calls with tensors on a GPU, as crossdock_set_device_options does. If x is on a
/// GPU, all tensors of the call must be too; its work is queued in the stream, and no call waits if
/// dispatch->max_rows is set. Not collective.
CROSSDOCK_C_API crossdock_status
crossdock_layer_set_device_options(crossdock_layer* layer, const crossdock_device_options* options);

/// Parameters, which the caller owns. Never changes.
typedef struct crossdock_layer_weights {
  crossdock_tensor gate;             // [E, D] fp64 for fp64 tokens, else fp32, bf16 or fp16
  crossdock_tensor gate_bias;        // [E] same dtype, optional
  crossdock_tensor expert_bias;      // [E] fp32 (fp64 for fp64), optional: for the selection only
  crossdock_expert_weights experts;  // of this rank's experts, ascending; with etp > 1 its shard
                                     // of them, and b2, which is identical on the etp ranks
  crossdock_expert_weights shared;   // with shared_inner: E_local = 1
} crossdock_layer_weights;

/// Outputs for the gradients, in fp32 (fp64 for fp64). On a GPU those of w1 and w2 may have the
/// dtype of the experts instead, but then cannot be accumulated. All are optional. Never changes.
typedef struct crossdock_layer_gradients {
  crossdock_tensor gate;       // [E, D]; summed over this rank's tokens only
  crossdock_tensor gate_bias;  // [E]; summed over this rank's tokens only
  /// Summed over the tokens of all ranks of the group. With etp > 1, b2 is identical on the etp
  /// ranks and must not be summed over them.
  crossdock_expert_gradients experts;
  crossdock_expert_gradients shared;  // summed over this rank's tokens only
} crossdock_layer_gradients;

typedef struct crossdock_layer_forward_args {
  size_t struct_size;
  crossdock_layer_weights weights;
  crossdock_tensor x;             // [T, D], or [B, L, D]: results then have this shape
  crossdock_tensor mask;          // [T] bool, optional: true = padding
  crossdock_tensor sequence_ids;  // [T] int32, optional: with CROSSDOCK_BALANCE_SEQUENCE
  crossdock_tensor forced_ids;    // [T, K] int32 or int64, optional: routes to use; -1: none
  crossdock_tensor token_ids;     // [T] int64, optional: identifies each token for the jitter
  int64_t num_sequences;          // 0: 1. With CROSSDOCK_BALANCE_SEQUENCE, times E + 1 at most 2^28
  int64_t total_sequences;        // in the counting group; 0: the layer counts them
  uint64_t jitter_seed;           // use a different seed in every step
  /// Optional: an earlier forward of these tokens, whose routes and plan are used again
  /// (recomputation).
  const crossdock_layer_saved* decision;
  /// Optional, with CROSSDOCK_BALANCE_GLOBAL_BATCH: the previous forward of this step.
  const crossdock_layer_saved* earlier;
} crossdock_layer_forward_args;
#define CROSSDOCK_LAYER_FORWARD_ARGS_INIT \
  { .struct_size = sizeof(crossdock_layer_forward_args) }

typedef struct crossdock_layer_forward_result {
  size_t struct_size;
  crossdock_output out;   // [T, D]
  double aux_loss;        // this rank's share; the shares of the counting group sum to its loss.
                          // With x on a GPU, this loss and those below are 0: see device_losses
  double z_loss;          // this rank's share
  double aux_batch_loss;  // the terms of aux_loss
  double aux_sequence_loss;
  double aux_global_batch_loss;
  /// Set if x is on a GPU and `saved` is not NULL; valid as long as `saved`. [5] fp64 on the GPU,
  /// read-only: aux, z, and the terms of aux: batch, sequence, global batch. Complete once the
  /// stream has reached this call; see crossdock_layer_saved_losses.
  crossdock_tensor device_losses;
} crossdock_layer_forward_result;
#define CROSSDOCK_LAYER_FORWARD_RESULT_INIT \
  { .struct_size = sizeof(crossdock_layer_forward_result) }

/// x [T, D] -> out [T, D]. Collective. `saved` is for the backward; NULL if there is none.
CROSSDOCK_C_API crossdock_status crossdock_layer_forward(crossdock_layer* layer,
                                                         const crossdock_layer_forward_args* args,
                                                         crossdock_layer_forward_result* result,
                                                         crossdock_layer_saved** saved);

typedef struct crossdock_layer_backward_args {
  size_t struct_size;
  crossdock_layer_weights weights;  // as in forward
  crossdock_tensor x;               // [T, D] as in forward
  crossdock_tensor grad_out;        // [T, D]
  crossdock_layer_gradients grads;  // out
  const double* grad_losses;        // factor on the gradients of the losses; NULL: 1
  int32_t accumulate;               // 1: adds to `grads` instead of overwriting them
  int32_t delay_dw;  // 1: leaves the gradients of experts and shared experts to backward_dw
} crossdock_layer_backward_args;
#define CROSSDOCK_LAYER_BACKWARD_ARGS_INIT \
  { .struct_size = sizeof(crossdock_layer_backward_args) }

/// grad_out [T, D] -> grad_x [T, D], and the gradients of the parameters. Collective. Each forward
/// has one backward.
CROSSDOCK_C_API crossdock_status crossdock_layer_backward(crossdock_layer* layer,
                                                          const crossdock_layer_backward_args* args,
                                                          crossdock_layer_saved* saved,
                                                          crossdock_output* grad_x);
/// Computes the gradients that a backward with delay_dw postponed, with the same arguments. Not
/// collective.
CROSSDOCK_C_API crossdock_status
crossdock_layer_backward_dw(const crossdock_layer* layer, const crossdock_layer_backward_args* args,
                            const crossdock_layer_saved* saved);

/// What a forward decided, on the device of its tokens; valid as long as `saved`, read-only. On a
/// GPU complete once the stream has reached the forward.
typedef struct crossdock_layer_report {
  size_t struct_size;
  crossdock_tensor expert_ids;    // [T, K] int32: the routes, best first; -1: none
  crossdock_tensor weights;       // [T, K] fp32 (fp64 for fp64): their weights
  crossdock_tensor kept_weights;  // [T, K * etp]: each etp times, 0 if capacity dropped the route
  crossdock_tensor load;          // [E] int64: routes before any drop, summed over the group
  crossdock_tensor rows_per_expert;  // [E_local] int64: rows of this rank's experts
} crossdock_layer_report;
#define CROSSDOCK_LAYER_REPORT_INIT \
  { .struct_size = sizeof(crossdock_layer_report) }
/// Does not wait.
CROSSDOCK_C_API crossdock_status crossdock_layer_saved_report(const crossdock_layer_saved* saved,
                                                              crossdock_layer_report* report);

// For tokens on a GPU the following calls wait for the stream of the forward, which must still
// exist.

/// Copies the [5] losses: aux, z, and the terms of aux: batch, sequence, global batch.
CROSSDOCK_C_API crossdock_status crossdock_layer_saved_losses(const crossdock_layer_saved* saved,
                                                              double* losses);
/// Copies the number of routes to each expert [E] before any drop, summed over the group.
CROSSDOCK_C_API crossdock_status crossdock_layer_saved_load(const crossdock_layer_saved* saved,
                                                            int64_t* load);
/// Copies, for each expert [E], the number of this rank's routes that capacity dropped.
CROSSDOCK_C_API crossdock_status crossdock_layer_saved_dropped(const crossdock_layer_saved* saved,
                                                               int64_t* dropped);
CROSSDOCK_C_API void crossdock_layer_saved_destroy(crossdock_layer_saved* saved);

/// bias[e] += rate * sign(mean load - load[e]), for bias [E] in fp32 or fp64. With `centred`, the
/// mean of the update is subtracted from it. `load` [E] must be summed over all ranks that share
/// the bias.
CROSSDOCK_C_API crossdock_status crossdock_update_expert_bias(const crossdock_tensor* bias,
                                                              const int64_t* load, double rate,
                                                              int32_t centred);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_LAYER_H
