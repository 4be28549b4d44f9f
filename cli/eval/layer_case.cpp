#include "cli/eval/layer_case.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/device/layer_place.hpp"
#include "cli/device/rank_device.hpp"
#include "cli/eval/processes.hpp"
#include "cli/json_writer.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/testing/layer_fields.hpp"

namespace crossdock::cli {
namespace {

using conformance::LayerField;
using conformance::LayerResults;
using conformance::LayerSpec;
using Json = nlohmann::json;

constexpr size_t kMostRanks = 1024;
constexpr double kMostValues = 0x1p28;

[[noreturn]] void reject(const std::string& name, const std::string& rule, const Json& got) {
  const std::string text = got.dump(-1, ' ', true);
  throw Error(ErrorCode::kInvalidArgument,
              name + " must be " + rule + "; got " + text.substr(0, 40));
}

int64_t integer(const std::string& name, const Json& json, int64_t least = 0) {
  constexpr int64_t kMost = int64_t{1} << 32;
  if (!json.is_number_integer() || json < least || json > kMost) {
    reject(name, "an integer from " + std::to_string(least) + " to 2^32", json);
  }
  return json.get<int64_t>();
}

template <typename Value>
void read(const std::string& name, const Json& json, Value& value) {
  if constexpr (std::is_same_v<Value, bool> || std::is_same_v<Value, std::optional<bool>>) {
    if (!json.is_boolean()) reject(name, "true or false", json);
    value = json.get<bool>();
  } else if constexpr (std::is_same_v<Value, double>) {
    if (!json.is_number()) reject(name, "a number", json);
    value = json.get<double>();
  } else if constexpr (std::is_same_v<Value, uint64_t>) {
    if (!json.is_number_unsigned()) reject(name, "an integer from 0 to 2^64 - 1", json);
    value = json.get<uint64_t>();
  } else if constexpr (std::is_same_v<Value, int64_t>) {
    value = integer(name, json);
  } else {
    if (!json.is_array()) reject(name, "an array of integers", json);
    value.clear();
    for (const Json& entry : json) {
      value.push_back(static_cast<typename Value::value_type>(integer(name, entry)));
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
    reject(name, "one of " + list, json);
  }
  set_number(field, static_cast<size_t>(found - names.begin()));
}

// Even a short text can ask for any amount of memory.
void check_size(const LayerSpec& spec) {
  const auto& router = spec.config.router;
  const auto D = static_cast<double>(router.width);
  const auto E = static_cast<double>(router.num_experts);
  const auto F = static_cast<double>(spec.config.experts.inner + spec.config.shared_inner);
  double values = E * D * (1 + 3 * F);
  for (const int64_t T : spec.tokens) {
    values += static_cast<double>(T) * (2 * D + E + static_cast<double>(router.top_k) * (D + F));
  }
  if (values > kMostValues) {
    throw Error(ErrorCode::kInvalidArgument, "layer is too large for eval: lower its sizes");
  }
}

LayerSpec read_layer(const Json& json) {
  LayerSpec spec;
  if (!json.is_object()) reject("layer", "an object", json);
  read("layer.tokens", json.value("tokens", Json()), spec.tokens);
  if (spec.tokens.empty() || spec.tokens.size() > kMostRanks) {
    reject("layer.tokens", "the tokens of 1 to 1024 ranks", json["tokens"]);
  }
  const Json dtype = json.value("dtype", Json("fp32"));
  for (const LayerField& field : fields_of(spec)) {
    if (field.name == "dtype") read_field(field, dtype);
  }
  spec = without_options(spec);
  for (const auto& [key, value] : json.items()) {
    if (key == "tokens") continue;
    const std::vector<LayerField> fields = fields_of(spec);
    const auto field = std::ranges::find(fields, key, &LayerField::name);
    if (field == fields.end()) {
      throw Error(ErrorCode::kInvalidArgument, "layer has the unknown key \"" + key + "\"");
    }
    read_field(*field, value);
  }
  check_size(spec);
  if (!is_valid(spec)) {
    throw Error(ErrorCode::kInvalidArgument,
                "layer: its sizes, groups and options do not fit together");
  }
  return spec;
}

// Runs `body` on every rank; `body` also runs in other processes, whose memory is not shared.
void run_on_ranks(const LayerCase& layer_case, const std::string& communicator,
                  const std::function<void(Group&)>& body) {
  const int size = layer_case.layer.num_ranks();
  if (communicator == "sockets") return run_on_processes(size, layer_case.ranks_per_node, body);
  run_ranks(size, body, {.ranks_per_node = layer_case.ranks_per_node});
}

// The results of all ranks, on every rank.
std::vector<LayerResults> gather(Group& group, LayerResults own) {
  std::vector<double> row;
  for (const auto& [name, values] : parts_of(own)) {
    row.push_back(static_cast<double>(values->size()));
    row.insert(row.end(), values->begin(), values->end());
  }
  const Agreement all =
      group.agree({.operation = "results", .body = std::as_bytes(std::span(row))});
  std::vector<LayerResults> ranks(static_cast<size_t>(group.size()));
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::span<const std::byte> body = all.body(rank);
    row.resize(body.size() / sizeof(double));
    std::memcpy(row.data(), body.data(), body.size());
    auto next = row.begin();
    for (const auto& [name, values] : parts_of(ranks[static_cast<size_t>(rank)])) {
      const auto size = static_cast<int64_t>(*next++);
      values->assign(next, next + size);
      next += size;
    }
  }
  return ranks;
}

std::string to_json(std::vector<LayerResults> ranks) {
  JsonWriter writer(3);
  writer.begin_object();
  writer.key("per_rank");
  writer.begin_array();
  for (LayerResults& rank : ranks) {
    writer.begin_object();
    for (const auto& [name, values] : parts_of(rank)) {
      writer.key(name);
      writer.list(*values);
    }
    writer.end_object();
  }
  writer.end_array();
  writer.end_object();
  return writer.text();
}

// The first difference that a strategy shows; empty: none. Sets the bits of all ranks.
std::string judge(const LayerCase& layer_case, const std::string& communicator,
                  const std::string& strategy, std::vector<uint64_t>& bits) {
  const testing::RandomCase random = testing::layer_case(
      layer_case.layer, layer_case.ranks_per_node, layer_places(layer_case.device));
  std::string first;
  run_on_ranks(layer_case, communicator, [&](Group& group) {
    const testing::CaseOutcome own = random.run(group, {.strategy = strategy,
                                                        .candidates = built_in_strategies(),
                                                        .on_gpu = layer_case.device == "cuda"});
    std::string text(reinterpret_cast<const char*>(&own.bits), sizeof own.bits);
    if (!own.findings.empty()) text += own.findings[0];
    const Agreement all =
        group.agree({.operation = "judge", .body = std::as_bytes(std::span(text))});
    if (group.rank() != 0) return;
    bits.resize(static_cast<size_t>(group.size()));
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto body = all.body(rank);
      std::memcpy(&bits[static_cast<size_t>(rank)], body.data(), sizeof(uint64_t));
      if (!first.empty()) continue;
      first.assign(reinterpret_cast<const char*>(body.data()) + sizeof(uint64_t),
                   body.size() - sizeof(uint64_t));
    }
  });
  return first;
}

// Compares with the reference, and the bits with those of all other strategies.
std::string find_difference(const LayerCase& layer_case, const std::string& communicator) {
  std::vector<uint64_t> bits;
  std::string difference = judge(layer_case, communicator, layer_case.strategy, bits);
  for (const std::string& other : strategy_names()) {
    if (!difference.empty()) return difference;
    std::vector<uint64_t> others;
    difference = judge(layer_case, communicator, other, others);
    if (difference.empty() && others != bits) {
      return "bits differ between " + layer_case.strategy + " and " + other;
    }
    if (!difference.empty()) difference = "strategy " + other + ": " + difference;
  }
  return difference;
}

}  // namespace

std::optional<LayerCase> parse_layer_case(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("layer")) return std::nullopt;
  LayerCase parsed{.strategy = "auto", .layer = read_layer(json["layer"])};
  for (const auto& [key, value] : json.items()) {
    if (key == "layer") continue;
    if (key == "ranks_per_node") {
      parsed.ranks_per_node = static_cast<int>(integer(key, value, 1));
    } else if (key == "strategy" || key == "device" || key == "communicator") {
      if (!value.is_string()) reject(key, "a string", value);
      if (key == "strategy") parsed.strategy = value.get<std::string>();
      if (key == "device") parsed.device = value.get<std::string>();
    } else {
      throw Error(ErrorCode::kInvalidArgument, "the case has the unknown key \"" + key + "\"");
    }
  }
  if (parsed.device != "cpu" && parsed.device != "cuda") {
    reject("device", "\"cpu\" or \"cuda\"", parsed.device);
  }
  return parsed;
}

int run_layer_case(const LayerCase& layer_case, const std::string& communicator, bool check) {
  if (layer_case.device == "cuda") prepare_gpus();
  conformance::LayerWorld world = make_layer_world(layer_case.layer);
  world.spec.config.strategy = layer_case.strategy;
  const auto places = layer_places(layer_case.device);
  std::vector<LayerResults> results;
  run_on_ranks(layer_case, communicator, [&](Group& group) {
    const auto place = places ? places(group) : conformance::LayerPlace();
    std::vector<LayerResults> all = gather(group, run_layer(group, {}, world, place));
    if (group.rank() == 0) results = std::move(all);
  });
  std::cout << to_json(std::move(results)) << "\n" << std::flush;
  if (!check) return 0;
  const std::string difference = find_difference(layer_case, communicator);
  std::cerr << (difference.empty() ? "checked against the fp64 reference with all strategies"
                                   : "differs: " + difference)
            << "\n";
  return difference.empty() ? 0 : 1;
}

}  // namespace crossdock::cli
