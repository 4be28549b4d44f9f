#include "cli/eval/case.hpp"
#include "cli/eval/case_reader.hpp"
#include "crossdock/experts.hpp"

namespace crossdock::cli {
namespace {

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
  input.mask = read_mask(object, rank, T);
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
  const Object object(json, "the case", {"strategy",       "communicator", "ranks",
                                         "ranks_per_node", "experts",      "width",
                                         "inner",          "top_k",        "activation",
                                         "interleaved",    "weights_in",   "alignment",
                                         "capacity",       "placement",    "partial_sums",
                                         "nonfinite",      "max_rows",     "keep_empty_segments",
                                         "dtype",          "per_rank",     "per_expert"});
  EvalCase parsed;
  parsed.strategy = object.text("strategy");
  parsed.communicator = object.name("communicator", "threads", {"threads", "sockets", "mpi"});
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
  const std::string weights_in = object.name("weights_in", "combine", {"combine", "experts"});
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
