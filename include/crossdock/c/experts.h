#ifndef CROSSDOCK_C_EXPERTS_H
#define CROSSDOCK_C_EXPERTS_H

/// Experts: a grouped MLP over the rows of a plan, in host memory or on a GPU. A part of
/// crossdock.h.

#ifndef CROSSDOCK_CROSSDOCK_H
#error "include crossdock/crossdock.h instead"
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct crossdock_experts crossdock_experts;
/// Values of one forward that its backward needs.
typedef struct crossdock_experts_saved crossdock_experts_saved;

enum {  // activation
  CROSSDOCK_SWIGLU = 0,
  CROSSDOCK_CLAMPED_SWIGLU = 1,
  CROSSDOCK_GEGLU = 2,
  CROSSDOCK_GELU = 3,
  CROSSDOCK_GELU_TANH = 4,
  CROSSDOCK_SQUARED_RELU = 5,
  CROSSDOCK_GEGLU_TANH = 6,
  CROSSDOCK_LIMITED_SWIGLU = 7
};
enum { CROSSDOCK_WEIGHTS_IN_COMBINE = 0, CROSSDOCK_WEIGHTS_IN_EXPERTS = 1 };  // weights_in

typedef struct crossdock_experts_config {
  size_t struct_size;
  int64_t num_local_experts;  // E_local; may be 0
  int64_t width;              // D
  int64_t inner;              // F
  double limit;               // for CROSSDOCK_CLAMPED_SWIGLU and CROSSDOCK_LIMITED_SWIGLU; 0: 7
  int32_t dtype;              // of rows, y, weights and biases: fp64, fp32, bf16 or fp16
  int32_t activation;
  int32_t interleaved;  // 1: rows of W1 are gate 0, linear 0, gate 1, ...
  int32_t weights_in;   // where route weights are applied
  int32_t recompute;    // 1: forward saves nothing; backward recomputes, with the same bits
  int32_t transposed;   // 1: W1 is [E_local, D, 2F or F], W2 [E_local, F, D]; in host memory only
} crossdock_experts_config;
#define CROSSDOCK_EXPERTS_CONFIG_INIT \
  { .struct_size = sizeof(crossdock_experts_config) }

/// Parameters of all local experts. W1 has 2F rows for activations with a gate, else F. Never
/// changes.
typedef struct crossdock_expert_weights {
  crossdock_tensor w1;  // [E_local, 2F or F, D]: gate rows, then linear rows (or interleaved)
  crossdock_tensor w2;  // [E_local, D, F]
  crossdock_tensor b1;  // [E_local, 2F or F], optional
  crossdock_tensor b2;  // [E_local, D], optional
} crossdock_expert_weights;

/// Outputs for the gradients of the weights, in fp32 (fp64 if the experts are fp64), with the same
/// shapes. On a GPU those of w1 and w2 may have the dtype of the experts instead, but then cannot
/// be accumulated. All are optional: a gradient that is not given is not computed. Never changes.
typedef crossdock_expert_weights crossdock_expert_gradients;

/// Rows grouped by local expert, as in crossdock_plan_info. The arrays are on the device of the
/// rows. Never changes.
typedef struct crossdock_segments {
  const int64_t* starts;  // [num_segments + 1]
  const int64_t* counts;  // [num_segments]
  int64_t num_segments;   // E_local
} crossdock_segments;

/// Refuses an invalid configuration. Calls with experts are not collective. With tensors on a GPU,
/// calls queue their work in `stream` and do not wait; R may exceed the rows of the segments, and
/// rows past the last segment become 0 in the outputs.
CROSSDOCK_C_API crossdock_status crossdock_experts_create(const crossdock_experts_config* config,
                                                          crossdock_experts** experts);
CROSSDOCK_C_API void crossdock_experts_destroy(crossdock_experts* experts);

typedef struct crossdock_experts_forward_args {
  size_t struct_size;
  crossdock_expert_weights weights;
  crossdock_segments segments;
  crossdock_tensor rows;         // [R, D]
  crossdock_tensor row_weights;  // [R] fp32 (fp64 for fp64), with CROSSDOCK_WEIGHTS_IN_EXPERTS only
  crossdock_tensor y;            // out [R, D]; given by the caller
  void* stream;                  // a cudaStream_t, for tensors on a GPU; NULL: the default stream
} crossdock_experts_forward_args;
#define CROSSDOCK_EXPERTS_FORWARD_ARGS_INIT \
  { .struct_size = sizeof(crossdock_experts_forward_args) }

/// `saved` may be NULL if there is no backward.
CROSSDOCK_C_API crossdock_status crossdock_experts_forward(
    const crossdock_experts* experts, const crossdock_experts_forward_args* args,
    crossdock_experts_saved** saved);

typedef struct crossdock_experts_backward_args {
  size_t struct_size;
  crossdock_expert_weights weights;
  crossdock_segments segments;
  crossdock_tensor rows;         // [R, D] as in forward
  crossdock_tensor row_weights;  // [R] the weight of each row, wherever it is applied; not given: 1
  crossdock_tensor grad_y;       // [R, D] dispatched gradient of the combined output, not yet
                                 // multiplied by the row's weight
  crossdock_tensor grad_rows;    // out [R, D]; given by the caller
  crossdock_tensor grad_row_weights;  // out [R] fp32 (fp64 for fp64), optional
  crossdock_expert_gradients grads;   // out; read by crossdock_experts_backward_dw only
  int32_t accumulate;                 // 1: adds to `grads` instead of overwriting them
  int32_t padding;                    // 0
  void* stream;                       // the stream of forward
} crossdock_experts_backward_args;
#define CROSSDOCK_EXPERTS_BACKWARD_ARGS_INIT \
  { .struct_size = sizeof(crossdock_experts_backward_args) }

/// Computes the gradients of the rows and of their weights, and prepares `saved` for backward_dw.
CROSSDOCK_C_API crossdock_status crossdock_experts_backward_dx(
    const crossdock_experts* experts, const crossdock_experts_backward_args* args,
    crossdock_experts_saved* saved);
/// Computes the gradients of the parameters, at any time after backward_dx, with the same
/// arguments.
CROSSDOCK_C_API crossdock_status crossdock_experts_backward_dw(
    const crossdock_experts* experts, const crossdock_experts_backward_args* args,
    const crossdock_experts_saved* saved);
CROSSDOCK_C_API void crossdock_experts_saved_destroy(crossdock_experts_saved* saved);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // CROSSDOCK_C_EXPERTS_H
