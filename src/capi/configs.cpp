#include "capi/configs.hpp"

#include <string>

#include "capi/tensors.hpp"
#include "comm/failure.hpp"
#include "core/check.hpp"

namespace crossdock::capi {
namespace {

static_assert(static_cast<int>(DropPolicy::kPosition) == CROSSDOCK_DROP_BY_POSITION);
static_assert(static_cast<int>(DropPolicy::kWeight) == CROSSDOCK_DROP_BY_WEIGHT);
static_assert(static_cast<int>(NonFinite::kReject) == CROSSDOCK_NONFINITE_REJECT);
static_assert(static_cast<int>(NonFinite::kPropagate) == CROSSDOCK_NONFINITE_PROPAGATE);
static_assert(static_cast<int>(PartialSums::kNone) == CROSSDOCK_PARTIAL_SUMS_NONE);
static_assert(static_cast<int>(PartialSums::kF32) == CROSSDOCK_PARTIAL_SUMS_FP32);
static_assert(static_cast<int>(PartialSums::kRowType) == CROSSDOCK_PARTIAL_SUMS_ROWS);
static_assert(static_cast<int>(Copies::kAuto) == CROSSDOCK_COPIES_AUTO);
static_assert(static_cast<int>(Copies::kPerRoute) == CROSSDOCK_COPIES_PER_ROUTE);
static_assert(static_cast<int>(Copies::kPerRank) == CROSSDOCK_COPIES_PER_RANK);
static_assert(static_cast<int>(Activation::kSwiglu) == CROSSDOCK_SWIGLU);
static_assert(static_cast<int>(Activation::kClampedSwiglu) == CROSSDOCK_CLAMPED_SWIGLU);
static_assert(static_cast<int>(Activation::kGeglu) == CROSSDOCK_GEGLU);
static_assert(static_cast<int>(Activation::kGelu) == CROSSDOCK_GELU);
static_assert(static_cast<int>(Activation::kGeluTanh) == CROSSDOCK_GELU_TANH);
static_assert(static_cast<int>(Activation::kSquaredRelu) == CROSSDOCK_SQUARED_RELU);
static_assert(static_cast<int>(Activation::kGegluTanh) == CROSSDOCK_GEGLU_TANH);
static_assert(static_cast<int>(Activation::kLimitedSwiglu) == CROSSDOCK_LIMITED_SWIGLU);
static_assert(static_cast<int>(WeightsIn::kCombine) == CROSSDOCK_WEIGHTS_IN_COMBINE);
static_assert(static_cast<int>(WeightsIn::kExperts) == CROSSDOCK_WEIGHTS_IN_EXPERTS);
static_assert(static_cast<int>(Score::kSoftmax) == CROSSDOCK_SOFTMAX);
static_assert(static_cast<int>(Score::kSoftmaxAfterTopK) == CROSSDOCK_SOFTMAX_AFTER_TOP_K);
static_assert(static_cast<int>(Score::kSigmoid) == CROSSDOCK_SIGMOID);
static_assert(static_cast<int>(Score::kSqrtSoftplus) == CROSSDOCK_SQRT_SOFTPLUS);
static_assert(static_cast<int>(GroupScore::kTopShare) == CROSSDOCK_GROUP_TOP_SHARE);
static_assert(static_cast<int>(GroupScore::kTop2) == CROSSDOCK_GROUP_TOP_2);
static_assert(static_cast<int>(BalanceScope::kBatch) == CROSSDOCK_BALANCE_BATCH);
static_assert(static_cast<int>(BalanceScope::kSequence) == CROSSDOCK_BALANCE_SEQUENCE);
static_assert(static_cast<int>(BalanceScope::kGlobalBatch) == CROSSDOCK_BALANCE_GLOBAL_BATCH);

// Runs `check`; its error becomes the refusal.
template <typename Check>
void refuse_unless(std::optional<Error>& refusal, const Check& check) {
  const std::optional<Error> failed = refusal_of(check);
  if (!refusal) refusal = failed;
}

template <typename Enum>
void set_enum(const char* name, int32_t value, int num_values, Enum& field,
              std::optional<Error>& refusal) {
  refuse_unless(refusal, [&] { field = static_cast<Enum>(checked_enum(name, value, num_values)); });
}

}  // namespace

int checked_enum(const char* name, int32_t value, int num_values) {
  CROSSDOCK_CHECK(value >= 0 && value < num_values, name, " must be in [0, ", num_values, "), got ",
                  value);
  return value;
}

PartialSums to_partial_sums(int32_t value) {
  constexpr auto kCount = static_cast<int>(kPartialSumsNames.size());
  return static_cast<PartialSums>(checked_enum("partial_sums", value, kCount));
}

DispatchConfig to_config(const crossdock_dispatch_config& given, int64_t num_experts,
                         std::optional<Error>& refusal) {
  DispatchConfig config{.num_experts = given.num_experts,
                        .top_k = given.top_k,
                        .width = given.width,
                        .alignment = or_default<int64_t>(given.alignment, 1)};
  refuse_unless(refusal, [&] { config.partial_sums = to_partial_sums(given.partial_sums); });
  set_enum("nonfinite", given.nonfinite, 2, config.nonfinite, refusal);
  config.keep_empty_segments = given.keep_empty_segments != 0;
  config.max_routes_per_token = given.max_routes_per_token;
  constexpr auto kNumCopies = static_cast<int>(kCopiesNames.size());
  set_enum("copies", given.copies, kNumCopies, config.copies, refusal);
  if (given.max_rows != 0) config.max_rows = given.max_rows;
  if (given.capacity_factor != 0) {
    config.capacity = Capacity{.factor = given.capacity_factor,
                               .pad_to_capacity = given.pad_to_capacity != 0,
                               .max_tokens = given.capacity_tokens};
    set_enum("drop_policy", given.drop_policy, 2, config.capacity->policy, refusal);
  } else {
    refuse_unless(refusal, [&] {
      CROSSDOCK_CHECK(given.pad_to_capacity == 0, "pad_to_capacity needs a capacity_factor");
    });
  }
  constexpr int64_t kMostExperts = int64_t{1} << 20;  // more are refused by the first plan
  if (given.placement != nullptr && num_experts > 0 && num_experts <= kMostExperts) {
    config.placement.assign(given.placement, given.placement + num_experts);
  }
  return config;
}

ExpertsConfig to_config(const crossdock_experts_config& given, std::optional<Error>& refusal) {
  constexpr auto kNumActivations = static_cast<int>(kActivationNames.size());
  ExpertsConfig config{.num_local_experts = given.num_local_experts,
                       .width = given.width,
                       .inner = given.inner,
                       .interleaved = given.interleaved != 0,
                       .limit = or_default(given.limit, 7.0),
                       .recompute = given.recompute != 0,
                       .transposed = given.transposed != 0};
  set_enum("activation", given.activation, kNumActivations, config.activation, refusal);
  set_enum("weights_in", given.weights_in, 2, config.weights_in, refusal);
  refuse_unless(refusal, [&] { config.dtype = to_dtype("crossdock_experts_config", given.dtype); });
  return config;
}

RouterConfig to_config(const crossdock_router_config& given, std::optional<Error>& refusal) {
  RouterConfig config;
  config.num_experts = given.num_experts;
  config.top_k = given.top_k;
  config.width = given.width;
  set_enum("score", given.score, static_cast<int>(kScoreNames.size()), config.score, refusal);
  config.num_groups = or_default<int64_t>(given.num_groups, 1);
  config.group_top_k = or_default<int64_t>(given.group_top_k, 1);
  set_enum("group_score", given.group_score, 2, config.group_score, refusal);
  if (given.normalise != 0) config.normalise = given.normalise > 0;
  config.scaling = or_default(given.scaling, 1.0);
  config.aux_loss_coeff = given.aux_loss_coeff;
  set_enum("aux_loss_scope", given.aux_loss_scope, 3, config.aux_loss_scope, refusal);
  config.aux_loss_coeffs = {.batch = given.aux_batch_coeff,
                            .sequence = given.aux_sequence_coeff,
                            .global_batch = given.aux_global_batch_coeff};
  config.z_loss_coeff = given.z_loss_coeff;
  config.jitter = given.jitter;
  config.force_balance = given.force_balance != 0;
  return config;
}

ExpertWeights to_weights(const char* name, const crossdock_expert_weights& given) {
  const std::string prefix(name);
  return {.w1 = to_view((prefix + ".w1").c_str(), given.w1),
          .w2 = to_view((prefix + ".w2").c_str(), given.w2),
          .b1 = to_view((prefix + ".b1").c_str(), given.b1),
          .b2 = to_view((prefix + ".b2").c_str(), given.b2)};
}

ExpertGradients to_gradients(const char* name, const crossdock_expert_gradients& given) {
  const std::string prefix(name);
  return {.w1 = to_view((prefix + ".w1").c_str(), given.w1),
          .w2 = to_view((prefix + ".w2").c_str(), given.w2),
          .b1 = to_view((prefix + ".b1").c_str(), given.b1),
          .b2 = to_view((prefix + ".b2").c_str(), given.b2)};
}

}  // namespace crossdock::capi
