#include "cli/bench/run_description.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>
#include <string_view>

#include "bench/gpu_description.hpp"
#include "cli/json_writer.hpp"
#include "cli/machine.hpp"
#include "cli/text/numbers.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// ISO 8601, with the offset of the local time: "+00:00".
std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 40> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S%z", &local);
  std::string result = text.data();
  return result.insert(result.size() - 2, ":");
}

bool is_plain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-./:,=+@%").find(c) != std::string_view::npos;
}

// Quoted if a shell would otherwise change it.
std::string shell_word(const std::string& word) {
  if (!word.empty() && std::ranges::all_of(word, is_plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

RunDescription describe_run(const BenchArgs& args, bool uses_gpu) {
  const BuildDescription build = describe_build();
  const Machine machine = describe_machine();
  RunDescription run{
      .version = std::string(build.version),
      .build = std::string(build.build_type) + " build by " + std::string(build.compiler),
      .host = host_name(),
      .num_cores = machine.num_cores,
      .num_usable_cores = machine.num_usable_cores,
      .time = time_now(),
      .command = "crossdock",
      .samples = args.repeat,
      .warm_up = args.warm_up,
      .checked = args.check};
  if (!build.revision.empty()) run.version += " (" + std::string(build.revision) + ")";
  if (!build.sanitizers.empty()) run.build += ", sanitizers: " + std::string(build.sanitizers);
  if (uses_gpu) {
    const bench::GpuDescription gpu = bench::describe_gpu();
    run.gpu = gpu.name;
    run.num_gpus = gpu.count;
    run.driver = gpu.driver;
  }
  for (const std::string& word : args.words) run.command += " " + shell_word(word);
  return run;
}

std::vector<std::pair<std::string, std::string>> facts_of(const RunDescription& run) {
  std::vector<std::pair<std::string, std::string>> facts = {
      {"crossdock", run.version + ", " + run.build},
      {"host", run.host + ", " + std::to_string(run.num_usable_cores) + " of " +
                   counted(run.num_cores, "core")}};
  if (!run.gpu.empty()) {
    const std::string count = run.num_gpus > 1 ? std::to_string(run.num_gpus) + " x " : "";
    facts.emplace_back("GPU",
                       count + run.gpu + (run.driver.empty() ? "" : ", driver " + run.driver));
  }
  facts.emplace_back("time", run.time);
  facts.emplace_back("command", run.command);
  facts.emplace_back("samples", std::to_string(run.samples) + " per step after " +
                                    counted(run.warm_up, "warm-up") +
                                    (run.checked ? ", results checked" : ", results not checked"));
  return facts;
}

void write_json(JsonWriter& writer, const RunDescription& run) {
  writer.begin_object();
  writer.field("version", run.version);
  writer.field("build", run.build);
  writer.field("host", run.host);
  writer.field("cores", run.num_cores);
  writer.field("usable_cores", run.num_usable_cores);
  if (!run.gpu.empty()) {
    writer.field("gpu", run.gpu);
    writer.field("gpus", run.num_gpus);
  }
  if (!run.driver.empty()) writer.field("driver", run.driver);
  writer.field("time", run.time);
  writer.field("command", run.command);
  writer.field("samples", run.samples);
  writer.field("warm_up", run.warm_up);
  writer.field("checked", run.checked);
  writer.end_object();
}

}  // namespace crossdock::cli
