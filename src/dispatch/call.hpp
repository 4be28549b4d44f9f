#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "comm/failure.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"
#include "dispatch/path.hpp"

namespace crossdock {

// Arguments of a dispatcher's calls, in host memory or on a GPU.

/// The arguments that must be identical on every rank, for Proposal::config.
std::string call_text(const DispatchArgs& args);
std::string call_text(const GatherSumArgs& args);
std::string call_text(const CombineBackwardArgs& args);
std::string call_text_of_routes(const ConstTensorView& rows);

// Checks of a call's tensors, which must be on `device`. Each throws Error(kInvalidArgument).
// REQUIRES: the plan is valid.

void check_args(const Plan& plan, const DispatchArgs& args, Device device);
void check_args(const Plan& plan, const GatherSumArgs& args, Device device);
void check_args(const Plan& plan, const CombineBackwardArgs& args, Device device);
void check_collected(const Plan& plan, const ConstTensorView& rows, const TensorView& routes,
                     Device device);
void check_device(Device device, const char* name, const ConstTensorView& tensor);
/// The tensor must also have this shape and, unless empty, not be null.
void check_tensor_on(Device device, const char* name, const ConstTensorView& tensor,
                     const Shape& shape);

/// Throws Error(kInvalidArgument) if an output overlaps another tensor.
void check_outputs(const DispatchArgs& args);
void check_outputs(const GatherSumArgs& args);
void check_outputs(const CombineBackwardArgs& args);
void check_outputs(const ConstTensorView& rows, const TensorView& routes);

/// The caller's output, or new memory from `memory`, which has take(dtype, shape).
template <typename Memory>
OwnedTensor output_or_new(Memory& memory, const TensorView& given, DType dtype,
                          const Shape& shape) {
  if (given.given()) return {.view = given, .owner = nullptr};
  return memory.take(dtype, shape);
}

// Outputs that the caller left unset. REQUIRES: args have been checked.

/// The outputs of a dispatch besides its rows.
template <typename Memory>
void take_outputs(Memory& memory, const Plan& plan, const DispatchArgs& args,
                  DispatchResult& result) {
  const int64_t R = plan.capacity_rows();
  if (args.scales.given()) {
    result.row_scales =
        output_or_new(memory, args.row_scales, args.scales.dtype, {R, args.scales.shape[1]});
  }
  if (args.with_row_weights) {
    result.row_weights = output_or_new(memory, args.row_weights, plan.data().weight_dtype, {R});
  }
}

/// The outputs of a combine_backward, with grad_rows from `memory` too.
template <typename Memory>
void take_outputs(Memory& memory, const Plan& plan, const CombineBackwardArgs& args,
                  CombineBackwardResult& result) {
  result.grad_rows = output_or_new(memory, args.grad_rows, args.y.dtype, args.y.shape);
  result.grad_weights = output_or_new(memory, args.grad_weights, plan.data().weight_dtype,
                                      {plan.num_tokens(), plan.data().K});
}

/// What all ranks must agree on before a call moves anything.
struct CallTerms {
  const char* operation;
  const Plan* plan = nullptr;  // null: the call makes one, or has none
  std::string text{};          // must be identical on every rank
  uint64_t subject = 0;        // without a plan: see Proposal

  uint64_t subject_id() const { return plan != nullptr && plan->valid() ? plan->id() : subject; }
};

/// One collective call with tensors in host memory: prepare, agree, move, in this order. GpuCall is
/// the same on a GPU.
class HostCall {
 public:
  /// Throws if the group has failed: peers may still use memory of the failed call.
  HostCall(const PathContext& context, CallTerms terms);

  /// Checks input and takes memory. An exception is this rank's refusal, which agree turns into the
  /// same error on every rank; the group stays usable.
  template <typename Body>
  void prepare(const Body& body) {
    refusal_ = refusal_of([&] {
      if (terms_.plan != nullptr) check_plan(context_, *terms_.plan);
      body();
    });
  }

  /// Agrees with the other ranks; throws the same error on all of them if a rank refuses, is
  /// configured differently or makes another call. Returns the number of the agreement.
  uint64_t agree();

  /// Moves rows; `num_bytes` is the payload, for the recorder. An exception poisons the group,
  /// because peers may be waiting for this rank's rows.
  template <typename Body>
  void move(int64_t num_bytes, const Body& body) {
    Group& group = context_.group;
    const EventRecorder::Scope recorded(group.recorder(), terms_.operation, sequence_, num_bytes);
    run_agreed(group, body);
  }

 private:
  const PathContext& context_;
  CallTerms terms_;
  std::optional<Error> refusal_;
  uint64_t sequence_ = 0;  // of the agreement
};

/// The agreement at the end of a dispatch with on_chunk: an exception from the last on_chunk
/// becomes every rank's error. It uses the arrival deadline, as on_chunk may take longer than
/// moving data.
void agree_on_chunks(Group& group, const Plan& plan);

}  // namespace crossdock
