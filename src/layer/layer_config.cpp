#include "layer/layer_config.hpp"

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <optional>
#include <vector>

#include "core/check.hpp"
#include "core/sizes.hpp"
#include "crossdock/moe_layer.hpp"
#include "layer/layer_parts.hpp"
#include "router/router_checks.hpp"

namespace crossdock {
namespace {

// Sets a field that repeats one of the router's; 0 means "not given".
void fill(const char* name, int64_t value, int64_t& field) {
  CROSSDOCK_CHECK(field == 0 || field == value, name, " (", field, ") must equal the router's (",
                  value, "); leave it out");
  field = value;
}

int64_t count_local_experts(const MoeLayerConfig& config, const Group& group) {
  const DispatchConfig& dispatch = config.dispatch;
  const int ep = group.size() / static_cast<int>(config.etp);
  const int rank = group.rank() / static_cast<int>(config.etp);
  if (!dispatch.placement.empty()) {
    return std::count(dispatch.placement.begin(), dispatch.placement.end(), rank);
  }
  return first_expert(dispatch.num_experts, ep, rank + 1) -
         first_expert(dispatch.num_experts, ep, rank);
}

}  // namespace

MoeLayerConfig fill_in(MoeLayerConfig config, const Group& group) {
  const RouterConfig& router = config.router;
  fill("dispatch.num_experts", router.num_experts, config.dispatch.num_experts);
  fill("dispatch.top_k", router.top_k, config.dispatch.top_k);
  fill("dispatch.width", router.width, config.dispatch.width);
  fill("experts.width", router.width, config.experts.width);
  CROSSDOCK_CHECK(config.shared_inner >= 0 && config.shared_inner <= kMaxWidth,
                  "shared_inner must be in [0, ", kMaxWidth, "], got ", config.shared_inner);
  CROSSDOCK_CHECK(config.overlap_chunks >= 1, "overlap_chunks must be at least 1, got ",
                  config.overlap_chunks);
  CROSSDOCK_CHECK(config.etp >= 1 && group.size() % config.etp == 0, "etp (", config.etp,
                  ") must be at least 1 and divide the number of ranks of the group (",
                  group.size(), ")");
  config.router.dtype = config.experts.dtype;
  config.experts.num_local_experts = count_local_experts(config, group);
  return config;
}

std::string config_text(const MoeLayerConfig& config) {
  const ExpertsConfig& experts = config.experts;
  return concat(std::setprecision(17), router::config_text(config.router), ";inner=", experts.inner,
                ";activation=", name_of(experts.activation), ";interleaved=", experts.interleaved,
                ";limit=", experts.limit, ";weights_in=", static_cast<int>(experts.weights_in),
                ";shared_inner=", config.shared_inner, ";overlap_chunks=", config.overlap_chunks,
                ";etp=", config.etp, ";allow_equal_tokens=", config.allow_equal_tokens);
}

MoeDecision MoeDecision::on_host(Stream stream) const {
  if (!statistics.is_on_device()) return *this;
  MoeDecision copy = *this;
  copy.statistics = statistics.on_host(stream);
  for (std::optional<RouterStatistics>* narrower :
       {&copy.batch_statistics, &copy.sequence_statistics}) {
    if (*narrower) *narrower = (*narrower)->on_host(stream);
  }
  copy.losses = losses.on_host(stream);
  copy.device_load = {};
  copy.load = device_load.on_host(stream).routes_per_expert;
  copy.total_tokens = copy.batch_statistics->num_tokens.front();
  if (copy.total_sequences == 0.0) {
    const std::optional<RouterStatistics>& counted =
        copy.sequence_statistics ? copy.sequence_statistics : copy.batch_statistics;
    const std::vector<int64_t>& tokens = counted->num_tokens;
    copy.total_sequences =
        static_cast<double>(std::ssize(tokens) - std::count(tokens.begin(), tokens.end(), 0));
  }
  copy.dropped = drops_of_experts(plan, std::ssize(copy.load));
  return copy;
}

}  // namespace crossdock
