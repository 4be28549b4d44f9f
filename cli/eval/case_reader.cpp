#include "cli/eval/case_reader.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "crossdock/testing/reference.hpp"

namespace crossdock::cli {
namespace {

constexpr double kMaxCaseBytes = 0x1p32;
constexpr int kMaxDepth = 64;  // far more than a case needs; deep values are printed recursively

// A number, or one of the strings for values that JSON cannot represent.
double number(const Json& value, const Name& name) {
  if (value.is_number() || value == "NaN" || value == "Infinity" || value == "-Infinity") {
    return read_number(value);
  }
  reject(name(), " must be a number, \"NaN\", \"Infinity\" or \"-Infinity\"; got ", shown(value));
}

Capacity read_capacity(const Json& json) {
  const Object object(json, "capacity", {"factor", "policy", "pad_to_capacity", "max_tokens"});
  Capacity capacity;
  if (!object.at("factor").is_number()) {
    reject("capacity.factor must be a number; got ", shown(object.at("factor")));
  }
  capacity.factor = object.at("factor").get<double>();
  const std::string policy = object.name("policy", "position", {"position", "weight"});
  capacity.policy = policy == "weight" ? DropPolicy::kWeight : DropPolicy::kPosition;
  capacity.pad_to_capacity = object.truth("pad_to_capacity", false);
  if (capacity.pad_to_capacity) {
    capacity.max_tokens = object.integer("max_tokens", 0, int64_t{1} << 40);
  }
  return capacity;
}

PartialSums read_partial_sums(const Object& object) {
  if (!object.has("partial_sums")) return PartialSums::kNone;
  const Json& given = object.at("partial_sums");
  if (given == false) return PartialSums::kNone;
  if (given == true || given == "fp32") return PartialSums::kF32;
  if (given == "rows") return PartialSums::kRowType;
  reject("partial_sums must be false, true, \"fp32\" or \"rows\"; got ", shown(given));
}

}  // namespace

std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true);
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

Json parse_json(const std::string& text) {
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth >= kMaxDepth) reject("arrays and objects must nest at most ", kMaxDepth, " deep");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      repeated = parsed.get<std::string>();
    return true;
  };
  try {
    Json json = Json::parse(text, watch);
    if (!repeated.empty()) reject("key \"", repeated, "\" appears twice in one object");
    return json;
  } catch (const Json::exception& e) {
    const std::string_view message = e.what();
    reject("not JSON: ", message.substr(std::min(message.find("] ") + 2, message.size())));
  }
}

Object::Object(const Json& json, std::string name, std::initializer_list<std::string_view> keys)
    : json_(json), name_(std::move(name)) {
  if (!json.is_object()) reject(name_, " must be an object; got ", shown(json));
  for (const auto& [key, value] : json.items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    std::string known;
    for (const std::string_view k : keys) known.append(known.empty() ? "" : ", ").append(k);
    reject(name_, " has the unknown key \"", key, "\"; it may have ", known);
  }
}

const Json& Object::at(const char* key) const {
  if (!has(key)) reject(name_, " must have the key \"", key, "\"");
  return json_[key];
}

std::string Object::text(const char* key) const {
  if (!at(key).is_string()) reject(key, " must be a string; got ", shown(at(key)));
  return at(key).get<std::string>();
}
std::string Object::text(const char* key, const char* fallback) const {
  return has(key) ? text(key) : fallback;
}

std::string Object::name(const char* key, const char* fallback,
                         std::initializer_list<std::string_view> names) const {
  std::string given = text(key, fallback);
  if (std::find(names.begin(), names.end(), given) != names.end()) return given;
  std::string known;
  size_t count = 0;
  for (const std::string_view one : names) {
    if (count > 0) known += count + 1 == names.size() ? " or " : ", ";
    known.append("\"").append(one).append("\"");
    ++count;
  }
  reject(key, " must be ", known, "; got ", shown(at(key)));
}

int64_t Object::integer(const char* key, int64_t least, int64_t most) const {
  const Json& value = at(key);
  if (!value.is_number_integer() || value < least || value > most) {
    reject(key, " must be an integer in [", least, ", ", most, "]; got ", shown(value));
  }
  return value.get<int64_t>();
}

bool Object::truth(const char* key, bool fallback) const {
  if (!has(key)) return fallback;
  if (!at(key).is_boolean()) reject(key, " must be true or false; got ", shown(at(key)));
  return at(key).get<bool>();
}

double rounded(DType dtype, const Json& value, const Name& name) {
  const double exact = number(value, name);
  const double result = reference::round_to(dtype, exact);
  if (std::isfinite(exact) && !std::isfinite(result)) {
    reject(name(), " must fit in ", name_of(dtype), "; got ", shown(value));
  }
  return result;
}

const Json& array(const Json& value, const std::string& name, int64_t size, const char* what) {
  if (!value.is_array()) reject(name, " must be an array; got ", shown(value));
  if (static_cast<int64_t>(value.size()) != size) {
    reject(name, " must have ", size, " entries (", what, "); got ", value.size());
  }
  return value;
}

int64_t read_id(const Json& value, const Name& name) {
  constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
  const bool too_large = value.is_number_unsigned() && value.get<uint64_t>() > kLargest;
  if (!value.is_number_integer() || too_large) {
    reject(name(), " must be an integer; got ", shown(value));
  }
  return value.get<int64_t>();
}

MatrixNames token_matrix(int rank, const char* key, const char* width) {
  const std::string r = "rank " + std::to_string(rank);
  return {r + ": " + key, r + ", token ", std::string(": ") + key, "one per token of x", width};
}

MatrixNames slot_matrix(int rank, const char* key, const char* width) {
  MatrixNames names = token_matrix(rank, key, width);
  names.column = ", slot ";
  names.column_end = "";
  return names;
}

std::vector<uint8_t> read_mask(const Object& object, int rank, int64_t T) {
  std::vector<uint8_t> mask;
  if (!object.has("mask")) return mask;
  const std::string name = "rank " + std::to_string(rank) + ": mask";
  for (const Json& entry : array(object.at("mask"), name, T, "one per token of x")) {
    if (!entry.is_boolean() && entry != 0 && entry != 1) {
      reject("rank ", rank, ", token ", mask.size(), ": mask must be true (padding) or false; got ",
             shown(entry));
    }
    mask.push_back(entry == true || entry == 1);
  }
  return mask;
}

DispatchConfig read_config(const Object& object) {
  constexpr int64_t kMany = std::numeric_limits<int32_t>::max();
  DispatchConfig config;
  config.num_experts = object.integer("experts", 1, kMany);
  config.width = object.integer("width", 1, kMany);
  config.top_k = object.integer("top_k", 1, kMany);
  if (object.has("alignment")) config.alignment = object.integer("alignment", 1, kMany);
  if (object.has("capacity")) config.capacity = read_capacity(object.at("capacity"));
  if (object.has("placement")) {
    const Json& placement =
        array(object.at("placement"), "placement", config.num_experts, "experts");
    for (const Json& rank : placement) {
      if (!rank.is_number_integer() || rank < -kMany || rank > kMany) {
        reject("placement[", config.placement.size(), "] must be a rank; got ", shown(rank));
      }
      config.placement.push_back(rank.get<int32_t>());
    }
  }
  config.partial_sums = read_partial_sums(object);
  const std::string nonfinite = object.name("nonfinite", "reject", {"reject", "propagate"});
  if (nonfinite == "propagate") config.nonfinite = NonFinite::kPropagate;
  if (object.has("max_rows")) config.max_rows = object.integer("max_rows", 0, kMany);
  config.keep_empty_segments = object.truth("keep_empty_segments", false);
  return config;
}

// Computed in doubles, which cannot overflow.
void check_size(const DispatchConfig& config, const std::vector<size_t>& tokens_per_rank,
                bool has_dense_maps) {
  const auto P = static_cast<double>(tokens_per_rank.size());
  const auto E = static_cast<double>(config.num_experts);
  double num_tokens = 0.0;
  for (const size_t T : tokens_per_rank) num_tokens += static_cast<double>(T);
  const double num_routes = num_tokens * static_cast<double>(config.top_k);
  double num_rows = num_routes;
  double used_experts = std::min(E, num_routes);
  if (config.capacity && config.capacity->pad_to_capacity) {
    const double share = static_cast<double>(config.capacity->max_tokens) *
                         static_cast<double>(config.top_k) / E * config.capacity->factor;
    num_rows = std::ceil(share) * P * E;
    used_experts = E;
  }
  num_rows += used_experts * static_cast<double>(config.alignment - 1);
  double bytes = 32.0 * num_rows * static_cast<double>(config.width) + 32.0 * P * P * E;
  if (has_dense_maps) bytes += 32.0 * num_tokens * E;
  if (!(bytes <= kMaxCaseBytes)) {
    reject("this case would need about ", std::ceil(bytes / 0x1p30),
           " GiB; eval is for small cases (at most ", kMaxCaseBytes / 0x1p30,
           " GiB): lower experts, ranks, width, alignment or capacity");
  }
}

}  // namespace crossdock::cli
