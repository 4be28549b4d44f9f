#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/group.hpp"
#include "crossdock/moe_layer.hpp"
#include "crossdock/testing/conformance.hpp"
#include "crossdock/testing/random_worlds.hpp"
#include "crossdock/testing/reference.hpp"
#include "crossdock/testing/tensor_place.hpp"

// Whole layers, compared with the reference: fixed ones and random ones.

namespace crossdock::conformance {

/// Sizes and options of a layer and of the calls that a judge makes. Values are drawn from `seed`.
struct LayerSpec {
  uint64_t seed = 0;
  /// E, K, D and all options of the layer. The strategy is the judge's.
  MoeLayerConfig config{};
  std::vector<int64_t> tokens;  // [P] T of each rank; identical on ranks that hold the same tokens

  // Groups of ranks: [P], ranks with the same number form a group. Empty: all ranks, for the
  // layer's groups; otherwise the option is not set.
  std::vector<int64_t> layer_groups{};
  std::vector<int64_t> counting_groups{};
  std::vector<int64_t> sequence_groups{};
  std::vector<int64_t> replicated_over{};

  DType gate_dtype = DType::kF32;
  bool gate_bias = false;
  bool expert_bias = false;  // for the selection
  bool b1 = false;           // of the experts
  bool b2 = false;
  bool shared_biases = false;
  int64_t padding_percent = 0;  // of the tokens
  bool forced_ids = false;
  int64_t absent_percent = 0;  // of forced ids
  bool wide_ids = true;        // int64 forced ids
  /// The largest; ranks that do not share sequences may have fewer.
  int64_t num_sequences = 1;
  int64_t total_sequences = 0;
  bool token_ids = false;  // for the jitter; default: 0 to T - 1
  uint64_t jitter_seed = 0;
  bool earlier = false;       // the step's second micro-batch, with BalanceScope::kGlobalBatch
  bool equal_tokens = false;  // ranks with equally many tokens as rank 0 have equal tokens

  double capacity_factor = 0.0;  // of dispatch.capacity; 0: none
  DropPolicy drop_policy = DropPolicy::kPosition;
  bool pad_to_capacity = false;
  bool limit_rows = false;  // max_rows is set to as many as a rank could receive

  bool reuse_decision = false;  // the forward is repeated with its decision
  bool given_outputs = false;   // the caller allocates out and grad_x
  bool with_batch = false;      // tokens are [1, T, D]
  bool accumulate = false;
  bool delay_dw = false;
  double grad_losses = 1.0;
  bool skip_gate_gradients = false;
  bool skip_expert_gradients = false;  // of w1 and b1
  bool skip_shared_gradients = false;

  int num_ranks() const { return static_cast<int>(tokens.size()); }
  DType dtype() const { return config.experts.dtype; }
  DType sum_dtype() const { return dtype() == DType::kF64 ? DType::kF64 : DType::kF32; }
};

/// Tokens that a rank passes to its layer.
struct LayerTokens {
  int64_t T = 0;
  std::vector<double> x{};              // [T, D]
  std::vector<double> grad_out{};       // [T, D]
  std::vector<uint8_t> mask{};          // [T]; empty: no padding
  std::vector<int64_t> forced_ids{};    // [T, K]; empty: the router selects
  std::vector<int32_t> sequence_ids{};  // [T]; empty: one sequence
  std::vector<int64_t> token_ids{};     // [T]; empty: 0 to T - 1
  int64_t num_sequences = 1;
};

/// A layer with the tokens and parameters of all ranks, rounded to their dtypes.
struct LayerWorld {
  LayerSpec spec;
  std::vector<LayerTokens> ranks;                // [P]
  std::vector<LayerTokens> earlier{};            // [P] the step's first micro-batch; empty: none
  std::vector<double> gate{};                    // [E, D]
  std::vector<double> gate_bias{};               // [E]; empty: none
  std::vector<double> expert_bias{};             // [E]; empty: none
  std::vector<reference::MlpWeights> experts{};  // [E]
  reference::MlpWeights shared{};                // empty: none

  int num_ranks() const { return static_cast<int>(ranks.size()); }
};

/// Whether the layer accepts these options together.
CROSSDOCK_API bool is_valid(const LayerSpec& spec);

/// Draws the values and completes `config`. REQUIRES: a valid spec. A world that draws a selection,
/// a drop or a clamped value on which rounding might decide is drawn again, and `limit` is moved
/// away from such values.
CROSSDOCK_API LayerWorld make_layer_world(const LayerSpec& spec);

/// A valid layer with random options for this many ranks, made from the seed; on a GPU only with
/// those that layers support there.
CROSSDOCK_API LayerSpec random_layer_spec(uint64_t seed, int num_ranks, bool on_gpu = false);

/// Valid layers that are simpler in one respect each: with fewer ranks or tokens, smaller sizes or
/// one option less. The most effective first.
CROSSDOCK_API std::vector<LayerSpec> simpler_layers(const LayerSpec& spec);

/// Without the options that must not change any bit: overlap, recomputation, reused decisions,
/// delayed gradients, outputs of the caller.
CROSSDOCK_API LayerSpec plain_form(LayerSpec spec);

/// Results of one rank, computed or expected.
struct LayerResults {
  std::vector<double> out, grad_x;                // [T, D]
  std::vector<double> grad_gate, grad_gate_bias;  // of its tokens
  reference::MlpWeights grad_experts;             // of its experts or shards, concatenated
  reference::MlpWeights grad_shared;              // of its tokens
  std::vector<double> load;                       // [E], of all ranks of the layer's group
  std::vector<double> dropped;                    // [E], of this rank
  std::vector<double> losses;                     // aux, z; aux by batch, sequence, global batch
  std::vector<double> totals;                     // tokens and, if counted, sequences
};

/// All of them, with their names.
CROSSDOCK_API std::vector<std::pair<std::string_view, std::vector<double>*>> parts_of(
    LayerResults& results);

/// The results of all ranks, by the reference.
CROSSDOCK_API std::vector<LayerResults> expected_results(const LayerWorld& world);

/// Runs the layer forward and backward on one of the group's P ranks. The options name a strategy
/// or its candidates. Collective.
CROSSDOCK_API LayerResults run_layer(Group& group, MoeLayerOptions options, const LayerWorld& world,
                                     const TensorPlace& place = {});

/// Differences beyond the rounding of the dtypes.
CROSSDOCK_API Findings compare(const LayerWorld& world, int rank, const LayerResults& got,
                               const LayerResults& wanted);

/// A hash of the bits of all results. On the CPU it is the same for every strategy and
/// communicator; with partial sums, for every strategy that makes them over the same ranks.
CROSSDOCK_API uint64_t hash_of(LayerResults results);

/// Runs the layer with a strategy and compares its results. Collective; all ranks pass the same
/// world.
CROSSDOCK_API Findings judge(Group& group, const StrategyFactory& strategy, const LayerWorld& world,
                             const TensorPlace& place = {});

/// Fixed layers: how many routes go from which ranks to which experts. Activation, score, biases,
/// shared experts and widths differ from routing to routing.
enum class LayerRouting : uint8_t {
  kBalanced,
  kSkewed,
  kOneExpertTakesAll,
  kRankReceivesNothing,
  kRankHasNoTokens,
  kNoTokens,
  kAbsentRoutes,  // slots of -1, and tokens with no other slots
  kUnequalCounts,
  kRankWithoutExperts,
  kPadding,
  kChosen,  // by the router; all others are forced
  kLosses   // the same, with losses
};

/// Identical in every call.
CROSSDOCK_API LayerWorld make_layer_world(LayerRouting routing, DType dtype, int num_ranks);

/// The fixed layers as checks, "layer/skewed/bf16/swiglu". `make_place` is called on each rank.
CROSSDOCK_API std::vector<Check> list_layer_checks(const std::vector<DType>& dtypes,
                                                   const MakePlace& make_place = {});

}  // namespace crossdock::conformance

namespace crossdock::testing {

/// A layer as a random case. Its ranks keep their tensors where `make_place` says.
CROSSDOCK_API RandomCase layer_case(const conformance::LayerSpec& spec, int ranks_per_node = 0,
                                    const conformance::MakePlace& make_place = {});

}  // namespace crossdock::testing
