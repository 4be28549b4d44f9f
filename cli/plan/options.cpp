#include "cli/options.hpp"

#include "cli/commands.hpp"
#include "crossdock/plan.hpp"
#include "crossdock/planner.hpp"

namespace crossdock::cli {
namespace {

constexpr const char* kPlanNotes =
    R"(Rates, memory and queue depth are per rank of the fabric. An impossible job
exits with status 1; the message names the limit and the largest legal value.
docs/planner.md explains what is computed.

Examples:
  crossdock plan --model qwen3-30b-a3b --seq 8192 --micro-batch 8 --nodes 2
  crossdock plan --config config.json --seq 4k --fabric b200-nvlink-400g
  crossdock plan --model deepseek-v3 --tokens 4096 --nodes 8 --ep 32 --zipf 0.5
  crossdock plan --width 2048 --experts 64 --top-k 8 --tokens 8192 --json)";

void add_layer(Options& options, PlanArgs& args) {
  options.choice("--model,--preset", args.model, model_names(), "Published model");
  options.text("--config", "FILE", args.config,
               "The model's config.json, or the folder that has it, with Hugging Face's keys");
  options.whole_number("--width", args.width, {1}, "Token width");
  options.whole_number("--inner", args.inner, {1}, "Inner width of an expert");
  options.whole_number("--experts", args.experts, {1}, "Number of experts");
  options.whole_number("--top-k", args.top_k, {1}, "Experts per token");
  options.whole_number("--seq", args.sequence, {1}, "Sequence length");
  options.whole_number("--micro-batch", args.micro_batch, {1},
                       "Sequences per micro-batch (default: 1)");
  options.whole_number("--tokens", args.tokens, {0},
                       "Tokens per rank, instead of --seq and --micro-batch");
  options.choice("--dtype", args.dtype, {"fp64", "fp32", "bf16", "fp16", "fp8_e4m3"},
                 "Data type of tokens; fp8 rows include their scales");
}

void add_mesh(Options& options, PlanArgs& args) {
  options.whole_number("--nodes", args.nodes, {1}, "Number of nodes");
  options.whole_number("--ranks-per-node", args.ranks_per_node, {1}, "Ranks per node");
  options.whole_number("--tp", args.tp, {1}, "Tensor parallelism: ranks that share a sequence");
  options.whole_number("--cp", args.cp, {1}, "Context parallelism: ranks that share a sequence");
  options.whole_number("--pp", args.pp, {1}, "Pipeline stages");
  options.whole_number("--ep", args.ep, {1},
                       "Ranks that share the experts (default: all of a stage)");
}

std::vector<std::string> names_of(const auto& presets) {
  std::vector<std::string> names;
  names.reserve(presets.size());
  for (const auto& preset : presets) names.emplace_back(preset.name);
  return names;
}

void add_fabric(Options& options, PlanArgs& args) {
  options.choice("--fabric", args.fabric, names_of(kFabricPresets), "Links and memory");
  options.number("--within-rate", args.within_rate,
                 "GB/s per rank within a node, in one direction");
  options.number("--between-rate", args.between_rate,
                 "GB/s per rank to other nodes, in one direction");
  options.number("--memory", args.memory, "GB of memory per rank, instead of the fabric's");
  options.whole_number("--queue-depth", args.queue_depth, {1},
                       "Entries in a send queue (default: 65535)");
  options.whole_number("--max-in-flight", args.max_in_flight, {2},
                       "Requests in flight per rank (default: 128)");
}

}  // namespace

std::vector<std::string> model_names() {
  return names_of(kModelPresets);
}

void add_options(Options& options, PlanArgs& args) {
  add_layer(options, args);
  add_mesh(options, args);
  options.whole_number("--alignment", args.alignment, {1},
                       "Each expert's rows start at a multiple of this");
  options.number("--capacity", args.capacity, "Capacity factor (default: nothing is dropped)");
  options.optional_choice("--partial-sums", args.partial_sums, {"fp32", "rows"},
                          "Sum rows per rank before combine sends them; data type of the sums");
  options.choice("--copies", args.copies, {kCopiesNames.begin(), kCopiesNames.end()},
                 "Copies of a token that direct sends inside a node; auto: per rank if its link is "
                 "slower than memory");
  options.number("--zipf", args.zipf,
                 "Skew: expert e is chosen with weight (e + 1)^-X (default: 0)");
  add_fabric(options, args);
  options.flag("--queue", args.queue,
               "Also show the send queue that schemes with entries for every token need");
  options.flag("--json", args.json, "Print JSON");
  options.notes(kPlanNotes);
}

}  // namespace crossdock::cli
