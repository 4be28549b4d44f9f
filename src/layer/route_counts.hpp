#pragma once

#include <optional>
#include <string>

#include "crossdock/group.hpp"
#include "crossdock/moe_layer.hpp"

namespace crossdock {

/// Sums routes, tokens and sequences over the ranks, for the losses and the load of a layer.
///
/// The losses count over the counting group, which may be another group than the layer's: then some
/// of its ranks belong to other layers' groups, and each forward agrees in both groups.
class RouteCounts {
 public:
  /// `counting_group` as in MoeLayerOptions; null if none was stated. Both groups must outlive this
  /// object.
  RouteCounts(Group& group, Group* counting_group, BalanceScope scope)
      : group_(group), counting_group_(counting_group), scope_(scope) {}

  /// The ranks agree on a forward, exchange `decision.router->statistics`, and each sets
  /// `statistics`, `total_sequences`, `total_tokens` and `load` of the decision. `config_text` must
  /// be identical on every rank of the group. Collective; throws the refusal of any rank on all.
  void agree(const MoeForwardArgs& args, const std::string& config_text,
             std::optional<Error> refusal, MoeDecision& decision);

 private:
  bool counts_in_other_group() const;
  bool counts_each_rank() const;
  std::string counts_text(const MoeForwardArgs& args) const;
  void refuse_in_other_group(const MoeForwardArgs& args, const Error& refusal);
  RouterStatistics sum_over_other_group(const MoeForwardArgs& args, const RouterStatistics& own);

  Group& group_;
  Group* counting_group_;
  BalanceScope scope_;
};

/// Throws Error(kInvalidArgument) if `earlier` is given and cannot be added to the counts of a
/// router with this configuration (see MoeForwardArgs::earlier).
void check_earlier(const RouterConfig& config, const RouterStatistics* earlier);

}  // namespace crossdock
