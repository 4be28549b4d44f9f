#include <algorithm>
#include <variant>

#include "crossdock/testing/layer_fields.hpp"
#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
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
