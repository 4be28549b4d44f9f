#include "training/training_cases.hpp"

#include <map>
#include <tuple>

#include "training/blocks/check.hpp"

namespace crossdock {
namespace {

using train::Layout;
using train::TrainConfig;
using train::TrainResult;

TrainingCase make_case(const std::string& name, const MeshShape& mesh, Layout layout) {
  TrainConfig config{.mesh = mesh};
  config.tokens.layout = layout;
  return {.name = name, .config = config};
}

// The configurations in this folder differ in these fields; meshes and layouts must not matter.
const TrainResult& on_one_rank(const TrainConfig& config) {
  using Key = std::tuple<DType, int64_t, double, int64_t>;
  static std::map<Key, TrainResult> results;
  const Key key = {config.dtype, config.steps, config.momentum, config.model.idle_experts};
  auto found = results.find(key);
  if (found == results.end()) {
    TrainConfig plain = config;
    plain.tokens = {};
    found = results.emplace(key, train::train_on_one_rank(plain)).first;
  }
  return found->second;
}

}  // namespace

std::vector<TrainingCase> cases_of_four_ranks() {
  return {
      make_case("ep4", {.world = 4, .ep = 4}, Layout::kPacked),
      make_case("tp2_ep2", {.world = 4, .tp = 2, .ep = 2}, Layout::kBatchFirst),
      make_case("etp2_ep2", {.world = 4, .etp = 2, .ep = 2}, Layout::kPacked),
      make_case("tp2_cp2_ep2", {.world = 4, .tp = 2, .cp = 2, .ep = 2}, Layout::kPacked),
      make_case("cp2_etp2_ep1", {.world = 4, .cp = 2, .etp = 2, .ep = 1}, Layout::kSequenceFirst)};
}

std::string difference_from_one_rank(const TrainResult& result, const TrainConfig& config) {
  const train::Difference difference = compare(result, on_one_rank(config));
  return is_small(difference, config.dtype) ? "" : describe(difference);
}

}  // namespace crossdock
