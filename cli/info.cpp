#include <iostream>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/device/rank_device.hpp"
#include "cli/json.hpp"
#include "cli/machine.hpp"
#include "cli/options.hpp"
#include "cli/processes/launched_job.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/extend/strategy_list.hpp"

namespace crossdock::cli {
namespace {

// A part of the library, and whether it works on this machine.
struct Part {
  std::string name;
  bool is_built = false;
  bool works = false;
  std::string note;  // how to use it or why it does not work
};

std::string mpi_note() {
  if (mpi_is_launched()) return "this process was started by an MPI launcher";
  const std::string launcher = find_program("mpirun");
  return launcher.empty() ? "mpirun, which starts ranks, is not on the PATH (Debian: openmpi-bin)"
                          : "start ranks with " + launcher;
}

std::string sockets_note() {
  if (launched_communicator({}) == "sockets") return "this process is " + job_description();
  return "ranks as processes, started by this command, torchrun or srun";
}

std::vector<Part> list_parts(const BuildDescription& build, const Machine& machine) {
  std::vector<Part> parts = {
      {"threads", true, true, "ranks as threads on " + counted(machine.num_usable_cores, "core")},
      {"sockets", true, true, sockets_note()}};
  for (const Feature& feature : build.features) {
    Part part{std::string(feature.name), feature.is_built, feature.is_built,
              std::string(feature.note)};
    if (feature.name == "mpi" && feature.is_built) {
      part.works = mpi_is_launched() || !find_program("mpirun").empty();
      part.note += "; " + mpi_note();
    }
    if (feature.name == "cuda" && feature.is_built) {
      part.works = cuda_device_count() > 0;
      part.note += "; " + gpu_rule();
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<std::string_view> token_dtypes() {
  return {name_of(DType::kF64), name_of(DType::kF32), name_of(DType::kBF16), name_of(DType::kF16),
          name_of(DType::kF8E4M3)};
}

// "NVIDIA H200, 140 GiB; does not reach the memory of GPU 2, 3"
std::string gpu_text(const GpuInfo& gpu) {
  std::string text =
      gpu.name + ", " + std::to_string(gpu.memory_bytes / (int64_t{1} << 30)) + " GiB";
  for (size_t i = 0; i < gpu.unreachable.size(); ++i) {
    text += i == 0 ? "; does not reach the memory of GPU " : ", ";
    text += std::to_string(gpu.unreachable[i]);
  }
  return text;
}

std::string to_json(const BuildDescription& build, const Machine& machine,
                    const std::vector<Part>& parts) {
  Json json = {{"version", build.version},
               {"revision", build.revision},
               {"compiler", build.compiler},
               {"build_type", build.build_type},
               {"sanitizers", build.sanitizers},
               {"parts", Json::array()},
               {"strategies", strategy_names()},
               {"dtypes", token_dtypes()},
               {"machine",
                {{"cores", machine.num_cores},
                 {"usable_cores", machine.num_usable_cores},
                 {"memory_bytes", machine.memory_bytes},
                 {"simd", machine.simd}}},
               {"gpus", Json::array()}};
  for (const Part& part : parts) {
    json["parts"].push_back({{"name", part.name},
                             {"built", part.is_built},
                             {"works", part.works},
                             {"note", part.note}});
  }
  for (const GpuInfo& gpu : list_gpus()) {
    json["gpus"].push_back(
        {{"name", gpu.name}, {"memory_bytes", gpu.memory_bytes}, {"unreachable", gpu.unreachable}});
  }
  return json_text(json);
}

std::string joined(const auto& names) {
  std::string text;
  for (const std::string_view name : names) text.append(text.empty() ? "" : "  ").append(name);
  return text;
}

std::string to_text(const BuildDescription& build, const Machine& machine,
                    const std::vector<Part>& parts) {
  const TextStyle style = output_style();
  std::string title = "crossdock " + std::string(build.version);
  if (!build.revision.empty()) title += " (" + std::string(build.revision) + ")";
  title += ", " + std::string(build.build_type) + " build by " + std::string(build.compiler);
  if (!build.sanitizers.empty()) title += ", sanitizers: " + std::string(build.sanitizers);
  Table table(style, {{"", Align::kLeft, 8}, {"", Align::kLeft}, {"", Align::kLeft}});
  for (const Part& part : parts) {
    const char* state = part.works ? "works" : part.is_built ? "built" : "not built";
    table.add_row({part.name, {state, part.works ? Colour::kGreen : Colour::kNone}, part.note});
  }
  Table facts(style, {{"", Align::kLeft}, {"", Align::kLeft}});
  facts.add_row({"strategies", joined(strategy_names())});
  facts.add_row({"dtypes", joined(token_dtypes())});
  facts.add_row({"machine", std::to_string(machine.num_usable_cores) + " of " +
                                counted(machine.num_cores, "core") + ", " +
                                std::to_string(machine.memory_bytes / (int64_t{1} << 30)) +
                                " GiB, " + std::string(machine.simd)});
  const std::vector<GpuInfo> gpus = list_gpus();
  for (size_t i = 0; i < gpus.size(); ++i) {
    facts.add_row({"GPU " + std::to_string(i), gpu_text(gpus[i])});
  }
  return wrap(title, style.width) + "\n\n" + table.text() + "\n" + facts.text();
}

}  // namespace

void add_options(Options& options, InfoArgs& args) {
  options.flag("--json", args.json, "Print JSON");
  options.notes("Example:\n  crossdock info --json");
}

int run_info(const InfoArgs& args) {
  const BuildDescription build = describe_build();
  const Machine machine = describe_machine();
  const std::vector<Part> parts = list_parts(build, machine);
  if (args.json) {
    std::cout << to_json(build, machine, parts) << "\n";
  } else {
    std::cout << to_text(build, machine, parts);
  }
  return 0;
}

}  // namespace crossdock::cli
