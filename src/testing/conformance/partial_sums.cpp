#include <cmath>
#include <numeric>

#include "core/check.hpp"
#include "testing/conformance/checks.hpp"
#include "testing/conformance/placed_dispatcher.hpp"
#include "testing/conformance/values.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {
namespace {

using reference::PerRank;

// A world whose sums round, and the rows to sum.
struct Scene {
  World world;
  reference::Layout layout;
  PerRank rows;     // [P], each [R, D]
  PerRank weights;  // [P], each [T, K]
};

Scene make_scene(int num_ranks, DType dtype, PartialSums sums) {
  Scene scene;
  scene.world = make_small_world(std::vector<int64_t>(static_cast<size_t>(num_ranks), 12), 33, 6);
  scene.world.dtype = dtype;
  scene.world.config.partial_sums = sums;
  make_weights(scene.world);
  scene.layout = reference::lay_out(scene.world.config, scene.world.ranks);
  PerRank routes;
  for (int r = 0; r < num_ranks; ++r) routes.push_back(route_values(scene.world, r, 8));
  scene.rows = rows_of_routes(scene.layout, scene.world.config.width, routes);
  for (const reference::RankInput& rank : scene.world.ranks) scene.weights.push_back(rank.weights);
  return scene;
}

PerRank magnitudes(PerRank values) {
  for (auto& rank : values) {
    for (double& value : rank) value = std::abs(value);
  }
  return values;
}

// Bounds the relative error of a sum of K terms by its roundings: K where rows are added, up to K
// where partial sums are added, one for a partial sum, one for the result, and K in the fp64
// reference. Relative to the sum of magnitudes, which is never so small that denormals matter.
double tolerance_of(const Scene& scene) {
  const DType dtype = scene.world.dtype;
  const auto K = static_cast<double>(scene.layout.K);
  const double sum = unit_roundoff(dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  const double partial = unit_roundoff(partial_dtype(scene.world.config.partial_sums, dtype));
  return std::expm1(2 * K * sum + partial + unit_roundoff(dtype) + K * unit_roundoff(DType::kF64));
}

// Judges the sums of one rank.
class Judge {
 public:
  Judge(const Group& group, const Scene& scene) : group_(group), scene_(scene) {}

  /// Compares the values with fp64, within the tolerance, and the bits with sums per rank and per
  /// node.
  void check(const std::string& what, const std::vector<double>& got, const PerRank* weights) {
    check_values(what, got, weights);
    std::vector<int> ranks(static_cast<size_t>(group_.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    for (const std::vector<int>& groups : {ranks, group_.topology().node_of_rank}) {
      const reference::PartialGroups partials{.sums = scene_.world.config.partial_sums,
                                              .rows = scene_.world.dtype,
                                              .group_of_rank = groups};
      const PerRank wanted = reference::combine_partial(scene_.layout, scene_.world.config.width,
                                                        partials, scene_.rows, weights);
      if (reference::compare(got, of_this_rank(wanted)).num_different == 0) return;
    }
    find(what + " has neither the bits of sums per rank nor those of sums per node");
  }

  void find(const std::string& message) {
    findings_.push_back(concat("rank ", group_.rank(), ": ", message));
  }

  const Findings& findings() const { return findings_; }

 private:
  void check_values(const std::string& what, const std::vector<double>& got,
                    const PerRank* weights) {
    const int64_t D = scene_.world.config.width;
    const PerRank wanted = reference::combine(scene_.layout, D, scene_.rows, weights);
    const PerRank sizes = weights != nullptr ? magnitudes(*weights) : PerRank{};
    const PerRank scale = reference::combine(scene_.layout, D, magnitudes(scene_.rows),
                                             weights != nullptr ? &sizes : nullptr);
    for (size_t i = 0; i < got.size(); ++i) {
      const double value = of_this_rank(wanted)[i];
      const double allowed = tolerance_of(scene_) * of_this_rank(scale)[i];
      const bool both_nan = std::isnan(got[i]) && std::isnan(value);
      if (both_nan || got[i] == value || std::abs(got[i] - value) <= allowed) continue;
      const auto width = static_cast<size_t>(D);
      return find(concat(what, "[", i / width, ", ", i % width, "] is ", got[i], ", must be ",
                         value, " within ", allowed));
    }
  }

  const std::vector<double>& of_this_rank(const PerRank& values) const {
    return values[static_cast<size_t>(group_.rank())];
  }

  const Group& group_;
  const Scene& scene_;
  Findings findings_;
};

Findings partial_sums(Group& group, const StrategyFactory& strategy, DType dtype,
                      PartialSums sums) {
  const Scene scene = make_scene(group.size(), dtype, sums);
  const DispatchConfig& config = scene.world.config;
  const auto me = static_cast<size_t>(group.rank());
  const reference::RankInput& input = scene.world.ranks[me];
  const Shape slots{input.T, config.top_k};
  const std::vector<double> ids(input.expert_ids.begin(), input.expert_ids.end());
  const OwnedTensor id_tensor = reference::to_tensor(DType::kI32, slots, ids);
  const DType weight_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const OwnedTensor weights = reference::to_tensor(weight_dtype, slots, input.weights);
  PlacedDispatcher dispatcher(group, config, strategy());
  const Plan plan = dispatcher.plan(Routing{id_tensor.view, weights.view});
  const OwnedTensor y =
      reference::to_tensor(dtype, {plan.num_rows(), config.width}, scene.rows[me]);

  Judge judge(group, scene);
  const auto once = reference::to_values(dispatcher.combine(plan, y.view));
  const auto again = reference::to_values(dispatcher.combine(plan, y.view));
  if (reference::compare(once, again).num_different > 0) {
    judge.find("partial sums differ between two calls");
  }
  judge.check("out", once, &scene.weights);
  const auto grad_x = reference::to_values(dispatcher.dispatch_backward(plan, y.view));
  judge.check("grad_x", grad_x, nullptr);
  return judge.findings();
}

}  // namespace

std::vector<Check> list_partial_sums() {
  std::vector<Check> checks;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const PartialSums sums : {PartialSums::kF32, PartialSums::kRowType}) {
      checks.push_back({concat("partial_sums/", name_of(dtype), "/", name_of(sums)), true,
                        [=](Group& group, const StrategyFactory& strategy) {
                          return partial_sums(group, strategy, dtype, sums);
                        }});
    }
  }
  return checks;
}

}  // namespace crossdock::conformance
