#include "crossdock/experts.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/sizes.hpp"
#include "core/tensor_check.hpp"
#include "experts/grouped_mlp.hpp"

namespace crossdock {
namespace {

DType sum_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

void check_config(const ExpertsConfig& config) {
  CROSSDOCK_CHECK(config.num_local_experts >= 0, "num_local_experts must not be negative, got ",
                  config.num_local_experts);
  CROSSDOCK_CHECK(config.width >= 1 && config.width <= kMaxWidth, "width must be in [1, ",
                  kMaxWidth, "], got ", config.width);
  CROSSDOCK_CHECK(config.inner >= 1 && config.inner <= kMaxWidth, "inner must be in [1, ",
                  kMaxWidth, "], got ", config.inner);
  CROSSDOCK_CHECK(is_summable(config.dtype), "experts compute in fp64, fp32, bf16 or fp16, not in ",
                  name_of(config.dtype));
  CROSSDOCK_CHECK(!config.interleaved || is_gated(config.activation),
                  "interleaved needs an activation with a gate; ", name_of(config.activation),
                  " has none");
  CROSSDOCK_CHECK(config.activation != Activation::kClampedSwiglu || config.limit > 0.0,
                  "limit must be positive, got ", config.limit);
}

void check_segments(const ExpertsConfig& config, const Segments& segments, int64_t num_rows) {
  CROSSDOCK_CHECK(segments.num_segments == config.num_local_experts, "there must be ",
                  config.num_local_experts, " segments, one for each local expert, got ",
                  segments.num_segments);
  CROSSDOCK_CHECK(segments.device.is_cpu(), "segments must be in host memory");
  int64_t end = 0;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    CROSSDOCK_CHECK(segments.starts[e] >= end && segments.counts[e] >= 0, "segment ", e,
                    " must start at row ", end,
                    " or later and have a count of at least 0, got start ", segments.starts[e],
                    " count ", segments.counts[e]);
    end = segments.starts[e] + segments.counts[e];
  }
  CROSSDOCK_CHECK(segments.num_rows() >= end && segments.num_rows() <= num_rows,
                  "the segments must end within the ", num_rows, " rows given and not before row ",
                  end, ", got ", segments.num_rows());
  CROSSDOCK_CHECK(
      product_within(kMaxBytes,
                     {segments.num_rows(), config.hidden_width(), int64_t{sizeof(double)}}),
      segments.num_rows(), " rows of inner width ", config.inner, " are more than can be counted");
}

void check_rows(const ExpertsConfig& config, const char* name, const ConstTensorView& rows,
                int64_t num_rows) {
  check_tensor(name, rows, config.dtype, Shape{num_rows, config.width});
}

// Rows that may be in the type of the sums instead, and are then not rounded.
void check_results(const ExpertsConfig& config, const char* name, const TensorView& rows,
                   int64_t num_rows) {
  const bool is_wide = rows.dtype == sum_dtype(config.dtype);
  check_tensor(name, rows, is_wide ? rows.dtype : config.dtype, Shape{num_rows, config.width});
}

void check_row_weights(const ExpertsConfig& config, const char* name,
                       const ConstTensorView& weights, int64_t num_rows) {
  check_tensor(name, weights, sum_dtype(config.dtype), Shape{num_rows});
}

// Parameters, or their gradients, which may have another dtype.
template <typename Views>
void check_parameters(const ExpertsConfig& config, const Views& views, DType dtype,
                      const std::string& prefix, bool all_optional) {
  const int64_t E_local = config.num_local_experts;
  const int64_t hidden = config.hidden_width();
  if (!all_optional || views.w1.given()) {
    check_tensor(prefix + "w1", views.w1, dtype, Shape{E_local, hidden, config.width});
  }
  if (!all_optional || views.w2.given()) {
    check_tensor(prefix + "w2", views.w2, dtype, Shape{E_local, config.width, config.inner});
  }
  if (views.b1.given()) check_tensor(prefix + "b1", views.b1, dtype, Shape{E_local, hidden});
  if (views.b2.given()) check_tensor(prefix + "b2", views.b2, dtype, Shape{E_local, config.width});
}

std::vector<NamedTensor> inputs_of(const ExpertWeights& weights, std::vector<NamedTensor> rows) {
  rows.insert(rows.end(),
              {{"w1", weights.w1}, {"w2", weights.w2}, {"b1", weights.b1}, {"b2", weights.b2}});
  return rows;
}

// Segments of which only those in a range have rows.
class SomeSegments {
 public:
  SomeSegments(const Segments& all, SegmentRange range)
      : counts_(all.counts, all.counts + all.num_segments), view_(all) {
    CROSSDOCK_CHECK(0 <= range.first && range.first <= range.last && range.last <= all.num_segments,
                    "the range must be within the ", all.num_segments, " segments, got [",
                    range.first, ", ", range.last, ")");
    std::fill(counts_.begin(), counts_.begin() + range.first, 0);
    std::fill(counts_.begin() + range.last, counts_.end(), 0);
    view_.counts = counts_.data();
  }
  Segments view() const { return view_; }  // valid as long as this object

 private:
  std::vector<int64_t> counts_;
  Segments view_;
};

// Calls work(mlp) with the GroupedMlp of the configured dtype.
template <typename Work>
auto with_mlp(const ExpertsConfig& config, ThreadPool& pool, BufferPool& buffers,
              const Work& work) {
  switch (config.dtype) {
    case DType::kF64:
      return work(experts::GroupedMlp<double>(config, pool, buffers));
    case DType::kBF16:
      return work(experts::GroupedMlp<BF16>(config, pool, buffers));
    case DType::kF16:
      return work(experts::GroupedMlp<F16>(config, pool, buffers));
    default:
      return work(experts::GroupedMlp<float>(config, pool, buffers));
  }
}

}  // namespace

Experts::Experts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool)
    : config_(config),
      pool_(pool ? std::move(pool) : ThreadPool::process_wide()),
      buffers_(std::make_shared<BufferPool>()) {
  check_config(config_);
}

void Experts::check(const ExpertWeights& weights) const {
  check_parameters(config_, weights, config_.dtype, "", false);
}

void Experts::check(const ExpertGradients& grads) const {
  check_parameters(config_, grads, sum_dtype(config_.dtype), "grad of ", true);
}

void Experts::check(const ExpertsForwardArgs& args) const {
  const int64_t R = args.rows.num_rows();
  check_rows(config_, "rows", args.rows, R);
  check_results(config_, "y", args.y, R);
  check_segments(config_, args.segments, R);
  check(args.weights);
  if (config_.weights_in == WeightsIn::kExperts) {
    check_row_weights(config_, "row_weights", args.row_weights, R);
  }
  check_no_overlap({{"y", args.y}}, inputs_of(args.weights, {{"rows", args.rows},
                                                             {"row_weights", args.row_weights}}));
}

ExpertsSaved Experts::begin_forward(const ExpertsForwardArgs& args) const {
  check(args);
  return with_mlp(config_, *pool_, *buffers_, [&](auto mlp) { return mlp.begin_forward(args); });
}

void Experts::forward_part(const ExpertsForwardArgs& args, ExpertsSaved& saved,
                           SegmentRange part) const {
  const SomeSegments some(args.segments, part);
  ExpertsForwardArgs part_args = args;
  part_args.segments = some.view();
  with_mlp(config_, *pool_, *buffers_, [&](auto mlp) { mlp.forward(part_args, saved); });
}

ExpertsSaved Experts::forward(const ExpertsForwardArgs& args) const {
  ExpertsSaved saved = begin_forward(args);
  with_mlp(config_, *pool_, *buffers_, [&](auto mlp) { mlp.forward(args, saved); });
  return saved;
}

void Experts::check(const ExpertsBackwardDxArgs& args) const {
  const int64_t R = args.grad_y.num_rows();
  check_rows(config_, "grad_y", args.grad_y, R);
  check_results(config_, "grad_rows", args.grad_rows, R);
  check_segments(config_, args.segments, R);
  check(args.weights);
  if (args.row_weights.given()) check_row_weights(config_, "row_weights", args.row_weights, R);
  if (args.grad_row_weights.given()) {
    check_row_weights(config_, "grad_row_weights", args.grad_row_weights, R);
  }
  CROSSDOCK_CHECK(args.saved != nullptr, "saved must be the result of forward, got none");
  if (config_.recompute) {
    check_rows(config_, "rows", args.rows, R);
  } else {
    const int64_t wanted =
        args.segments.num_rows() * config_.hidden_width() * size_of(config_.dtype);
    CROSSDOCK_CHECK(args.saved->hidden.num_bytes() >= wanted,
                    "saved must be the unused result of forward for these segments: ", wanted,
                    " bytes of hidden rows, got ", args.saved->hidden.num_bytes());
  }
  check_no_overlap(
      {{"grad_rows", args.grad_rows}, {"grad_row_weights", args.grad_row_weights}},
      inputs_of(args.weights,
                {{"rows", args.rows}, {"row_weights", args.row_weights}, {"grad_y", args.grad_y}}));
}

void Experts::begin_backward_dx(const ExpertsBackwardDxArgs& args) const {
  check(args);
  with_mlp(config_, *pool_, *buffers_, [&](auto mlp) { mlp.begin_backward_dx(args); });
}

void Experts::backward_dx_part(const ExpertsBackwardDxArgs& args, SegmentRange part) const {
  const SomeSegments some(args.segments, part);
  ExpertsBackwardDxArgs part_args = args;
  part_args.segments = some.view();
  with_mlp(config_, *pool_, *buffers_, [&](auto mlp) { mlp.backward_dx(part_args); });
}

void Experts::finish_backward_dx(const ExpertsBackwardDxArgs& args) const {
  args.saved->hidden = {};
  if (!args.keep_for_dw) *args.saved = {};
}

void Experts::backward_dx(const ExpertsBackwardDxArgs& args) const {
  begin_backward_dx(args);
  with_mlp(config_, *pool_, *buffers_, [&](auto mlp) { mlp.backward_dx(args); });
  finish_backward_dx(args);
}

void Experts::backward_dw(const ExpertsBackwardDwArgs& args) const {
  const int64_t R = args.grad_y.num_rows();
  check_rows(config_, "grad_y", args.grad_y, R);
  check_rows(config_, "rows", args.rows, R);
  check_segments(config_, args.segments, R);
  check(args.grads);
  if (args.row_weights.given()) check_row_weights(config_, "row_weights", args.row_weights, R);
  CROSSDOCK_CHECK(args.saved != nullptr, "saved must come from backward_dx, got none");
  const int64_t wanted = args.segments.num_rows() * config_.inner * size_of(config_.dtype);
  CROSSDOCK_CHECK(args.saved->weighted_activation.num_bytes() >= wanted,
                  "saved must come from backward_dx with keep_for_dw for these segments: ", wanted,
                  " bytes of activations, got ", args.saved->weighted_activation.num_bytes());
  check_no_overlap(
      {{"grad of w1", args.grads.w1},
       {"grad of w2", args.grads.w2},
       {"grad of b1", args.grads.b1},
       {"grad of b2", args.grads.b2}},
      {{"rows", args.rows}, {"row_weights", args.row_weights}, {"grad_y", args.grad_y}});
  with_mlp(config_, *pool_, *buffers_, [&](auto mlp) { mlp.backward_dw(args); });
}

}  // namespace crossdock
