#include <algorithm>
#include <variant>

#include "crossdock/testing/layer_fields.hpp"
#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

using Numbers = std::vector<int64_t>;

// Divisors of a number, ascending.
Numbers divisors_of(int64_t number) {
  Numbers divisors;
  for (int64_t d = 1; d <= number; ++d) {
    if (number % d == 0) divisors.push_back(d);
  }
  return divisors;
}

// Equal groups, of neighbours or of ranks at equal distances.
Numbers draw_groups(int num_ranks, Draw& draw) {
  const int64_t count = draw.pick(divisors_of(num_ranks));
  const bool are_neighbours = draw.percent(50);
  Numbers groups;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    groups.push_back(are_neighbours ? rank / (num_ranks / count) : rank % count);
  }
  return groups;
}

void draw_all_groups(LayerSpec& spec, int num_ranks, Draw& draw) {
  if (draw.percent(15)) spec.layer_groups = draw_groups(num_ranks, draw);
  if (draw.percent(20)) spec.counting_groups = draw_groups(num_ranks, draw);
  if (draw.percent(15)) spec.sequence_groups = draw_groups(num_ranks, draw);
  if (draw.percent(15)) spec.replicated_over = draw_groups(num_ranks, draw);
  const int64_t size = std::ssize(members_of(spec.layer_groups, num_ranks, 0));
  if (draw.percent(25)) spec.config.etp = draw.pick(divisors_of(size));
}

void draw_tokens(LayerSpec& spec, int num_ranks, Draw& draw) {
  const int64_t most = draw.percent(3) ? 70 : draw.pick(Numbers{0, 1, 3, 8, 16, 24});
  const int64_t kind = draw.between(0, 3);
  for (int rank = 0; rank < num_ranks; ++rank) {
    int64_t T = kind == 0 ? most : draw.between(0, most);
    if (kind == 1 && draw.percent(40)) T = 0;
    if (kind == 2) T = rank == 0 ? most : 0;
    spec.tokens.push_back(T);
  }
  if (spec.replicated_over.empty()) return;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int first = members_of(spec.replicated_over, num_ranks, rank)[0];
    spec.tokens[static_cast<size_t>(rank)] = spec.tokens[static_cast<size_t>(first)];
  }
}

void draw_selection(RouterConfig& router, Draw& draw) {
  router.score = static_cast<Score>(draw.between(0, std::ssize(kScoreNames) - 1));
  if (draw.percent(40)) router.normalise = draw.percent(50);
  if (draw.percent(30)) router.scaling = draw.pick(std::vector<double>{0.5, 2.5, -1.0});
  if (draw.percent(30)) {
    router.num_groups = draw.pick(divisors_of(router.num_experts));
    router.group_top_k = draw.between(1, router.num_groups);
    router.group_score = draw.percent(50) ? GroupScore::kTop2 : GroupScore::kTopShare;
    const int64_t size = router.num_experts / router.num_groups;
    router.top_k = std::min(router.top_k, router.group_top_k * size);
    const bool needs_share = router.group_score == GroupScore::kTopShare;
    while (needs_share && router.top_k % router.group_top_k != 0) --router.group_top_k;
    if (router.group_top_k * size < router.top_k) router.group_top_k = router.num_groups;
  }
  router.force_balance = draw.percent(4);
}

void draw_losses(LayerSpec& spec, Draw& draw) {
  RouterConfig& router = spec.config.router;
  const auto coefficient = [&] { return 0.01 * static_cast<double>(draw.between(1, 50)); };
  if (draw.percent(50)) {
    router.aux_loss_coeff = coefficient();
    router.aux_loss_scope = static_cast<BalanceScope>(draw.between(0, 2));
  }
  if (draw.percent(20)) {
    if (draw.percent(60)) router.aux_loss_coeffs.batch = coefficient();
    if (draw.percent(60)) router.aux_loss_coeffs.sequence = coefficient();
    if (draw.percent(60)) router.aux_loss_coeffs.global_batch = coefficient();
  }
  if (draw.percent(30)) router.z_loss_coeff = coefficient();
  if (draw.percent(40)) spec.num_sequences = draw.between(1, 5);
  if (draw.percent(15)) spec.total_sequences = draw.between(1, 9);
  spec.earlier = router.counts(BalanceScope::kGlobalBatch) && draw.percent(60);
  if (draw.percent(20)) spec.grad_losses = draw.pick(std::vector<double>{0.0, 0.5, 8.0});
}

void draw_router(LayerSpec& spec, bool on_gpu, Draw& draw) {
  RouterConfig& router = spec.config.router;
  router.num_experts = draw.percent(70) ? draw.between(1, 12) : draw.between(1, 70);
  router.top_k = draw.between(1, std::min<int64_t>(router.num_experts, draw.percent(80) ? 3 : 8));
  router.width = draw.pick(Numbers{1, 2, 3, 5, 8, 16, 17, 24, 33});
  if (draw.percent(2)) router.width = draw.pick(Numbers{256, 300, 520});  // several blocks of sums
  draw_selection(router, draw);
  draw_losses(spec, draw);
  if (draw.percent(15)) {
    router.jitter = draw.pick(std::vector<double>{0.01, 0.5});
    spec.jitter_seed = draw.bits();
    spec.token_ids = draw.percent(50) || (on_gpu && !spec.replicated_over.empty());
  }
  const bool is_f64 = spec.dtype() == DType::kF64;
  spec.gate_dtype = is_f64 ? DType::kF64 : spec.dtype();
  if (!is_f64 && draw.percent(30)) {
    spec.gate_dtype = draw.pick(std::vector<DType>{DType::kF32, DType::kBF16, DType::kF16});
  }
  spec.gate_bias = draw.percent(30);
  spec.expert_bias = draw.percent(30);
  spec.forced_ids = draw.percent(20);
  if (spec.forced_ids && draw.percent(60)) spec.absent_percent = draw.pick(Numbers{10, 50, 100});
  spec.wide_ids = draw.percent(50);
  if (draw.percent(25)) spec.padding_percent = draw.pick(Numbers{10, 50, 100});
}

void draw_experts(LayerSpec& spec, bool on_gpu, Draw& draw) {
  ExpertsConfig& experts = spec.config.experts;
  experts.inner = std::max(spec.config.etp, draw.pick(Numbers{1, 2, 3, 7, 8, 16, 21, 40}));
  experts.activation = static_cast<Activation>(draw.between(0, std::ssize(kActivationNames) - 1));
  experts.interleaved = is_gated(experts.activation) && draw.percent(40);
  if (draw.percent(50)) experts.limit = draw.pick(std::vector<double>{0.3, 1.0, 2.0});
  experts.weights_in = draw.percent(50) ? WeightsIn::kExperts : WeightsIn::kCombine;
  experts.recompute = draw.percent(25);
  experts.transposed = spec.config.etp == 1 && !on_gpu && draw.percent(20);
  spec.b1 = draw.percent(35);
  spec.b2 = draw.percent(35);
  if (draw.percent(35)) spec.config.shared_inner = draw.pick(Numbers{1, 5, 16, 24});
  spec.shared_biases = spec.config.shared_inner > 0 && draw.percent(50);
}

void draw_dispatch(LayerSpec& spec, Draw& draw) {
  DispatchConfig& dispatch = spec.config.dispatch;
  const int64_t size = std::ssize(members_of(spec.layer_groups, spec.num_ranks(), 0));
  if (draw.percent(30)) {
    const int64_t last = size / spec.config.etp - 1;
    const int64_t most = draw.percent(30) ? draw.between(0, last) : last;
    for (int64_t e = 0; e < spec.config.router.num_experts; ++e) {
      dispatch.placement.push_back(static_cast<int32_t>(draw.between(0, most)));
    }
  }
  if (draw.percent(30)) dispatch.alignment = draw.pick(Numbers{8, 16, 32, 64, 128, 256});
  if (draw.percent(30)) {
    spec.capacity_factor = draw.pick(std::vector<double>{0.01, 0.5, 1.0, 1.5, 4.0});
    spec.drop_policy = draw.percent(50) ? DropPolicy::kWeight : DropPolicy::kPosition;
    spec.pad_to_capacity = draw.percent(30);
  }
  if (draw.percent(20)) {
    dispatch.partial_sums = draw.percent(50) ? PartialSums::kF32 : PartialSums::kRowType;
  }
  dispatch.keep_empty_segments = draw.percent(20);
  spec.limit_rows = draw.percent(50);
}

void draw_calls(LayerSpec& spec, Draw& draw) {
  MoeLayerConfig& config = spec.config;
  config.overlap_shared = draw.percent(60);
  if (draw.percent(35)) config.overlap_chunks = draw.pick(Numbers{2, 3, 1000});
  spec.equal_tokens = draw.percent(5);
  config.allow_equal_tokens = spec.equal_tokens || draw.percent(10);
  spec.reuse_decision = draw.percent(20);
  spec.given_outputs = draw.percent(25);
  spec.with_batch = draw.percent(15);
  spec.accumulate = draw.percent(25);
  spec.delay_dw = draw.percent(25);
  spec.skip_gate_gradients = draw.percent(6);
  spec.skip_expert_gradients = draw.percent(6);
  spec.skip_shared_gradients = config.shared_inner > 0 && draw.percent(10);
}

bool has_valid_groups(const LayerSpec& spec) {
  const int P = spec.num_ranks();
  const auto size_of = [&](const Numbers& groups, int rank) {
    return std::ssize(members_of(groups, P, rank));
  };
  for (const Numbers* groups :
       {&spec.layer_groups, &spec.counting_groups, &spec.sequence_groups, &spec.replicated_over}) {
    if (!groups->empty() && std::ssize(*groups) != P) return false;
  }
  const int64_t size = size_of(spec.layer_groups, 0);
  for (int rank = 0; rank < P; ++rank) {
    if (size_of(spec.layer_groups, rank) != size) return false;
    if (spec.replicated_over.empty()) continue;
    const auto holder = static_cast<size_t>(members_of(spec.replicated_over, P, rank)[0]);
    if (spec.tokens[static_cast<size_t>(rank)] != spec.tokens[holder]) return false;
  }
  const DispatchConfig& dispatch = spec.config.dispatch;
  if (spec.config.etp < 1 || size % spec.config.etp != 0) return false;
  return dispatch.placement.empty() ||
         (std::ssize(dispatch.placement) == spec.config.router.num_experts &&
          std::ranges::all_of(dispatch.placement, [&](int32_t rank) {
            return rank >= 0 && rank < size / spec.config.etp;
          }));
}

bool has_valid_selection(const RouterConfig& router) {
  const int64_t E = router.num_experts;
  const int64_t K = router.top_k;
  if (K < 1 || E < K || router.width < 1) return false;
  if (router.num_groups < 1 || E % router.num_groups != 0) return false;
  if (router.group_top_k < 1 || router.group_top_k > router.num_groups) return false;
  if (router.group_top_k == router.num_groups) return true;
  const bool can_share = router.group_score == GroupScore::kTop2 || K % router.group_top_k == 0;
  return can_share && router.group_top_k * (E / router.num_groups) >= K;
}

}  // namespace

bool is_valid(const LayerSpec& spec) {
  const MoeLayerConfig& config = spec.config;
  const bool has_positive_sizes =
      spec.num_ranks() >= 1 && config.shared_inner >= 0 && config.overlap_chunks >= 1 &&
      spec.num_sequences >= 1 && spec.total_sequences >= 0 && config.experts.limit > 0 &&
      std::ranges::all_of(spec.tokens, [](int64_t T) { return T >= 0; });
  return has_positive_sizes && has_valid_groups(spec) && has_valid_selection(config.router) &&
         config.experts.inner >= config.etp &&
         (!config.experts.interleaved || is_gated(config.experts.activation)) &&
         (!config.experts.transposed || config.etp == 1) &&
         (spec.gate_dtype == DType::kF64) == (spec.dtype() == DType::kF64) &&
         (!spec.earlier || config.router.counts(BalanceScope::kGlobalBatch)) &&
         (!spec.equal_tokens || config.allow_equal_tokens);
}

LayerSpec random_layer_spec(uint64_t seed, int num_ranks, bool on_gpu) {
  Draw draw(seed);
  LayerSpec spec;
  spec.seed = draw.bits() >> 32;  // short in case files
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16, DType::kF16};
  if (!on_gpu) dtypes.push_back(DType::kF64);
  spec.config.experts.dtype = draw.pick(dtypes);
  draw_all_groups(spec, num_ranks, draw);
  draw_tokens(spec, num_ranks, draw);
  draw_router(spec, on_gpu, draw);
  draw_experts(spec, on_gpu, draw);
  draw_dispatch(spec, draw);
  draw_calls(spec, draw);
  if (on_gpu && spec.total_sequences == 0) spec.total_sequences = 3;
  return spec;
}

namespace {

void drop_rank(LayerSpec& spec, int64_t rank) {
  for (std::vector<int64_t>* of_ranks : {&spec.tokens, &spec.layer_groups, &spec.counting_groups,
                                         &spec.sequence_groups, &spec.replicated_over}) {
    if (!of_ranks->empty()) of_ranks->erase(of_ranks->begin() + rank);
  }
  for (int32_t& owner : spec.config.dispatch.placement) {
    owner = std::min(owner, static_cast<int32_t>(std::ssize(spec.tokens) - 1));
  }
}

void set_experts(LayerSpec& spec, int64_t num_experts) {
  spec.config.router.num_experts = num_experts;
  auto& placement = spec.config.dispatch.placement;
  if (!placement.empty()) placement.resize(static_cast<size_t>(num_experts));
}

// Specs with one option less: each field gets its default.
void append_without_options(const LayerSpec& spec, std::vector<LayerSpec>& all) {
  LayerSpec plain = without_options(spec);
  const std::vector<LayerField> defaults = fields_of(plain);
  for (size_t i = kNumSizes; i < defaults.size(); ++i) {
    LayerSpec simpler = spec;
    const LayerField field = fields_of(simpler)[i];
    const bool is_set = std::visit(
        [&](auto* value) {
          const auto& usual = *std::get<decltype(value)>(defaults[i].value);
          if (*value == usual) return false;
          *value = usual;
          return true;
        },
        field.value);
    if (is_set) all.push_back(simpler);
  }
}

}  // namespace

std::vector<LayerSpec> simpler_layers(const LayerSpec& spec) {
  std::vector<LayerSpec> all;
  const auto add = [&](const auto& change) {
    LayerSpec simpler = spec;
    change(simpler);
    all.push_back(std::move(simpler));
  };
  // Sizes become 1, a half, or one less.
  const auto shrink = [&](int64_t size, int64_t least, const auto& set) {
    for (const int64_t smaller : {least, size / 2, size - 1}) {
      if (smaller >= least && smaller < size) add([&](LayerSpec& s) { set(s, smaller); });
    }
  };
  for (int64_t rank = spec.num_ranks() - 1; rank >= 0 && spec.num_ranks() > 1; --rank) {
    add([rank](LayerSpec& s) { drop_rank(s, rank); });
  }
  if (std::ranges::max(spec.tokens) > 0) {
    add([](LayerSpec& s) {
      for (int64_t& T : s.tokens) T /= 2;
    });
  }
  append_without_options(spec, all);
  const RouterConfig& router = spec.config.router;
  shrink(router.num_experts, 1, set_experts);
  shrink(router.top_k, 1, [](LayerSpec& s, int64_t K) { s.config.router.top_k = K; });
  shrink(router.width, 1, [](LayerSpec& s, int64_t D) { s.config.router.width = D; });
  shrink(spec.config.experts.inner, 1, [](LayerSpec& s, int64_t F) { s.config.experts.inner = F; });
  for (size_t r = 0; r < spec.tokens.size(); ++r) {
    shrink(spec.tokens[r], 0, [r](LayerSpec& s, int64_t T) { s.tokens[r] = T; });
  }
  std::erase_if(all, [](const LayerSpec& s) { return !is_valid(s); });
  return all;
}

LayerSpec plain_form(LayerSpec spec) {
  spec.config.overlap_shared = false;
  spec.config.overlap_chunks = 1;
  spec.config.experts.recompute = false;
  spec.config.dispatch.alignment = 1;
  spec.config.dispatch.keep_empty_segments = false;
  spec.limit_rows = false;
  spec.config.dispatch.max_rows.reset();
  spec.wide_ids = true;
  spec.reuse_decision = false;
  spec.given_outputs = false;
  spec.with_batch = false;
  spec.delay_dw = false;
  return spec;
}

}  // namespace crossdock::conformance
