#include "cli/eval/dispatch_case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/eval/case_reader.hpp"

namespace crossdock::cli {
namespace {

using conformance::World;
using reference::RankInput;

constexpr int64_t kMany = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostSeed = int64_t{1} << 48;  // exact in every reader of JSON

void read_routes(const Object& object, int rank, World& world) {
  RankInput& input = world.ranks[static_cast<size_t>(rank)];
  const int64_t K = world.num_slots();
  const DType dtype =
      world.weight_dtype.value_or(world.dtype == DType::kF64 ? DType::kF64 : DType::kF32);
  if (!object.at("expert_ids").is_array()) reject("rank ", rank, ": expert_ids must be an array");
  input.T = static_cast<int64_t>(object.at("expert_ids").size());
  input.expert_ids = matrix(object.at("expert_ids"), slot_matrix(rank, "expert_ids", "slots"),
                            input.T, K, [&](const Json& value, const Name& name) {
                              const int64_t id = read_id(value, name);
                              if (id < -1 || id >= world.config.num_experts) {
                                reject(name(), " must be an expert in [0, ",
                                       world.config.num_experts, ") or -1; got ", id);
                              }
                              return id;
                            });
  input.weights =
      matrix(object.at("weights"), slot_matrix(rank, "weights", "slots"), input.T, K,
             [&](const Json& value, const Name& name) { return rounded(dtype, value, name); });
  input.mask = read_mask(object, rank, input.T);
}

// A dense map has neither repeated experts nor an order of its own.
void check_dense(const World& world) {
  const int64_t K = world.num_slots();
  for (size_t r = 0; r < world.ranks.size(); ++r) {
    const std::vector<int64_t>& ids = world.ranks[r].expert_ids;
    for (size_t i = 1; i < ids.size(); ++i) {
      if (i % static_cast<size_t>(K) == 0 || ids[i] < 0 || ids[i - 1] < ids[i]) continue;
      reject("rank ", r, ", token ", i / static_cast<size_t>(K),
             ": the experts of a dense map must ascend, with empty slots (-1) last");
    }
  }
}

void read_dense(const Object& object, World& world) {
  world.dense = object.truth("dense", false);
  if (!world.dense) return;
  DispatchConfig& config = world.config;
  world.slots = object.integer("slots", config.top_k, config.num_experts);
  if (object.has("max_routes_per_token")) {
    config.max_routes_per_token = object.integer("max_routes_per_token", 0, kMany);
  }
}

void read_values(const Json& json, World& world) {
  const Object values(json, "values", {"seed", "exact_sums"});
  world.seed = static_cast<uint64_t>(values.integer("seed", 0, kMostSeed));
  world.exact_sums = values.truth("exact_sums", false);
}

void read_chunks(const Object& object, World& world) {
  world.num_chunks = object.has("chunks") ? object.integer("chunks", 1, kMany) : 2;
  world.awaits_chunks = object.truth("awaits_chunks", false);
}

Json json_of(const Capacity& capacity) {
  Json json = {{"factor", capacity.factor},
               {"policy", capacity.policy == DropPolicy::kWeight ? "weight" : "position"}};
  if (capacity.pad_to_capacity) {
    json["pad_to_capacity"] = true;
    json["max_tokens"] = capacity.max_tokens;
  }
  return json;
}

void write_config(const DispatchConfig& config, Json& json) {
  json["experts"] = config.num_experts;
  json["width"] = config.width;
  json["top_k"] = config.top_k;
  if (config.alignment != 1) json["alignment"] = config.alignment;
  if (config.capacity) json["capacity"] = json_of(*config.capacity);
  if (!config.placement.empty()) json["placement"] = config.placement;
  if (config.partial_sums != PartialSums::kNone) {
    json["partial_sums"] = name_of(config.partial_sums);
  }
  if (config.nonfinite == NonFinite::kPropagate) json["nonfinite"] = "propagate";
  if (config.max_rows) json["max_rows"] = *config.max_rows;
  if (config.keep_empty_segments) json["keep_empty_segments"] = true;
  if (config.max_routes_per_token > 0) json["max_routes_per_token"] = config.max_routes_per_token;
  if (config.copies != Copies::kAuto) json["copies"] = name_of(config.copies);
}

// [T, K]
Json slots_of(const auto& values, int64_t K) {
  Json tokens = Json::array();
  for (auto slot = values.begin(); slot != values.end(); slot += K) {
    tokens.emplace_back(Json(std::vector(slot, slot + K)));
  }
  return tokens;
}

Json json_of(const RankInput& rank, int64_t K) {
  Json json = {{"expert_ids", slots_of(rank.expert_ids, K)},
               {"weights", slots_of(rank.weights, K)}};
  if (!rank.mask.empty()) json["mask"] = std::vector<int>(rank.mask.begin(), rank.mask.end());
  return json;
}

}  // namespace

std::string kind_of_case(const std::string& text) {
  const Json json = parse_json(text);
  if (!json.is_object() || !json.contains("kind")) return "";
  if (!json["kind"].is_string()) reject("kind must be a string; got ", shown(json["kind"]));
  return json["kind"].get<std::string>();
}

DispatchCase parse_dispatch_case(const std::string& text) {
  const Json json = parse_json(text);
  const Object object(json, "the case",
                      {"kind",
                       "strategy",
                       "communicator",
                       "device",
                       "ranks",
                       "ranks_per_node",
                       "experts",
                       "width",
                       "top_k",
                       "alignment",
                       "capacity",
                       "placement",
                       "partial_sums",
                       "nonfinite",
                       "max_rows",
                       "keep_empty_segments",
                       "max_routes_per_token",
                       "copies",
                       "dtype",
                       "weight_dtype",
                       "ids",
                       "dense",
                       "slots",
                       "chunks",
                       "awaits_chunks",
                       "values",
                       "per_rank"});
  DispatchCase parsed;
  World& world = parsed.world;
  world.name = "case";
  parsed.strategy = object.text("strategy");
  parsed.communicator = object.name("communicator", "threads", {"threads", "sockets", "mpi"});
  parsed.device = object.name("device", "cpu", {"cpu", "cuda"});
  if (object.has("ranks_per_node")) {
    parsed.ranks_per_node = static_cast<int>(object.integer("ranks_per_node", 1, kMaxCaseRanks));
  }
  world.dtype =
      parse_dtype(object.name("dtype", "fp32", {"fp64", "fp32", "bf16", "fp16", "fp8_e4m3"}));
  if (object.has("weight_dtype")) {
    world.weight_dtype =
        parse_dtype(object.name("weight_dtype", "", {"fp64", "fp32", "bf16", "fp16"}));
  }
  world.wide_ids = object.name("ids", "int32", {"int32", "int64"}) == "int64";
  world.config = read_config(object);
  world.config.copies =
      parse_copies(object.name("copies", "auto", {"auto", "per_route", "per_rank"}));
  read_dense(object, world);
  read_chunks(object, world);
  read_values(object.at("values"), world);
  const int64_t P = object.integer("ranks", 1, kMaxCaseRanks);
  const Json& per_rank = array(object.at("per_rank"), "per_rank", P, "ranks");
  world.ranks.resize(static_cast<size_t>(P));
  std::vector<size_t> num_routes;
  for (int r = 0; r < P; ++r) {
    const Object rank(per_rank[static_cast<size_t>(r)], "per_rank[" + std::to_string(r) + "]",
                      {"expert_ids", "weights", "mask"});
    read_routes(rank, r, world);
    num_routes.push_back(world.ranks[static_cast<size_t>(r)].expert_ids.size());
  }
  if (world.dense) check_dense(world);
  check_size(world.config, num_routes, world.dense);
  return parsed;
}

std::string to_json(const DispatchCase& dispatch_case) {
  const World& world = dispatch_case.world;
  Json json = {{"kind", "dispatch"},
               {"strategy", dispatch_case.strategy},
               {"communicator", dispatch_case.communicator}};
  if (dispatch_case.device != "cpu") json["device"] = dispatch_case.device;
  json["ranks"] = dispatch_case.num_ranks();
  if (dispatch_case.ranks_per_node > 0) json["ranks_per_node"] = dispatch_case.ranks_per_node;
  write_config(world.config, json);
  json["dtype"] = name_of(world.dtype);
  if (world.weight_dtype) json["weight_dtype"] = name_of(*world.weight_dtype);
  if (world.wide_ids) json["ids"] = "int64";
  if (world.dense) {
    json["dense"] = true;
    json["slots"] = world.num_slots();
  }
  json["chunks"] = world.num_chunks;
  if (world.awaits_chunks) json["awaits_chunks"] = true;
  json["values"] = {{"seed", static_cast<int64_t>(world.seed)}};
  if (world.exact_sums) json["values"]["exact_sums"] = true;
  json["per_rank"] = Json::array();
  for (const RankInput& rank : world.ranks) {
    json["per_rank"].push_back(json_of(rank, world.num_slots()));
  }
  return json_text(json, 4);
}

}  // namespace crossdock::cli
