#include "cli/bench/run_description.hpp"

#include "bench/gpu_description.hpp"
#include "cli/text/numbers.hpp"

namespace crossdock::cli {

RunDescription describe_run(const BenchArgs& args, bool uses_gpu) {
  RunDescription run{.origin = describe_origin(args.words),
                     .samples = args.repeat,
                     .warm_up = args.warm_up,
                     .checked = args.check};
  if (uses_gpu) {
    const bench::GpuDescription gpu = bench::describe_gpu();
    run.gpu = gpu.name;
    run.num_gpus = gpu.count;
    run.driver = gpu.driver;
  }
  return run;
}

std::vector<std::pair<std::string, std::string>> facts_of(const RunDescription& run) {
  std::vector<std::pair<std::string, std::string>> facts = {
      {"crossdock", run.origin.version + ", " + run.origin.build},
      {"host", run.origin.host + ", " + std::to_string(run.origin.num_usable_cores) + " of " +
                   counted(run.origin.num_cores, "core")}};
  if (!run.gpu.empty()) {
    const std::string count = run.num_gpus > 1 ? std::to_string(run.num_gpus) + " x " : "";
    facts.emplace_back("GPU",
                       count + run.gpu + (run.driver.empty() ? "" : ", driver " + run.driver));
  }
  facts.emplace_back("time", run.origin.time);
  facts.emplace_back("command", run.origin.command);
  facts.emplace_back("samples", std::to_string(run.samples) + " per step after " +
                                    counted(run.warm_up, "warm-up") +
                                    (run.checked ? ", results checked" : ", results not checked"));
  return facts;
}

Json json_of(const RunDescription& run) {
  Json json = json_of(run.origin);
  if (!run.gpu.empty()) json.update({{"gpu", run.gpu}, {"gpus", run.num_gpus}});
  if (!run.driver.empty()) json["driver"] = run.driver;
  json.update({{"samples", run.samples}, {"warm_up", run.warm_up}, {"checked", run.checked}});
  return json;
}

}  // namespace crossdock::cli
