#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include "crossdock/testing/layer_fields.hpp"
#include "testing/layer/layer_ranks.hpp"

namespace crossdock::testing {
namespace {

using conformance::LayerPlace;
using conformance::LayerResults;
using conformance::LayerSpec;
using conformance::LayerWorld;
using MakePlace = std::function<LayerPlace(Group&)>;

// Values and expected results, computed once for all ranks of a process.
class SharedWorld {
 public:
  explicit SharedWorld(LayerSpec spec) : spec_(std::move(spec)) {}

  const LayerSpec& spec() const { return spec_; }
  const LayerWorld& world() {
    prepare();
    return world_;
  }
  const LayerResults& expected(int rank) {
    prepare();
    return expected_[static_cast<size_t>(rank)];
  }

 private:
  void prepare() {
    std::call_once(once_, [&] {
      world_ = conformance::make_layer_world(spec_);
      expected_ = conformance::expected_results(world_);
    });
  }

  const LayerSpec spec_;
  std::once_flag once_;
  LayerWorld world_;
  std::vector<LayerResults> expected_;
};

CaseOutcome run(SharedWorld& shared, const MakePlace& make_place, Group& group,
                const RandomSetting& setting) {
  const LayerPlace place = make_place ? make_place(group) : LayerPlace();
  LayerWorld world = shared.world();
  world.spec.config.strategy = setting.strategy;
  // On a GPU the tensors of the layer are there: the strategies need not move them.
  const StrategyList candidates = setting.on_gpu ? built_in_strategies() : setting.candidates;
  const LayerResults got = run_layer(group, {.candidates = candidates}, world, place);
  CaseOutcome outcome;
  outcome.findings = compare(world, group.rank(), got, shared.expected(group.rank()));
  // Partial sums depend on which ranks a strategy sums over, sums over F on the device.
  const bool is_exact = world.spec.config.dispatch.partial_sums == PartialSums::kNone;
  if (is_exact && !setting.on_gpu) outcome.bits = hash_of(got);

  const LayerSpec plain = plain_form(world.spec);
  if (to_json(plain) == to_json(world.spec)) return outcome;
  world.spec = plain;
  const LayerResults of_plain = run_layer(group, {.candidates = candidates}, world, place);
  if (hash_of(of_plain) == hash_of(got)) return outcome;
  outcome.findings.push_back("rank " + std::to_string(group.rank()) +
                             ": overlap, recomputation, alignment or other options that must not "
                             "change bits do change them");
  return outcome;
}

}  // namespace

RandomCase layer_case(const LayerSpec& spec, int ranks_per_node, const MakePlace& make_place) {
  const auto shared = std::make_shared<SharedWorld>(spec);
  return {
      .kind = "layer",
      .summary = to_json(spec),
      .num_ranks = spec.num_ranks(),
      .ranks_per_node = ranks_per_node,
      .run = [=](Group& group,
                 const RandomSetting& setting) { return run(*shared, make_place, group, setting); },
      .simpler =
          [=] {
            std::vector<RandomCase> cases;
            for (const LayerSpec& simpler : simpler_layers(shared->spec())) {
              cases.push_back(layer_case(simpler, ranks_per_node, make_place));
            }
            return cases;
          },
      .to_file =
          [=](const std::string& strategy, const std::string& communicator,
              const std::string& device) {
            std::ostringstream text;
            text << "{\"kind\": \"layer\", \"strategy\": \"" << strategy
                 << "\", \"communicator\": \"" << communicator << "\", \"device\": \"" << device
                 << "\"";
            if (ranks_per_node > 0) text << ", \"ranks_per_node\": " << ranks_per_node;
            text << ",\n \"layer\": " << to_json(shared->spec()) << "}";
            return text.str();
          }};
}

}  // namespace crossdock::testing
