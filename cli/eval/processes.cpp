#include "cli/eval/processes.hpp"

#include <iostream>
#include <optional>
#include <span>

#include "cli/json.hpp"
#include "cli/processes/launch.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/processes/memory_file.hpp"
#include "cli/text/log.hpp"
#include "crossdock/group.hpp"

namespace crossdock::reference {

static void describe(auto& fields, MlpWeights& weights) {
  fields("w1", weights.w1);
  fields("w2", weights.w2);
  fields("b1", weights.b1);
  fields("b2", weights.b2);
}

}  // namespace crossdock::reference

namespace crossdock::cli {

static void describe(auto& fields, EvalRank& rank) {
  fields("rows", rank.rows);
  fields("rows_per_expert", rank.rows_per_expert);
  fields("out", rank.out);
  fields("grad_x", rank.grad_x);
  fields("grad_weights", rank.grad_weights);
  fields("dropped", rank.dropped);
}

static void describe(auto& fields, EvalResult& result) {
  fields("ranks", result.ranks);
  fields("expert_grads", result.expert_grads);
}

namespace {

constexpr std::chrono::seconds kLimitOfRanks{1200};

EvalResult result_in(const std::string& text) {
  EvalResult result;
  read_output(text, [&](const Json& json) { read_json(json, result); });
  return result;
}

// Every rank gets the results of all; an expert's gradients are those of its owner.
void share_results(Group& group, EvalResult& result) {
  const std::string own = json_text(json_of(result), 0);
  const Agreement all =
      group.agree({.operation = "results", .body = std::as_bytes(std::span(own))});
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto body = all.body(rank);
    EvalResult other =
        result_in(std::string(reinterpret_cast<const char*>(body.data()), body.size()));
    result.ranks[static_cast<size_t>(rank)] = std::move(other.ranks[static_cast<size_t>(rank)]);
    for (size_t e = 0; e < other.expert_grads.size(); ++e) {
      if (!other.expert_grads[e].w1.empty()) {
        result.expert_grads[e] = std::move(other.expert_grads[e]);
      }
    }
  }
}

}  // namespace

EvalResult run_case_on_processes(const EvalCase& eval_case, const std::string& path,
                                 const std::string& text) {
  std::optional<MemoryFile> copy;
  if (path == "-") copy.emplace(text);
  return result_in(run_processes({.communicator = eval_case.communicator,
                                  .ranks = eval_case.num_ranks(),
                                  .args = {"eval", copy ? copy->path() : path, "--as-rank",
                                           "--communicator", eval_case.communicator},
                                  .limit = kLimitOfRanks}));
}

void run_case_as_rank(const EvalCase& eval_case, const std::string& job) {
  Group group(make_job_communicator(job, {.ranks_per_node = eval_case.ranks_per_node}),
              printing_options());
  EvalResult result = empty_result(eval_case);
  run_rank(group, eval_case, result);
  share_results(group, result);
  if (group.rank() == 0) std::cout << json_text(json_of(result), 0) << "\n" << std::flush;
}

}  // namespace crossdock::cli
