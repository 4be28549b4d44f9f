#include "cli/eval/layer_case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/eval/case_reader.hpp"
#include "crossdock/testing/layer_fields.hpp"

namespace crossdock::cli {
namespace {

using conformance::LayerField;
using conformance::LayerSpec;

constexpr double kMostValues = 0x1p28;

int64_t read_integer(const std::string& name, const Json& json) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // placement has int32
  if (!json.is_number_integer() || json < 0 || json > kMost) {
    reject(name, " must be an integer in [0, ", kMost, "]; got ", shown(json));
  }
  return json.get<int64_t>();
}

template <typename Value>
void read(const std::string& name, const Json& json, Value& value) {
  if constexpr (std::is_same_v<Value, bool> || std::is_same_v<Value, std::optional<bool>>) {
    if (!json.is_boolean()) reject(name, " must be true or false; got ", shown(json));
    value = json.get<bool>();
  } else if constexpr (std::is_same_v<Value, double>) {
    if (!json.is_number()) reject(name, " must be a number; got ", shown(json));
    value = json.get<double>();
  } else if constexpr (std::is_same_v<Value, uint64_t>) {
    if (!json.is_number_unsigned()) reject(name, " must be an integer; got ", shown(json));
    value = json.get<uint64_t>();
  } else if constexpr (std::is_same_v<Value, int64_t>) {
    value = read_integer(name, json);
  } else {
    if (!json.is_array()) reject(name, " must be an array; got ", shown(json));
    value.clear();
    for (const Json& entry : json) {
      value.push_back(static_cast<typename Value::value_type>(read_integer(name, entry)));
    }
  }
}

void read_field(const LayerField& field, const Json& json) {
  const std::string name = "layer." + std::string(field.name);
  const std::vector<std::string_view> names = names_of(field);
  if (names.empty()) {
    std::visit(
        [&](auto* value) {
          using Value = std::remove_pointer_t<decltype(value)>;
          if constexpr (!std::is_enum_v<Value>) read(name, json, *value);
        },
        field.value);
    return;
  }
  const auto found = std::ranges::find_if(names, [&](auto known) { return json == known; });
  if (found == names.end()) {
    std::string list;
    for (const std::string_view known : names) list.append(list.empty() ? "" : ", ").append(known);
    reject(name, " must be one of ", list, "; got ", shown(json));
  }
  set_number(field, static_cast<size_t>(found - names.begin()));
}

// Even a short text can ask for any amount of memory.
void check_size(const LayerSpec& spec) {
  const RouterConfig& router = spec.config.router;
  const auto D = static_cast<double>(router.width);
  const auto E = static_cast<double>(router.num_experts);
  const auto K = static_cast<double>(router.top_k);
  const auto F = static_cast<double>(spec.config.experts.inner + spec.config.shared_inner);
  double values = E * D * (1 + 3 * F);
  values += static_cast<double>(spec.num_ranks()) * static_cast<double>(spec.num_sequences) * E;
  for (const int64_t T : spec.tokens) values += static_cast<double>(T) * (2 * D + E + K * (D + F));
  double pad_rows = E * static_cast<double>(spec.config.dispatch.alignment - 1);
  if (spec.capacity_factor > 0) {
    const auto T = static_cast<double>(std::ranges::max(spec.tokens));
    pad_rows += static_cast<double>(spec.num_ranks()) * (T * K * spec.capacity_factor + E);
  }
  values += pad_rows * (D + F);
  if (!(values <= kMostValues)) {
    reject("a layer of this size has about ", values, " values, at most ", kMostValues,
           " are accepted: lower experts, width, inner, tokens, num_sequences, alignment or "
           "capacity_factor");
  }
}

LayerSpec read_layer(const Json& json) {
  if (!json.is_object() || !json.contains("tokens")) {
    reject("layer must be an object with the key \"tokens\"; got ", shown(json));
  }
  LayerSpec spec;
  read("layer.tokens", json["tokens"], spec.tokens);
  if (spec.tokens.empty() || std::ssize(spec.tokens) > kMaxCaseRanks) {
    reject("layer.tokens must have 1 to ", kMaxCaseRanks, " entries, one for each rank; got ",
           spec.tokens.size());
  }
  for (const LayerField& field : fields_of(spec)) {
    if (field.name == "dtype" && json.contains("dtype")) read_field(field, json["dtype"]);
  }
  spec = without_options(spec);
  for (const auto& [key, value] : json.items()) {
    if (key == "tokens") continue;
    const std::vector<LayerField> fields = fields_of(spec);
    const auto field = std::ranges::find(fields, key, &LayerField::name);
    if (field == fields.end()) reject("layer has the unknown key \"", key, "\"");
    read_field(*field, value);
  }
  check_size(spec);
  if (!is_valid(spec)) reject("sizes, groups and options of the layer do not fit together");
  return spec;
}

}  // namespace

LayerCase parse_layer_case(const std::string& text) {
  const Json json = parse_json(text);
  const Object object(json, "the case",
                      {"kind", "strategy", "communicator", "device", "ranks_per_node", "layer"});
  LayerCase parsed{
      .strategy = object.text("strategy"),
      .communicator = object.name("communicator", "threads", {"threads", "sockets", "mpi"}),
      .device = object.name("device", "cpu", {"cpu", "cuda"}),
      .layer = read_layer(object.at("layer"))};
  if (object.has("ranks_per_node")) {
    parsed.ranks_per_node = static_cast<int>(object.integer("ranks_per_node", 1, kMaxCaseRanks));
  }
  return parsed;
}

}  // namespace crossdock::cli
