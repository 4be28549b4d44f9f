#include "cli/plan/model_config.hpp"

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>

#include "cli/eval/case_reader.hpp"

namespace crossdock::cli {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& words) {
  throw Error(ErrorCode::kInvalidArgument, "--config " + path + ": " + words);
}

Json read_object(const std::string& path) {
  const std::string file = std::filesystem::is_directory(path) ? path + "/config.json" : path;
  std::ifstream stream(file, std::ios::binary);
  if (!stream) refuse(path, "cannot read " + file);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  Json json;
  try {
    json = parse_json(text);
  } catch (const Error& error) {
    refuse(path, error.what());
  }
  if (!json.is_object()) refuse(path, "must be a JSON object");
  // A model of several kinds of input has the layer's sizes one level down.
  if (json.contains("text_config") && json["text_config"].is_object()) return json["text_config"];
  return json;
}

// The first of the keys, as models name it differently.
int64_t size_in(const Json& json, const std::string& path,
                std::initializer_list<const char*> keys) {
  std::string known;
  for (const char* key : keys) {
    known += (known.empty() ? "" : ", ") + std::string(key);
    if (!json.contains(key) || json[key].is_null()) continue;
    const bool is_size = json[key].is_number_integer() && json[key].get<int64_t>() > 0;
    if (!is_size)
      refuse(path, std::string(key) + " must be a positive integer, got " + shown(json[key]));
    return json[key].get<int64_t>();
  }
  refuse(path, "must have one of the keys " + known + "; is it a model with experts?");
}

}  // namespace

ModelConfig read_model_config(const std::string& path) {
  const Json json = read_object(path);
  const Json type = json.value("model_type", Json());
  return {
      .name = type.is_string() ? type.get<std::string>() : path,
      .width = size_in(json, path, {"hidden_size", "n_embd", "d_model"}),
      .inner = size_in(
          json, path,
          {"moe_intermediate_size", "expert_ffn_hidden_size", "ffn_dim", "intermediate_size"}),
      .num_experts = size_in(
          json, path, {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"}),
      .top_k = size_in(
          json, path,
          {"num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k"})};
}

}  // namespace crossdock::cli
