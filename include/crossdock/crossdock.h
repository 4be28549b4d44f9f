#ifndef CROSSDOCK_CROSSDOCK_H
#define CROSSDOCK_CROSSDOCK_H

/// Crossdock's C API, in C99. Start here; examples/06_c_api.c is a complete program, and
/// docs/c_api.md says what is stable.
///
/// Life cycle, on every rank:
///
///   crossdock_bootstrap_open, crossdock_group_join               the ranks that exchange rows, as
///     or crossdock_group_from_mpi, _from_threads, ...            processes or as threads
///
///     crossdock_dispatcher_create                                one per configuration
///       crossdock_plan_create                                    one per routing, any number
///         crossdock_dispatch          x [T, D] -> rows [R, D]
///           your experts              rows -> y [R, D]
///         crossdock_combine           y -> out [T, D]
///
///         crossdock_combine_backward  grad_out [T, D] -> gradient of y [R, D] and of the weights
///           your experts' backward    gradient of y -> grad_rows [R, D]
///         crossdock_dispatch_backward grad_rows -> grad_x [T, D]
///       crossdock_plan_destroy
///     crossdock_dispatcher_destroy
///   crossdock_group_destroy
///
/// Or, instead of a dispatcher and your own experts, a whole MoE layer: crossdock_layer_create. To
/// combine expert parallelism with tensor, context, data or pipeline parallelism, get the groups
/// from a mesh: crossdock_mesh_create.
///
/// Rules for all calls:
///  - A function returns a status, CROSSDOCK_OK if it succeeded. crossdock_last_error() has the
///    text of the calling thread's last failure. No exception leaves the library; it never prints,
///    aborts or exits. A failed call leaves its output arguments unchanged, except the contents of
///    memory that the caller provided.
///  - Calls marked "collective" are made by all ranks of the group, in the same order, even by
///    ranks without tokens or experts. An invalid argument on one rank becomes the same error on
///    every rank, and the group stays usable. (An invalid dispatcher, layer or group handle is an
///    error on this rank alone: without it the rank cannot tell the others.)
///  - Every wait for other ranks has a deadline (crossdock_group_config).
///  - Structs begin with struct_size: initialise them with their _INIT macro, which sets all other
///    fields to 0, the default of every field. Later versions only append fields, so a program
///    compiled against an older header runs with a newer library. Structs without struct_size never
///    change.
///  - Arguments are read during the call; nothing is kept except where stated.
///  - Handles may be destroyed in any order: objects made with a group keep its memory alive.
///    _destroy functions accept NULL and never wait for other ranks.
///  - An object may be used by any thread, but by only one at a time. Ranks that are threads have
///    one group each.
///  - After fork, destroying the child's copies of handles does nothing, and other calls with them
///    return CROSSDOCK_UNSUPPORTED. The parent and its peers are unaffected.

#include <stddef.h>
#include <stdint.h>

#include "crossdock/version.h"

#if defined(__GNUC__)
#define CROSSDOCK_C_API __attribute__((visibility("default")))
#else
#define CROSSDOCK_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- Status ----

typedef int32_t crossdock_status;
enum {
  CROSSDOCK_OK = 0,
  CROSSDOCK_INVALID_ARGUMENT = 1,  // the same error on every rank; the group stays usable
  CROSSDOCK_MISMATCH = 2,          // ranks differ in configuration or call; the group stays usable
  CROSSDOCK_UNSUPPORTED = 3,       // not built in, or not possible on this machine
  CROSSDOCK_CAPACITY = 4,          // more rows than max_rows; the message gives the size needed
  CROSSDOCK_PEER_FAILED = 5,    // a rank left, failed or died; the group is poisoned: later calls
                                // return this error too
  CROSSDOCK_TIMEOUT = 6,        // a rank missed a deadline; the group is poisoned
  CROSSDOCK_COMMUNICATION = 7,  // the communicator failed; the group is poisoned
  CROSSDOCK_CUDA_FAILURE = 8,   // a CUDA call failed
  CROSSDOCK_INTERNAL = 9,       // a bug in Crossdock
  CROSSDOCK_OUT_OF_MEMORY = 10  // a rank has not enough memory
};

/// Which rank and which call the last failure is about.
typedef struct crossdock_error_info {
  size_t struct_size;
  int32_t status;         // CROSSDOCK_OK if no call of this thread has failed
  int32_t culprit;        // rank that caused it, in the group of the call; -1: not applicable
  uint64_t sequence;      // number of the collective in its group; 0: not applicable
  const char* operation;  // "plan", "dispatch", ...; "": not applicable. Valid forever
} crossdock_error_info;
#define CROSSDOCK_ERROR_INFO_INIT \
  { .struct_size = sizeof(crossdock_error_info) }

/// Text of the calling thread's last failure, "" if there was none. Valid until its next failure.
CROSSDOCK_C_API const char* crossdock_last_error(void);
CROSSDOCK_C_API crossdock_status crossdock_last_error_info(crossdock_error_info* info);
/// For bindings that find an invalid argument before a collective call, which the other ranks make:
/// the calling thread's next collective call with a group, dispatcher, layer or mesh fails on every
/// rank with CROSSDOCK_INVALID_ARGUMENT and this reason. The group stays usable. Besides its own
/// handle, the call reads only the plan, `saved` or `decision`: pass it as on the other ranks, or
/// the error is CROSSDOCK_MISMATCH. If its own handle is invalid, the call fails on this rank alone
/// and the refusal stays pending. The reason is copied; NULL withdraws it. Functions that make a
/// group (crossdock_group_subgroup, _join and _from_*) ignore it.
CROSSDOCK_C_API void crossdock_refuse_next_call(const char* reason);
/// "ok", "invalid argument", ...; "unknown" for other numbers.
CROSSDOCK_C_API const char* crossdock_status_name(crossdock_status status);
/// Version of the library that is running. CROSSDOCK_VERSION is that of the headers.
CROSSDOCK_C_API const char* crossdock_version(void);

// ---- Tensors ----
//
// Letters for dimensions:
//   T tokens here, K routes per token, E experts in all, E_local here, P ranks, D token width,
//   F expert inner width, R rows received

enum {  // crossdock_tensor.dtype; 0 is none, so that a forgotten dtype is an error
  CROSSDOCK_F64 = 1,
  CROSSDOCK_F32 = 2,
  CROSSDOCK_BF16 = 3,
  CROSSDOCK_F16 = 4,
  CROSSDOCK_F8E4M3 = 5,
  CROSSDOCK_E8M0 = 6,
  CROSSDOCK_I64 = 7,
  CROSSDOCK_I32 = 8,
  CROSSDOCK_U8 = 9,
  CROSSDOCK_BOOL = 10  // one byte
};
enum { CROSSDOCK_CPU = 0, CROSSDOCK_CUDA = 1 };  // crossdock_tensor.device_kind

/// Memory of the caller or of a crossdock_output, row-major and contiguous.
typedef struct crossdock_tensor {
  void* data;        // may be NULL if the tensor is empty
  int64_t shape[4];  // the first num_dims entries
  int32_t num_dims;  // 0: the tensor is not given
  int32_t dtype;
  int32_t device_kind;
  int32_t device_index;  // of the GPU
} crossdock_tensor;

typedef struct crossdock_memory crossdock_memory;

/// A result. If the caller sets `tensor`, with the exact shape and dtype, the call writes there.
/// Otherwise the library provides the memory: the call sets `tensor` and `owner`, and the caller
/// releases it with crossdock_output_release. Start with all zeros: crossdock_output out = {0};
typedef struct crossdock_output {
  crossdock_tensor tensor;
  crossdock_memory* owner;  // must be NULL before the call; stays NULL if the caller set `tensor`
} crossdock_output;

/// Releases memory of a crossdock_output. `stream` is the cudaStream_t in which the memory was last
/// used (NULL: the default stream): the memory is reused only after the work queued there and after
/// the work of the dispatcher that provided it. Ignored for host memory. The dispatcher's stream at
/// the time of the call that provided the memory must still exist. Sets `output` to zeros; does
/// nothing if its owner is NULL.
CROSSDOCK_C_API crossdock_status crossdock_output_release(crossdock_output* output, void* stream);
/// Shares memory of a crossdock_output with another library: sets *managed_tensor to a DLPack
/// DLManagedTensor, whose deleter releases it like crossdock_output_release. The memory is reused
/// once the output and all tensors that share it are released, in any order and by any thread.
CROSSDOCK_C_API crossdock_status crossdock_output_to_dlpack(const crossdock_output* output,
                                                            void* stream, void** managed_tensor);
/// Describes memory of another library, given by a DLPack DLManagedTensor, which must outlive the
/// use of `tensor`. It must be contiguous, in host memory or on a GPU.
CROSSDOCK_C_API crossdock_status crossdock_tensor_from_dlpack(const void* managed_tensor,
                                                              crossdock_tensor* tensor);
/// The destructor of a Python capsule named "dltensor" with a managed_tensor: calls its deleter,
/// unless a consumer has renamed the capsule.
CROSSDOCK_C_API void crossdock_destroy_dlpack_capsule(void* capsule);

/// Tensors in host memory; set device_kind and device_index for others.
static inline crossdock_tensor crossdock_tensor_3d(const void* data, int32_t dtype, int64_t dim0,
                                                   int64_t dim1, int64_t dim2) {
  crossdock_tensor tensor;
  tensor.data = (void*)data;  // an input is not written to
  tensor.shape[0] = dim0;
  tensor.shape[1] = dim1;
  tensor.shape[2] = dim2;
  tensor.shape[3] = 0;
  tensor.num_dims = 3;
  tensor.dtype = dtype;
  tensor.device_kind = CROSSDOCK_CPU;
  tensor.device_index = 0;
  return tensor;
}
static inline crossdock_tensor crossdock_tensor_2d(const void* data, int32_t dtype, int64_t dim0,
                                                   int64_t dim1) {
  crossdock_tensor tensor = crossdock_tensor_3d(data, dtype, dim0, dim1, 0);
  tensor.num_dims = 2;
  return tensor;
}
static inline crossdock_tensor crossdock_tensor_1d(const void* data, int32_t dtype, int64_t dim0) {
  crossdock_tensor tensor = crossdock_tensor_3d(data, dtype, dim0, 0, 0);
  tensor.num_dims = 1;
  return tensor;
}

#ifdef __cplusplus
}  // extern "C"
#endif

// Each of these headers uses the ones before it.
// clang-format off
#include "crossdock/c/group.h"
#include "crossdock/c/dispatcher.h"
#include "crossdock/c/experts.h"
#include "crossdock/c/fp8.h"
#include "crossdock/c/layer.h"
#include "crossdock/c/mesh.h"
#include "crossdock/c/planner.h"
#include "crossdock/c/sequence.h"
// clang-format on

#endif  // CROSSDOCK_CROSSDOCK_H
