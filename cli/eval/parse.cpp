#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string_view>

#include "cli/eval/case.hpp"
#include "crossdock/error.hpp"
#include "crossdock/experts.hpp"

namespace crossdock::cli {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxCaseRanks = 1024;
constexpr double kMaxCaseBytes = 0x1p32;
constexpr int kMaxDepth = 64;  // far more than a case needs; deep values are printed recursively

template <typename... Parts>
[[noreturn]] void reject(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(ErrorCode::kInvalidArgument, message.str());
}

// A short form of a value for messages.
std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true);
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

// Parses the text as JSON. A repeated key is an error, since one of its values would be lost.
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

// An object of the case, with its name for messages and the keys it may have.
class Object {
 public:
  Object(const Json& json, std::string name, std::initializer_list<std::string_view> keys)
      : json_(json), name_(std::move(name)) {
    if (!json.is_object()) reject(name_, " must be an object; got ", shown(json));
    for (const auto& [key, value] : json.items()) {
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
      std::string known;
      for (const std::string_view k : keys) known.append(known.empty() ? "" : ", ").append(k);
      reject(name_, " has the unknown key \"", key, "\"; it may have ", known);
    }
  }

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }

  const Json& at(const char* key) const {
    if (!has(key)) reject(name_, " must have the key \"", key, "\"");
    return json_[key];
  }

  std::string text(const char* key) const {
    if (!at(key).is_string()) reject(key, " must be a string; got ", shown(at(key)));
    return at(key).get<std::string>();
  }
  std::string text(const char* key, const char* fallback) const {
    return has(key) ? text(key) : fallback;
  }

  int64_t integer(const char* key, int64_t least, int64_t most) const {
    const Json& value = at(key);
    if (!value.is_number_integer() || value < least || value > most) {
      reject(key, " must be an integer in [", least, ", ", most, "]; got ", shown(value));
    }
    return value.get<int64_t>();
  }

  bool truth(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_boolean()) reject(key, " must be true or false; got ", shown(at(key)));
    return at(key).get<bool>();
  }

 private:
  const Json& json_;
  std::string name_;
};

// The name of an entry, only built if a message needs it.
using Name = std::function<std::string()>;

// A number, or one of the strings for values that JSON cannot represent.
double number(const Json& value, const Name& name) {
  if (value.is_number()) return value.get<double>();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  reject(name(), " must be a number, \"NaN\", \"Infinity\" or \"-Infinity\"; got ", shown(value));
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

// Names of a matrix and its parts, for messages: "rank 1, token 2: x", "expert 0: w1[3]".
struct MatrixNames {
  std::string whole;         // "rank 1: x"
  std::string row_prefix;    // "rank 1, token "
  std::string row_suffix;    // ": x"
  const char* height = "";   // name of the number of rows
  const char* width = "";    // name of the number of columns
  const char* column = "[";  // between a row's name and the column's number
  const char* column_end = "]";

  std::string row(int64_t i) const { return row_prefix + std::to_string(i) + row_suffix; }
  std::string entry(int64_t i, int64_t j) const {
    return row(i) + column + std::to_string(j) + column_end;
  }
};

template <typename Read>
auto matrix(const Json& value, const MatrixNames& names, int64_t height, int64_t width,
            const Read& read) {
  std::vector<decltype(read(value, Name{}))> values;
  array(value, names.whole, height, names.height);
  for (int64_t i = 0; i < height; ++i) {
    const Json& row = array(value[static_cast<size_t>(i)], names.row(i), width, names.width);
    for (int64_t j = 0; j < width; ++j) {
      values.push_back(read(row[static_cast<size_t>(j)], [&] { return names.entry(i, j); }));
    }
  }
  return values;
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

// Slots have the same names as in messages of the library.
MatrixNames slot_matrix(int rank, const char* key) {
  MatrixNames names = token_matrix(rank, key, "top_k");
  names.column = ", slot ";
  names.column_end = "";
  return names;
}

reference::RankInput read_rank(const Json& json, int rank, const EvalCase& parsed) {
  const std::string name = "per_rank[" + std::to_string(rank) + "]";
  const Object object(json, name, {"x", "expert_ids", "weights", "grad_out", "mask"});
  const int64_t D = parsed.layer.config.width;
  const int64_t K = parsed.layer.config.top_k;
  const auto value = [&](const Json& v, const Name& n) { return rounded(parsed.dtype, v, n); };
  const auto weight = [&](const Json& v, const Name& n) {
    return rounded(parsed.weight_dtype(), v, n);
  };
  reference::RankInput input;
  if (!object.at("x").is_array()) reject("rank ", rank, ": x must be an array of tokens");
  input.T = static_cast<int64_t>(object.at("x").size());
  const auto T = input.T;
  input.x = matrix(object.at("x"), token_matrix(rank, "x", "width"), T, D, value);
  input.expert_ids =
      matrix(object.at("expert_ids"), slot_matrix(rank, "expert_ids"), T, K, read_id);
  input.weights = matrix(object.at("weights"), slot_matrix(rank, "weights"), T, K, weight);
  input.grad_out =
      matrix(object.at("grad_out"), token_matrix(rank, "grad_out", "width"), T, D, value);
  if (object.has("mask")) {
    const std::string mask_name = "rank " + std::to_string(rank) + ": mask";
    for (const Json& entry : array(object.at("mask"), mask_name, T, "one per token of x")) {
      if (!entry.is_boolean() && entry != 0 && entry != 1) {
        reject("rank ", rank, ", token ", input.mask.size(),
               ": mask must be true (padding) or false; got ", shown(entry));
      }
      input.mask.push_back(entry == true || entry == 1);
    }
  }
  return input;
}

reference::MlpWeights read_expert(const Json& json, int64_t index, const EvalCase& parsed) {
  const reference::MlpConfig& mlp = parsed.layer.mlp;
  const std::string name = "per_expert[" + std::to_string(index) + "]";
  const Object object(json, name, {"w1", "w2", "b1", "b2"});
  const bool gated = is_gated(mlp.activation);
  const int64_t height = gated ? 2 * mlp.F : mlp.F;
  const char* height_name = gated ? "2 * inner, as the activation is gated" : "inner";
  const auto value = [&](const Json& v, const Name& n) { return rounded(parsed.dtype, v, n); };
  const auto weights = [&](const char* key, int64_t rows, int64_t columns, const char* rows_name,
                           const char* columns_name) {
    const std::string whole = name + "." + key;
    return matrix(object.at(key), {whole, whole + "[", "]", rows_name, columns_name}, rows, columns,
                  value);
  };
  const auto bias = [&](const char* key, int64_t size, const char* size_name) {
    std::vector<double> values;
    if (!object.has(key)) return values;
    const std::string whole = name + "." + key;
    for (const Json& v : array(object.at(key), whole, size, size_name)) {
      values.push_back(value(v, [&] { return whole + "[" + std::to_string(values.size()) + "]"; }));
    }
    return values;
  };
  return {.w1 = weights("w1", height, mlp.D, height_name, "width"),
          .w2 = weights("w2", mlp.D, mlp.F, "width", "inner"),
          .b1 = bias("b1", height, height_name),
          .b2 = bias("b2", mlp.D, "width")};
}

Capacity read_capacity(const Json& json) {
  const Object object(json, "capacity", {"factor", "policy", "pad_to_capacity", "max_tokens"});
  Capacity capacity;
  if (!object.at("factor").is_number()) {
    reject("capacity.factor must be a number; got ", shown(object.at("factor")));
  }
  capacity.factor = object.at("factor").get<double>();
  const std::string policy = object.text("policy", "position");
  if (policy != "position" && policy != "weight") {
    reject("capacity.policy must be \"position\" or \"weight\"; got ", shown(object.at("policy")));
  }
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
  const std::string nonfinite = object.text("nonfinite", "reject");
  if (nonfinite != "reject" && nonfinite != "propagate") {
    reject("nonfinite must be \"reject\" or \"propagate\"; got ", shown(object.at("nonfinite")));
  }
  if (nonfinite == "propagate") config.nonfinite = NonFinite::kPropagate;
  return config;
}

void read_experts(const Object& object, EvalCase& parsed) {
  reference::LayerInput& layer = parsed.layer;
  layer.mlp.D = layer.config.width;
  if (object.has("activation")) layer.mlp.activation = parse_activation(object.text("activation"));
  layer.mlp.interleaved = object.truth("interleaved", false);
  if (object.has("inner")) layer.mlp.F = object.integer("inner", 1, int64_t{1} << 31);
  if (!object.has("per_expert")) return;
  object.at("activation");
  object.at("inner");
  const Json& experts =
      array(object.at("per_expert"), "per_expert", layer.config.num_experts, "experts");
  for (const Json& expert : experts) {
    layer.experts.push_back(
        read_expert(expert, static_cast<int64_t>(layer.experts.size()), parsed));
  }
}

// Even a short text can require any amount of memory: counts are [ranks, experts] on every rank,
// and alignment and pad_to_capacity add rows. Computed in doubles, which cannot overflow.
void check_size(const DispatchConfig& config, const std::vector<size_t>& tokens_per_rank) {
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
  const double bytes = 32.0 * num_rows * static_cast<double>(config.width) + 32.0 * P * P * E;
  if (!(bytes <= kMaxCaseBytes)) {
    reject("this case would need about ", std::ceil(bytes / 0x1p30),
           " GiB; eval is for small cases (at most ", kMaxCaseBytes / 0x1p30,
           " GiB): lower experts, ranks, width, alignment or capacity");
  }
}

std::vector<size_t> count_tokens(const Json& per_rank) {
  std::vector<size_t> tokens;
  for (const Json& rank : per_rank) {
    const bool has_x = rank.is_object() && rank.contains("x") && rank["x"].is_array();
    tokens.push_back(has_x ? rank["x"].size() : 0);
  }
  return tokens;
}

}  // namespace

EvalCase parse_case(const std::string& text) {
  const Json json = parse_json(text);
  const Object object(
      json, "the case",
      {"strategy", "communicator", "ranks", "ranks_per_node", "experts", "width", "inner", "top_k",
       "activation", "interleaved", "weights_in", "alignment", "capacity", "placement",
       "partial_sums", "nonfinite", "dtype", "per_rank", "per_expert"});
  EvalCase parsed;
  parsed.strategy = object.text("strategy");
  const std::string communicator = object.text("communicator", "threads");
  if (communicator != "threads") {
    reject("communicator must be \"threads\", as eval runs its ranks in one process; got ",
           shown(object.at("communicator")));
  }
  const int64_t num_ranks = object.integer("ranks", 1, kMaxCaseRanks);
  if (object.has("ranks_per_node")) {
    parsed.ranks_per_node = static_cast<int>(object.integer("ranks_per_node", 1, kMaxCaseRanks));
  }
  const std::string dtype = object.text("dtype", "fp32");
  if (dtype != "fp64" && dtype != "fp32" && dtype != "bf16" && dtype != "fp16") {
    reject("dtype must be \"fp64\", \"fp32\", \"bf16\" or \"fp16\", as rows are summed; got ",
           shown(object.at("dtype")));
  }
  parsed.dtype = parse_dtype(dtype);
  const std::string weights_in = object.text("weights_in", "combine");
  if (weights_in != "combine" && weights_in != "experts") {
    reject("weights_in must be \"combine\" or \"experts\"; got ", shown(object.at("weights_in")));
  }
  parsed.layer.weights_in_experts = weights_in == "experts";
  parsed.layer.config = read_config(object);
  const Json& per_rank = array(object.at("per_rank"), "per_rank", num_ranks, "ranks");
  check_size(parsed.layer.config, count_tokens(per_rank));
  read_experts(object, parsed);
  for (int r = 0; r < num_ranks; ++r) {
    parsed.layer.ranks.push_back(read_rank(per_rank[static_cast<size_t>(r)], r, parsed));
  }
  return parsed;
}

}  // namespace crossdock::cli
