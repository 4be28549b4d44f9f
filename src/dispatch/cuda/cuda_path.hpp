#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/kernels/gather_sum.hpp"
#include "dispatch/framed_path.hpp"

namespace crossdock::cuda {

/// A call on a GPU that this rank has prepared.
struct CudaCall {
  std::vector<MemoryHandle> handles{};                          // memory that peers use
  std::function<void(const CudaRank::Agreed& agreed)> queue{};  // called once all ranks have agreed
  bool needs_barrier = true;  // peers must wait for this rank's stream before they begin
};

/// Base of the GPU paths. After an agreement a rank only queues work until all ranks have done so:
/// an allocation could wait for kernels that wait for this rank.
class CudaPath : public FramedPath {
 public:
  Plan plan(const Routing& routing) override;
  Plan plan(const DenseRouting& routing) override;
  OwnedTensor allocate_rows(const Plan& plan, DType dtype) final;
  void begin_aside() final {
    chunks_.clear();  // left by a call that failed
    if (runs_aside()) rank_.streams().begin_aside();
  }
  std::shared_ptr<const void> end_aside() final {
    return runs_aside() ? rank_.streams().end_aside() : nullptr;
  }
  std::vector<PendingChunk> take_chunks() final { return std::exchange(chunks_, {}); }
  void finish(const std::shared_ptr<const void>& done) final { rank_.streams().finish(done); }
  void set_options(const DeviceOptions& options) final { rank_.set_options(options); }
  void check() final { rank_.check(); }
  void await() final { rank_.watch().await(rank_.stream()); }

 protected:
  CudaPath(const PathContext& context, int device, const ChannelUse& use);

  /// (optional) Whether begun calls are queued in a separate stream, not in the caller's.
  virtual bool runs_aside() const { return true; }
  /// (optional) Connects the ranks, at the beginning of every plan made on the host. Collective.
  virtual void connect() {}
  /// Copies to the GPU the parts of a host plan that calls need.
  virtual std::shared_ptr<const DevicePlanData> upload(const Plan& host_plan) = 0;

  uint64_t run(const Call& call, const MakeReady& make_ready) final;
  /// Sets the call that the ranks agree on next, for the ready_ members of a path.
  ReadyCall ready(CudaCall call);

  OwnedTensor take_rows(const char* operation, const Plan& plan, DType dtype) final;
  ReadyCall ready_agreement(const char* operation) final;

  /// Notes that a chunk of a begun dispatch has arrived once the work queued so far is done.
  void note_chunk(const DispatchChunk& chunk) {
    chunks_.push_back({.experts = chunk, .done = rank_.streams().mark()});
  }

  /// Kernel arguments that do not depend on where the rows are.
  GatherSumKernelArgs sum_args(const char* operation, const Plan& plan,
                               const GatherSumArgs& args) const;

  CudaRank rank_;

 private:
  void check_usable() final;
  Device device() const final { return rank_.where(); }
  OwnedTensor take(DType dtype, const Shape& shape) final { return rank_.take(dtype, shape); }
  OwnedTensor output_or_new(const char* name, const TensorView& given, DType dtype,
                            const Shape& shape) final;
  uint64_t agree(const Call& call, const std::optional<Error>& refusal) final;

  // The current call; empty between calls.
  CudaCall call_;
  CudaRank::Agreed agreed_;
  std::vector<PendingChunk> chunks_;  // of the dispatch queued last
};

}  // namespace crossdock::cuda
