#include "cli/run/job.hpp"

#include <algorithm>
#include <sstream>

#include "cli/processes/launched_job.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/planner.hpp"

namespace crossdock::cli {
namespace {

constexpr int kDefaultRanks = 4;
constexpr int64_t kDefaultTokens = 512;           // per rank
constexpr int64_t kQuickParameters = 48'000'000;  // of a preset without --scale

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw ArgumentError(message.str());
}

// Sets the properties of a published model other than its sizes.
void apply_model(const ModelPreset& model, RunJob& job) {
  RouterConfig& router = job.layer.router;
  job.layer.experts.activation = model.activation;
  if (model.name == "deepseek-v3") {
    router.score = Score::kSigmoid;
    router.num_groups = 8;
    router.group_top_k = 4;
    router.group_score = GroupScore::kTop2;
    router.scaling = 2.5;
    job.with_expert_bias = true;
  } else if (model.name == "qwen3-30b-a3b") {
    router.normalise = true;
  } else {
    router.score = Score::kSoftmaxAfterTopK;
  }
  if (model.name == "gpt-oss-20b") {
    job.layer.experts.interleaved = true;
    job.with_biases = true;
  }
}

bool divides(int64_t scale, const ModelPreset& model) {
  return model.width % scale == 0 && model.inner % scale == 0 && model.shared_inner % scale == 0;
}

// The smallest divisor of the widths that leaves at most kQuickParameters.
int64_t quick_scale(const ModelPreset& model) {
  const int64_t parameters = 3 * model.num_experts * model.width * model.inner;
  int64_t scale = 1;
  while (!divides(scale, model) || parameters / (scale * scale) > kQuickParameters) ++scale;
  return scale;
}

void apply_preset(const RunArgs& args, RunJob& job) {
  const ModelPreset& model = find_model(args.preset);
  const int64_t scale = args.scale ? *args.scale : quick_scale(model);
  if (!divides(scale, model)) {
    refuse("--scale must divide the widths of ", model.name, " (", model.width, ", ", model.inner,
           "), got ", scale);
  }
  job.preset = model.name;
  job.layer.router.width = model.width / scale;
  job.layer.experts.inner = model.inner / scale;
  job.layer.shared_inner = model.shared_inner / scale;
  job.layer.router.num_experts = model.num_experts;
  job.layer.router.top_k = model.top_k;
  apply_model(model, job);
  if (scale == 1) return;
  std::ostringstream words;
  words << "widths divided by " << scale << ": " << model.width << " to " << job.layer.router.width
        << ", " << model.inner << " to " << job.layer.experts.inner;
  job.scaling = words.str();
}

void apply_sizes(const RunArgs& args, RunJob& job) {
  RouterConfig& router = job.layer.router;
  if (args.preset.empty()) {
    if (args.scale) refuse("--scale needs --preset");
    router.width = 512;
    router.num_experts = 32;
    router.top_k = 4;
    job.layer.experts.inner = 256;
  }
  router.width = args.width.value_or(router.width);
  router.num_experts = args.experts.value_or(router.num_experts);
  router.top_k = args.top_k.value_or(router.top_k);
  job.layer.experts.inner = args.inner.value_or(job.layer.experts.inner);
  job.layer.shared_inner = args.shared_inner.value_or(job.layer.shared_inner);
  if (router.top_k > router.num_experts) {
    refuse("--experts (", router.num_experts, ") must be at least --top-k (", router.top_k, ")");
  }
  if (args.experts || args.top_k) {  // the model's groups fit only its own numbers
    router.num_groups = 1;
    router.group_top_k = 1;
  }
}

void apply_tokens(const RunArgs& args, RunJob& job) {
  if (args.tokens && args.tokens_total) refuse("give --tokens or --tokens-total, not both");
  const int64_t per_rank = args.tokens.value_or(kDefaultTokens);
  job.tokens_total = args.tokens_total.value_or(per_rank * job.num_ranks);
}

void apply_communicator(const RunArgs& args, const Communicator* processes, RunJob& job) {
  job.communicator = processes != nullptr ? processes->name() : "threads";
  if (!args.communicator.empty()) job.communicator = args.communicator;
  if (processes != nullptr) {
    check_against_job(*processes, {job.communicator},
                      args.ranks ? std::vector<int>{*args.ranks} : std::vector<int>{});
  }
  job.num_ranks = processes != nullptr ? processes->size() : args.ranks.value_or(kDefaultRanks);
  if ((args.max_in_flight != 0 || args.chunk_bytes != 0) && job.communicator != "mpi") {
    refuse("--max-in-flight and --chunk-bytes need --communicator mpi");
  }
  job.ranks_per_node = args.ranks_per_node;
}

void apply_numbers(const RunArgs& args, RunJob& job) {
  job.layer.experts.dtype = parse_dtype(args.dtype);
  if (!args.activation.empty()) job.layer.experts.activation = parse_activation(args.activation);
  if (!is_gated(job.layer.experts.activation)) job.layer.experts.interleaved = false;
  job.layer.strategy = args.strategy;
  job.layer.experts.weights_in =
      args.weights_in == "experts" ? WeightsIn::kExperts : WeightsIn::kCombine;
  job.layer.overlap_chunks = args.overlap;
}

void apply_device(const RunArgs& args, RunJob& job) {
  job.device = args.device;
  job.overlap_sms = args.overlap_sms;
  if (!job.is_on_gpus()) {
    if (args.overlap_sms > 0) refuse("--overlap-sms needs --device cuda");
    return;
  }
  if (job.dtype() == DType::kF64) {
    refuse("--device cuda has no fp64; choose --dtype fp32, bf16 or fp16");
  }
}

}  // namespace

RunJob make_job(const RunArgs& args, const Communicator* processes) {
  RunJob job;
  if (!args.preset.empty()) apply_preset(args, job);
  apply_sizes(args, job);
  apply_communicator(args, processes, job);
  apply_tokens(args, job);
  apply_numbers(args, job);
  apply_device(args, job);
  job.num_steps = args.steps;
  job.seed = args.seed;
  job.with_backward = !args.forward_only;
  job.with_check = args.check;
  job.trace_file = args.trace;
  return job;
}

}  // namespace crossdock::cli
