#include "plan/cuda/cuda_plan.hpp"

#include <algorithm>
#include <array>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "crossdock/extend/plan_data.hpp"

namespace crossdock::cuda {
namespace {

constexpr int64_t kAlignment = 256;

// Divides one allocation into arrays: used once to compute the size, then to set the addresses.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(memory) {}

  template <typename T>
  void place(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(memory_ + offset_);
    offset_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }
  int64_t num_bytes() const { return offset_; }

 private:
  std::byte* memory_;
  int64_t offset_ = 0;
};

int64_t carve(const CudaPlanInputs& inputs, std::byte* memory, DevicePlan& plan) {
  const int64_t num_routes = inputs.T * inputs.shape.K;
  Carver carver(memory);
  carver.place(plan.targets, num_routes);
  carver.place(plan.weights, num_routes);
  carver.place(plan.counts, int64_t{inputs.P} * inputs.shape.E);
  carver.place(plan.segment_starts, inputs.shape.E);
  carver.place(plan.local_starts, inputs.num_local + 1);
  carver.place(plan.local_counts, inputs.num_local);
  carver.place(plan.rows_per_rank, inputs.P);
  carver.place(plan.dropped, inputs.shape.E);
  return carver.num_bytes();
}

int64_t carve(const CudaPlanInputs& inputs, int64_t R, std::byte* memory, PlanLinks& links) {
  Carver carver(memory);
  carver.place(links.rows, R);
  carver.place(links.rank_targets, inputs.T * inputs.shape.K);
  return carver.num_bytes();
}

// Copies to host memory, after a wait: a copy queued behind kernels that wait for other ranks could
// keep those ranks from launching theirs.
void copy_out(void* to, const void* from, size_t num_bytes, const CudaPlan& plan) {
  const CallGuard guard(plan.device().index);
  const cudaStream_t stream = plan.inputs().stream;
  const bool is_per_thread = plan.inputs().is_per_thread;
  CROSSDOCK_CHECK(!is_capturing(stream) && !(is_per_thread && is_capturing(cudaStreamPerThread)),
                  "num_rows and dropped of a plan wait for the GPU, which is not possible while a "
                  "graph is captured; use capacity_rows, or call them after a replay");
  // This thread may have launched a graph with the plan in its own stream.
  if (is_per_thread) plan.inputs().watch->await(cudaStreamPerThread);
  plan.inputs().watch->await(stream);
  CROSSDOCK_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToHost, stream));
  plan.inputs().watch->await(stream);
}

template <typename T>
void copy_in(T* to, const std::vector<T>& from, cudaStream_t stream) {
  CROSSDOCK_CUDA(
      cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
}

}  // namespace

CudaPlan::CudaPlan(DevicePool& pool, const CudaPlanInputs& inputs) : inputs_(inputs) {
  memory_ = pool.take(carve(inputs, nullptr, arrays_), inputs.stream);
  carve(inputs, memory_.data(), arrays_);
}

CudaPlan::CudaPlan(DevicePool& pool, const CudaPlanInputs& inputs, const PlanData& data)
    : CudaPlan(pool, inputs) {
  const cudaStream_t stream = inputs_.stream;
  std::vector<RouteTarget> targets(data.expert_ids.size(), {-1, -1});
  for (size_t i = 0; i < targets.size(); ++i) {
    if (data.expert_ids[i] < 0) continue;
    targets[i] = {data.owner[static_cast<size_t>(data.expert_ids[i])],
                  static_cast<int32_t>(data.final_rows[i])};
  }
  const std::vector<int32_t> counts(data.counts.begin(), data.counts.end());
  const std::vector<int32_t> starts(data.segment_starts.begin(), data.segment_starts.end());
  copy_in(arrays_.targets, targets, stream);
  CROSSDOCK_CUDA(cudaMemcpyAsync(arrays_.weights, data.weights.data(),
                                 targets.size() * sizeof(float), cudaMemcpyHostToDevice, stream));
  copy_in(arrays_.counts, counts, stream);
  copy_in(arrays_.segment_starts, starts, stream);
  copy_in(arrays_.local_starts, data.local_starts, stream);
  copy_in(arrays_.local_counts, data.local_counts, stream);
  copy_in(arrays_.rows_per_rank, data.rows_per_rank, stream);
  copy_in(arrays_.dropped, data.dropped, stream);
  inputs_.watch->await(stream);
  num_rows_ = data.num_rows();
  capacity_rows_ = data.num_rows();
  dropped_ = data.dropped;
}

std::shared_ptr<const PlanLinks> CudaPlan::take_links(DevicePool& pool, int64_t R) const {
  struct Owned {
    PlanLinks links;
    Buffer memory;
  };
  const auto owned = std::make_shared<Owned>();
  owned->links.num_rows = R;
  owned->memory = pool.take(carve(inputs_, R, nullptr, owned->links), inputs_.stream);
  carve(inputs_, R, owned->memory.data(), owned->links);
  return {owned, &owned->links};
}

int64_t CudaPlan::num_rows() const {
  if (!num_rows_ || inputs_.capture_id != 0) {
    int64_t rows = 0;
    copy_out(&rows, arrays_.rows_per_rank + inputs_.rank, sizeof(rows), *this);
    num_rows_ = rows;
  }
  return *num_rows_;
}

int64_t CudaPlan::capacity_rows() const {
  return *capacity_rows_;
}

Segments CudaPlan::segments() const {
  return {.starts = arrays_.local_starts,
          .counts = arrays_.local_counts,
          .num_segments = inputs_.num_local,
          .device = device()};
}

ConstTensorView CudaPlan::weights() const {
  return {arrays_.weights, DType::kF32, {inputs_.T, inputs_.shape.K}, device()};
}

std::span<const int64_t> CudaPlan::dropped() const {
  if (dropped_.empty() || inputs_.capture_id != 0) {
    dropped_.resize(static_cast<size_t>(inputs_.shape.E));
    copy_out(dropped_.data(), arrays_.dropped, dropped_.size() * sizeof(int64_t), *this);
  }
  return dropped_;
}

}  // namespace crossdock::cuda
