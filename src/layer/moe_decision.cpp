#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "crossdock/moe_layer.hpp"
#include "layer/layer_parts.hpp"

namespace crossdock {

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
