#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "dispatch/path.hpp"

namespace crossdock {

/// A call that this rank has prepared: its tensors are checked and its memory is taken.
struct ReadyCall {
  /// Moves the rows, or queues the work, once all ranks have agreed. `sequence` is the number of
  /// the agreement.
  std::function<void(uint64_t sequence)> move{};
  int64_t num_bytes = 0;     // payload, for the recorder; 0 if unknown
  int64_t copied_bytes = 0;  // copied because peers cannot reach the caller's memory
};

/// The tensors of a combine_backward, checked, with outputs allocated.
struct GradientTensors {
  ConstTensorView grad_out;  // [T, D]
  ConstTensorView y;         // [R, D]
  TensorView grad_rows;      // [R, D]
  TensorView grad_weights;   // [T, K]
};

/// The frame of every collective call, the same for all paths: check the input, take memory, agree
/// with the other ranks, move rows, record. A path supplies the steps.
///
/// A failure before the ranks have agreed is this rank's refusal, which becomes the same error on
/// every rank; the group stays usable. A failure afterwards poisons the group, because peers may be
/// waiting for this rank's rows.
class FramedPath : public Path {
 public:
  DispatchResult dispatch(const Plan& plan, const DispatchArgs& args) final;
  OwnedTensor gather_sum(const char* operation, const Plan& plan, const GatherSumArgs& args) final;
  CombineBackwardResult combine_backward(const Plan& plan, const CombineBackwardArgs& args) final;
  OwnedTensor collect_routes(const Plan& plan, ConstTensorView rows, TensorView routes) final;
  void agree_on(const Proposal& proposal) final;

 protected:
  struct Traits {
    const char* where = "";  // where tensors are, for messages: "x on a GPU must be ..."
    bool takes_fp64 = true;
    bool only_queues = false;  // rows may not have moved yet when a call returns
  };
  FramedPath(PathContext context, const Traits& traits);

  const PathContext& context() const { return context_; }
  Group& group() const { return context_.group; }
  const DispatchConfig& config() const { return *context_.config; }

  struct Call {
    const char* operation;
    const Plan* plan;        // null: the call makes one, or has none
    std::string text;        // must be identical on every rank
    uint64_t subject = 0;    // without a plan: see Proposal
    bool must_meet = false;  // hosts must know that all ranks make the call before it returns

    uint64_t subject_id() const { return plan != nullptr && plan->valid() ? plan->id() : subject; }
  };
  using MakeReady = std::function<ReadyCall()>;
  /// Runs a call in the frame; returns the number of the agreement. A path may override it to add
  /// steps around the call.
  virtual uint64_t run(const Call& call, const MakeReady& make_ready);

  /// The agreement at the end of a dispatch with on_chunk: an exception from the last on_chunk
  /// becomes every rank's error. It uses the arrival deadline, as on_chunk may take longer than
  /// moving data.
  void agree_on_chunks(const Plan& plan);

  // The steps of a call. An exception before the agreement is this rank's refusal.

  /// Throws if the path is unusable. Does what must precede any use of tensors.
  virtual void check_usable() = 0;
  virtual Device device() const = 0;
  /// Memory for an output.
  virtual OwnedTensor take(DType dtype, const Shape& shape) = 0;
  /// The caller's output, checked; new memory if the caller gave none.
  virtual OwnedTensor output_or_new(const char* name, const TensorView& given, DType dtype,
                                    const Shape& shape) = 0;
  /// Memory for rows [R, D] that peers may write.
  virtual OwnedTensor take_rows(const char* operation, const Plan& plan, DType dtype) = 0;
  /// (optional) The same for the rows of a dispatch. Default: take_rows.
  virtual OwnedTensor take_dispatch_rows(const Plan& plan, DType dtype);

  /// Agrees with the other ranks; throws the same error on all of them if a rank refuses, is
  /// configured differently or makes another call. Returns the number of the agreement.
  virtual uint64_t agree(const Call& call, const std::optional<Error>& refusal);

  /// (optional) Prepares a call that moves no rows. Default: nothing to do after the agreement.
  virtual ReadyCall ready_agreement(const char* operation);
  // Each prepares one call. Plan and tensors are checked, outputs are allocated. The plan, and a
  // dispatch's args and result, live until the call returns; other arguments must be copied.
  virtual ReadyCall ready_dispatch(const Plan& plan, const DispatchArgs& args,
                                   const DispatchResult& result) = 0;
  virtual ReadyCall ready_gather_sum(const char* operation, const Plan& plan,
                                     const GatherSumArgs& args) = 0;
  virtual ReadyCall ready_combine_backward(const Plan& plan, const GradientTensors& tensors) = 0;
  virtual ReadyCall ready_collect_routes(const Plan& plan, const ConstTensorView& rows,
                                         const TensorView& routes) = 0;

 private:
  PathContext context_;
  Traits traits_;
};

}  // namespace crossdock
