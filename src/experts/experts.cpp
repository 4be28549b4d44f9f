#include "crossdock/experts.hpp"

#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "core/text.hpp"
#include "experts/backend.hpp"

namespace crossdock {
namespace {

DType sum_dtype(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

std::string describe(const ExpertsConfig& config) {
  return concat("num_local_experts=", config.num_local_experts, ";width=", config.width,
                ";inner=", config.inner, ";activation=", name_of(config.activation),
                ";interleaved=", config.interleaved, ";limit=", config.limit,
                ";transposed=", config.transposed,
                ";weights_in=", static_cast<int>(config.weights_in),
                ";dtype=", name_of(config.dtype));
}

ExpertsConfig checked(const ExpertsConfig& config) {
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
  const bool has_limit = config.activation == Activation::kClampedSwiglu ||
                         config.activation == Activation::kLimitedSwiglu;
  CROSSDOCK_CHECK(!has_limit || config.limit > 0.0, "limit must be positive, got ", config.limit);
  return config;
}

// GPUs have no kernels for fp64 and fp8.
void check_supported(DType dtype, Device device) {
  const bool is_fp8 = dtype == DType::kF8E4M3;
  if (device.is_cpu() || (!is_fp8 && dtype != DType::kF64)) return;
  throw Error(ErrorCode::kUnsupported,
              concat("experts on a GPU compute in fp32, bf16 or fp16, not in ", name_of(dtype),
                     is_fp8 ? "; convert the rows with dequantise_rows" : ""));
}

void check_supported(const ExpertsConfig& config, DType dtype, Device device) {
  check_supported(dtype, device);
  if (!config.transposed || device.is_cpu()) return;
  throw Error(ErrorCode::kUnsupported,
              "transposed weights are supported in host memory only; on a GPU pass contiguous "
              "w1 [E_local, 2F or F, D] and w2 [E_local, D, F] to experts without `transposed`");
}

void check_supported(const ExpertsConfig& config, const ConstTensorView& rows) {
  check_supported(config, rows.dtype, rows.device);
}

void check_free_sms(int free_sms) {
  CROSSDOCK_CHECK(free_sms >= 0, "free_sms must not be negative, got ", free_sms);
}

void check_places(const Segments& segments, int64_t num_rows) {
  int64_t end = 0;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    CROSSDOCK_CHECK(segments.starts[e] >= end && segments.counts[e] >= 0 &&
                        segments.starts[e] <= kMaxBytes - segments.counts[e],
                    "segment ", e, " must start at row ", end,
                    " or later, have a count of at least 0 and end at row 2^60 at most, got start ",
                    segments.starts[e], " count ", segments.counts[e]);
    end = segments.starts[e] + segments.counts[e];
  }
  CROSSDOCK_CHECK(segments.num_rows() >= end && segments.num_rows() <= num_rows,
                  "the segments must end within the ", num_rows, " rows given and not before row ",
                  end, ", got ", segments.num_rows());
}

// Number of rows that need memory: all R given rows if only the GPU knows how many rows the
// segments have.
int64_t count_kept_rows(const Segments& segments, int64_t R) {
  return segments.device.is_cpu() ? segments.num_rows() : R;
}

void check_segments(const ExpertsConfig& config, const Segments& segments,
                    const ConstTensorView& rows) {
  CROSSDOCK_CHECK(segments.num_segments == config.num_local_experts, "there must be ",
                  config.num_local_experts, " segments, one for each local expert, got ",
                  segments.num_segments);
  CROSSDOCK_CHECK(segments.device == rows.device, "the rows are ", describe(rows.device),
                  ", so segments must be there too, not ", describe(segments.device));
  if (segments.device.is_cpu()) check_places(segments, rows.num_rows());
  const int64_t num_rows = count_kept_rows(segments, rows.num_rows());
  CROSSDOCK_CHECK(
      product_within(kMaxBytes, {num_rows, config.hidden_width(), int64_t{sizeof(double)}}),
      num_rows, " rows of inner width ", config.inner, " are more than can be counted");
}

// Checks the tensors of one call: all must be on the same device as its rows, with as many rows.
class RowChecks {
 public:
  RowChecks(const ExpertsConfig& config, const ConstTensorView& rows)
      : config_(config), R_(rows.num_rows()), device_(rows.device) {}

  void check_rows(const char* name, const ConstTensorView& rows) const {
    check_tensor(name, rows, device_, config_.dtype, Shape{R_, config_.width});
  }

  // Rows that may also have the dtype of the sums; they are then not rounded.
  void check_results(const char* name, const TensorView& rows) const {
    const bool is_wide = rows.dtype == sum_dtype(config_.dtype);
    check_tensor(name, rows, device_, is_wide ? rows.dtype : config_.dtype,
                 Shape{R_, config_.width});
  }

  void check_weights(const char* name, const ConstTensorView& weights) const {
    check_tensor(name, weights, device_, sum_dtype(config_.dtype), Shape{R_});
  }

  // `width` values for each row of the segments, saved by an earlier call.
  void check_saved(const char* source, const char* name, const Buffer& saved,
                   const Segments& segments, int64_t width) const {
    const int64_t wanted = count_kept_rows(segments, R_) * width * size_of(config_.dtype);
    const bool is_there = wanted == 0 || saved.device() == device_;
    CROSSDOCK_CHECK(saved.num_bytes() == wanted && is_there, "saved must be ", source,
                    " for these segments: ", wanted, " bytes of ", name, " ", describe(device_),
                    ", got ", saved.num_bytes(), " ", describe(saved.device()));
  }

 private:
  const ExpertsConfig& config_;
  int64_t R_;
  Device device_;
};

// Parameters or their gradients; each view must have the dtype dtype_of(view).
template <typename Views, typename DTypeOfView>
void check_parameters(const ExpertsConfig& config, const Views& views, const std::string& prefix,
                      bool all_optional, Device device, const DTypeOfView& dtype_of) {
  const auto check = [&](const char* name, const auto& view, const Shape& shape) {
    check_tensor(prefix + name, view, device, dtype_of(view), shape);
  };
  const int64_t E_local = config.num_local_experts;
  const int64_t hidden = config.hidden_width();
  const auto check_matrix = [&](const char* name, const auto& view, int64_t rows, int64_t columns) {
    if (all_optional && !view.given()) return;
    check(name, view,
          config.transposed ? Shape{E_local, columns, rows} : Shape{E_local, rows, columns});
  };
  check_matrix("w1", views.w1, hidden, config.width);
  check_matrix("w2", views.w2, config.width, config.inner);
  if (views.b1.given()) check("b1", views.b1, {E_local, hidden});
  if (views.b2.given()) check("b2", views.b2, {E_local, config.width});
}

std::vector<NamedTensor> inputs_of(const ExpertWeights& weights, std::vector<NamedTensor> rows) {
  rows.insert(rows.end(),
              {{"w1", weights.w1}, {"w2", weights.w2}, {"b1", weights.b1}, {"b2", weights.b2}});
  return rows;
}

// The part of a tensor [E_local, ...] that belongs to a range of experts.
ConstTensorView part_of(const ConstTensorView& tensor, SegmentRange range) {
  if (!tensor.given()) return tensor;
  const auto dim = [&](int i) { return tensor.shape[i]; };
  ConstTensorView part = tensor;
  part.data = static_cast<const std::byte*>(tensor.data) + range.first * tensor.row_bytes();
  const int64_t count = range.last - range.first;
  part.shape = tensor.shape.rank() == 2 ? Shape{count, dim(1)} : Shape{count, dim(1), dim(2)};
  return part;
}

// The same call for a range of segments. Rows keep their places.
template <typename Args>
Args part_of(const Args& args, SegmentRange range) {
  const Segments& all = args.segments;
  CROSSDOCK_CHECK(0 <= range.first && range.first <= range.last && range.last <= all.num_segments,
                  "the range must be within the ", all.num_segments, " segments, got [",
                  range.first, ", ", range.last, ")");
  Args part = args;
  part.segments = {.starts = all.starts + range.first,
                   .counts = all.counts + range.first,
                   .num_segments = range.last - range.first,
                   .device = all.device};
  part.weights = {.w1 = part_of(args.weights.w1, range),
                  .w2 = part_of(args.weights.w2, range),
                  .b1 = part_of(args.weights.b1, range),
                  .b2 = part_of(args.weights.b2, range)};
  return part;
}

}  // namespace

Activation parse_activation(std::string_view name) {
  return static_cast<Activation>(index_of_name("activation", name, kActivationNames));
}

Experts::Experts(ExpertsConfig config, std::shared_ptr<ThreadPool> pool)
    : config_(checked(config)),
      backends_(std::make_shared<ExpertsBackends>(
          config_, pool ? std::move(pool) : ThreadPool::process_wide())) {}

void Experts::check(const ExpertWeights& weights, Device device) const {
  check_parameters(config_, weights, "", false, device,
                   [&](const ConstTensorView&) { return config_.dtype; });
}

void Experts::check(const ExpertGradients& grads, Device device, bool accumulate) const {
  check_parameters(config_, grads, "grad of ", true, device, [&](const TensorView& grad) {
    const bool may_be_rounded = !device.is_cpu() && grad.shape.rank() == 3;  // w1 and w2
    return may_be_rounded && grad.dtype == config_.dtype ? config_.dtype : sum_dtype(config_.dtype);
  });
  for (const TensorView& grad : {grads.w1, grads.w2}) {
    CROSSDOCK_CHECK(!accumulate || !grad.given() || grad.dtype == sum_dtype(config_.dtype),
                    "accumulate needs gradients in ", name_of(sum_dtype(config_.dtype)), ", got ",
                    name_of(grad.dtype));
  }
}

void Experts::check(const ExpertsSaved& saved) const {
  ExpertsConfig other = saved.config;
  other.recompute = config_.recompute;  // same bits either way
  CROSSDOCK_CHECK(other == config_, "saved must come from experts with ", describe(config_),
                  ", got saved from experts with ", describe(other));
}

void Experts::prepare(Device device, Stream stream) const {
  check_supported(config_, config_.dtype, device);
  backends_->on(device).prepare(stream);
}

void Experts::check(const ExpertsForwardArgs& args) const {
  check_supported(config_, args.rows);
  check_free_sms(args.free_sms);
  const RowChecks tensors(config_, args.rows);
  tensors.check_rows("rows", args.rows);
  tensors.check_results("y", args.y);
  check_segments(config_, args.segments, args.rows);
  check(args.weights, args.rows.device);
  if (config_.weights_in == WeightsIn::kExperts) {
    tensors.check_weights("row_weights", args.row_weights);
  }
  check_no_overlap({{"y", args.y}}, inputs_of(args.weights, {{"rows", args.rows},
                                                             {"row_weights", args.row_weights}}));
}

ExpertsSaved Experts::begin_forward(const ExpertsForwardArgs& args) const {
  check(args);
  ExpertsSaved saved = backends_->on(args.rows.device).begin_forward(args);
  saved.config = config_;
  return saved;
}

void Experts::forward_part(const ExpertsForwardArgs& args, ExpertsSaved& saved,
                           SegmentRange part) const {
  backends_->on(args.rows.device).forward(part_of(args, part), saved);
}

ExpertsSaved Experts::forward(const ExpertsForwardArgs& args) const {
  ExpertsSaved saved = begin_forward(args);
  backends_->on(args.rows.device).forward(args, saved);
  return saved;
}

void Experts::check(const ExpertsBackwardDxArgs& args) const {
  check_supported(config_, args.grad_y);
  check_free_sms(args.free_sms);
  const RowChecks tensors(config_, args.grad_y);
  tensors.check_rows("grad_y", args.grad_y);
  tensors.check_results("grad_rows", args.grad_rows);
  check_segments(config_, args.segments, args.grad_y);
  check(args.weights, args.grad_y.device);
  if (args.row_weights.given()) tensors.check_weights("row_weights", args.row_weights);
  if (args.grad_row_weights.given()) {
    tensors.check_weights("grad_row_weights", args.grad_row_weights);
  }
  CROSSDOCK_CHECK(args.saved != nullptr, "saved must be the result of forward, got none");
  if (config_.recompute) {
    tensors.check_rows("rows", args.rows);
  } else {
    tensors.check_saved("the unused result of forward", "hidden rows", args.saved->hidden,
                        args.segments, config_.hidden_width());
    if (args.saved->num_bytes() > 0) check(*args.saved);
  }
  check_no_overlap(
      {{"grad_rows", args.grad_rows}, {"grad_row_weights", args.grad_row_weights}},
      inputs_of(args.weights,
                {{"rows", args.rows}, {"row_weights", args.row_weights}, {"grad_y", args.grad_y}}));
}

void Experts::begin_backward_dx(const ExpertsBackwardDxArgs& args) const {
  check(args);
  backends_->on(args.grad_y.device).begin_backward_dx(args);
  args.saved->config = config_;  // with recompute, `saved` may come from other experts
}

void Experts::backward_dx_part(const ExpertsBackwardDxArgs& args, SegmentRange part) const {
  backends_->on(args.grad_y.device).backward_dx(part_of(args, part));
}

void Experts::finish_backward_dx(const ExpertsBackwardDxArgs& args) const {
  args.saved->hidden = {};
  if (!args.keep_for_dw) *args.saved = {};
}

void Experts::backward_dx(const ExpertsBackwardDxArgs& args) const {
  begin_backward_dx(args);
  backends_->on(args.grad_y.device).backward_dx(args);
  finish_backward_dx(args);
}

void Experts::backward_dw(const ExpertsBackwardDwArgs& args) const {
  check_supported(config_, args.grad_y);
  const RowChecks tensors(config_, args.grad_y);
  tensors.check_rows("grad_y", args.grad_y);
  tensors.check_rows("rows", args.rows);
  check_segments(config_, args.segments, args.grad_y);
  check(args.grads, args.grad_y.device, args.accumulate);
  if (args.row_weights.given()) tensors.check_weights("row_weights", args.row_weights);
  CROSSDOCK_CHECK(args.saved != nullptr, "saved must come from backward_dx, got none");
  tensors.check_saved("the result of backward_dx with keep_for_dw", "activations",
                      args.saved->weighted_activation, args.segments, config_.inner);
  if (args.saved->num_bytes() > 0) check(*args.saved);
  check_no_overlap(
      {{"grad of w1", args.grads.w1},
       {"grad of w2", args.grads.w2},
       {"grad of b1", args.grads.b1},
       {"grad of b2", args.grads.b2}},
      {{"rows", args.rows}, {"row_weights", args.row_weights}, {"grad_y", args.grad_y}});
  backends_->on(args.grad_y.device).backward_dw(args);
}

}  // namespace crossdock
