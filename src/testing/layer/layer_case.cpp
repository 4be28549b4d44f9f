#include <algorithm>
#include <array>
#include <iomanip>
#include <memory>
#include <mutex>
#include <span>
#include <sstream>
#include <type_traits>
#include <utility>

#include "crossdock/testing/layer_fields.hpp"
#include "testing/layer/layer_ranks.hpp"

namespace crossdock::conformance {
namespace {

constexpr std::array<std::string_view, 2> kGroupScoreNames = {"top_share", "top_2"};
constexpr std::array<std::string_view, 3> kBalanceScopeNames = {"batch", "sequence",
                                                                "global_batch"};
constexpr std::array<std::string_view, 2> kWeightsInNames = {"combine", "experts"};
constexpr std::array<std::string_view, 2> kDropPolicyNames = {"position", "weight"};
constexpr std::array kDTypes = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};
constexpr std::array<std::string_view, 4> kDTypeNames = {"fp32", "fp64", "bf16", "fp16"};

// The names of an enumeration's values; nothing for other types.
template <typename Value>
std::span<const std::string_view> names_of_type() {
  if constexpr (std::is_same_v<Value, DType>) return kDTypeNames;
  if constexpr (std::is_same_v<Value, Score>) return kScoreNames;
  if constexpr (std::is_same_v<Value, GroupScore>) return kGroupScoreNames;
  if constexpr (std::is_same_v<Value, BalanceScope>) return kBalanceScopeNames;
  if constexpr (std::is_same_v<Value, Activation>) return kActivationNames;
  if constexpr (std::is_same_v<Value, WeightsIn>) return kWeightsInNames;
  if constexpr (std::is_same_v<Value, DropPolicy>) return kDropPolicyNames;
  if constexpr (std::is_same_v<Value, PartialSums>) return kPartialSumsNames;
  return {};
}

size_t number_of(DType dtype) {
  return static_cast<size_t>(std::ranges::find(kDTypes, dtype) - kDTypes.begin());
}

template <typename Value>
void write(const Value& value, std::ostream& text) {
  if constexpr (std::is_same_v<Value, std::optional<bool>>) {
    text << (!value ? "null" : *value ? "true" : "false");
  } else if constexpr (std::is_same_v<Value, DType>) {
    text << '"' << kDTypeNames[number_of(value)] << '"';
  } else if constexpr (std::is_enum_v<Value>) {
    text << '"' << names_of_type<Value>()[static_cast<size_t>(value)] << '"';
  } else if constexpr (std::is_arithmetic_v<Value>) {
    text << std::boolalpha << std::setprecision(17) << value;
  } else {
    const char* separator = "[";
    for (const auto entry : value) text << std::exchange(separator, ", ") << entry;
    text << (value.empty() ? "[]" : "]");
  }
}

}  // namespace

std::vector<LayerField> fields_of(LayerSpec& spec) {
  RouterConfig& router = spec.config.router;
  ExpertsConfig& experts = spec.config.experts;
  DispatchConfig& dispatch = spec.config.dispatch;
  return {
      {"experts", &router.num_experts},
      {"top_k", &router.top_k},
      {"width", &router.width},
      {"inner", &experts.inner},
      {"dtype", &experts.dtype},
      {"values", &spec.seed},
      {"layer_groups", &spec.layer_groups},
      {"counting_groups", &spec.counting_groups},
      {"sequence_groups", &spec.sequence_groups},
      {"replicated_over", &spec.replicated_over},
      {"etp", &spec.config.etp},
      {"score", &router.score},
      {"num_groups", &router.num_groups},
      {"group_top_k", &router.group_top_k},
      {"group_score", &router.group_score},
      {"normalise", &router.normalise},
      {"scaling", &router.scaling},
      {"aux_loss_coeff", &router.aux_loss_coeff},
      {"aux_loss_scope", &router.aux_loss_scope},
      {"aux_batch_coeff", &router.aux_loss_coeffs.batch},
      {"aux_sequence_coeff", &router.aux_loss_coeffs.sequence},
      {"aux_global_batch_coeff", &router.aux_loss_coeffs.global_batch},
      {"z_loss_coeff", &router.z_loss_coeff},
      {"jitter", &router.jitter},
      {"jitter_seed", &spec.jitter_seed},
      {"token_ids", &spec.token_ids},
      {"force_balance", &router.force_balance},
      {"gate_dtype", &spec.gate_dtype},
      {"gate_bias", &spec.gate_bias},
      {"expert_bias", &spec.expert_bias},
      {"forced_ids", &spec.forced_ids},
      {"absent_percent", &spec.absent_percent},
      {"wide_ids", &spec.wide_ids},
      {"padding_percent", &spec.padding_percent},
      {"num_sequences", &spec.num_sequences},
      {"total_sequences", &spec.total_sequences},
      {"earlier", &spec.earlier},
      {"equal_tokens", &spec.equal_tokens},
      {"allow_equal_tokens", &spec.config.allow_equal_tokens},
      {"activation", &experts.activation},
      {"interleaved", &experts.interleaved},
      {"transposed", &experts.transposed},
      {"limit", &experts.limit},
      {"weights_in", &experts.weights_in},
      {"recompute", &experts.recompute},
      {"b1", &spec.b1},
      {"b2", &spec.b2},
      {"shared_inner", &spec.config.shared_inner},
      {"shared_biases", &spec.shared_biases},
      {"placement", &dispatch.placement},
      {"alignment", &dispatch.alignment},
      {"capacity_factor", &spec.capacity_factor},
      {"drop_policy", &spec.drop_policy},
      {"pad_to_capacity", &spec.pad_to_capacity},
      {"partial_sums", &dispatch.partial_sums},
      {"keep_empty_segments", &dispatch.keep_empty_segments},
      {"limit_rows", &spec.limit_rows},
      {"overlap_shared", &spec.config.overlap_shared},
      {"overlap_chunks", &spec.config.overlap_chunks},
      {"reuse_decision", &spec.reuse_decision},
      {"given_outputs", &spec.given_outputs},
      {"with_batch", &spec.with_batch},
      {"accumulate", &spec.accumulate},
      {"delay_dw", &spec.delay_dw},
      {"grad_losses", &spec.grad_losses},
      {"skip_gate_gradients", &spec.skip_gate_gradients},
      {"skip_expert_gradients", &spec.skip_expert_gradients},
      {"skip_shared_gradients", &spec.skip_shared_gradients},
  };
}

LayerSpec without_options(const LayerSpec& spec) {
  LayerSpec plain;
  plain.seed = spec.seed;
  plain.tokens = spec.tokens;
  plain.config.experts.dtype = spec.dtype();
  plain.gate_dtype = spec.dtype();
  return plain;
}

std::vector<std::string_view> names_of(const LayerField& field) {
  return std::visit(
      [](const auto* value) -> std::vector<std::string_view> {
        const auto names = names_of_type<std::remove_cvref_t<decltype(*value)>>();
        return {names.begin(), names.end()};
      },
      field.value);
}

void set_number(const LayerField& field, size_t number) {
  std::visit(
      [&](auto* value) {
        using Value = std::remove_cvref_t<decltype(*value)>;
        if constexpr (std::is_same_v<Value, DType>) {
          *value = kDTypes[number];
        } else if constexpr (std::is_enum_v<Value>) {
          *value = static_cast<Value>(number);
        }
      },
      field.value);
}

std::string to_json(LayerSpec spec) {
  LayerSpec plain = without_options(spec);
  const std::vector<LayerField> defaults = fields_of(plain);
  std::ostringstream text;
  text << R"({"tokens": )";
  write(spec.tokens, text);
  const std::vector<LayerField> fields = fields_of(spec);
  for (size_t i = 0; i < fields.size(); ++i) {
    std::visit(
        [&](auto* value) {
          const auto* usual = std::get<decltype(value)>(defaults[i].value);
          const bool is_needed = i < kNumSizes || *value != *usual;
          if (!is_needed) return;
          text << ", \"" << fields[i].name << "\": ";
          write(*value, text);
        },
        fields[i].value);
  }
  text << "}";
  return text.str();
}

}  // namespace crossdock::conformance

namespace crossdock::testing {
namespace {

using conformance::LayerResults;
using conformance::LayerSpec;
using conformance::LayerWorld;
using conformance::MakePlace;
using conformance::TensorPlace;

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
  const TensorPlace place = make_place ? make_place(group) : TensorPlace();
  LayerWorld world = shared.world();
  world.spec.config.strategy = setting.strategy;
  const StrategyList& candidates = setting.candidates;
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
