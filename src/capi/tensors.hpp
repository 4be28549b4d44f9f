#pragma once

#include <span>
#include <vector>

#include "capi/handles.hpp"

namespace crossdock::capi {

/// Throws Error(kInvalidArgument) for a number that is not a dtype.
DType to_dtype(const char* name, int32_t dtype);

/// A tensor of the caller; unset if it is not given. Throws Error(kInvalidArgument) if it is not a
/// valid tensor. `name` is for messages.
TensorView to_view(const char* name, const crossdock_tensor& tensor);
/// As to_view, for a tensor that must be given.
TensorView to_view(const char* name, const crossdock_tensor* tensor);

/// Tensors [count] that must be given. `tensors` may be null if there are none.
std::vector<TensorView> to_views(const char* name, const crossdock_tensor* tensors, int64_t count);

crossdock_tensor from_view(const ConstTensorView& view);

/// Throws if an output still owns the memory of an earlier call.
void check_no_owner(const char* name, const crossdock_output& output);
/// The tensor that the caller gave for an output; unset if there is none.
TensorView given_output(const char* name, const crossdock_output& output);
TensorView given_output(const char* name, const crossdock_output* output);

/// One output of a call.
struct Result {
  crossdock_output* output;  // null: the caller does not take it
  OwnedTensor* tensor;       // unset: the call has no such result
};
/// Where the memory of results comes from.
struct MemorySource {
  GroupPtr group;
  Stream stream{};  // in which the memory was allocated
};
/// Hands the results to the caller: all of them, or none if memory runs out.
void set_outputs(std::span<const Result> results, const MemorySource& source);

/// The body of crossdock_output_release.
void release(crossdock_output* output, void* stream);

}  // namespace crossdock::capi
