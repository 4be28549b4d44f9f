#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "cli/commands.hpp"
#include "cli/json_writer.hpp"
#include "cli/machine.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {
namespace {

// A part of Crossdock on this machine.
struct Part {
  std::string name;
  bool is_built = false;
  bool works = false;
  std::string note;  // how to use it, or why it does not work
};

std::string mpi_note() {
  if (mpi_is_launched()) return "this process was started by an MPI launcher";
  const std::string launcher = find_program("mpirun");
  return launcher.empty() ? "no mpirun on the PATH to start ranks with (Debian: openmpi-bin)"
                          : "start ranks with " + launcher;
}

std::string cuda_note() {
  const int count = cuda_device_count();
  if (count == 0) return "no GPU here: " + cuda_missing_reason();
  return std::to_string(count) + (count == 1 ? " GPU here" : " GPUs here");
}

std::vector<Part> list_parts(const BuildDescription& build, const Machine& machine) {
  std::vector<Part> parts = {
      {"threads", true, true,
       "ranks as threads, " + std::to_string(machine.num_usable_cores) + " cores for them"}};
  for (const Feature& feature : build.features) {
    Part part{std::string(feature.name), feature.is_built, feature.is_built,
              std::string(feature.note)};
    if (feature.name == "mpi" && feature.is_built) {
      part.works = mpi_is_launched() || !find_program("mpirun").empty();
      part.note += "; " + mpi_note();
    }
    if (feature.name == "cuda" && feature.is_built) {
      part.works = cuda_device_count() > 0;
      part.note += "; " + cuda_note();
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<std::string_view> token_dtypes() {
  return {name_of(DType::kF64), name_of(DType::kF32), name_of(DType::kBF16), name_of(DType::kF16),
          name_of(DType::kF8E4M3)};
}

std::string to_json(const BuildDescription& build, const Machine& machine,
                    const std::vector<Part>& parts) {
  JsonWriter writer(2);
  writer.begin_object();
  writer.field("version", build.version);
  writer.field("revision", build.revision);
  writer.field("compiler", build.compiler);
  writer.field("build_type", build.build_type);
  writer.field("sanitizers", build.sanitizers);
  writer.key("parts");
  writer.begin_array();
  for (const Part& part : parts) {
    writer.begin_object();
    writer.field("name", part.name);
    writer.field("built", part.is_built);
    writer.field("works", part.works);
    writer.field("note", part.note);
    writer.end_object();
  }
  writer.end_array();
  writer.key("strategies");
  writer.list(strategy_names());
  writer.key("dtypes");
  writer.list(token_dtypes());
  writer.key("machine");
  writer.begin_object();
  writer.field("cores", machine.num_cores);
  writer.field("usable_cores", machine.num_usable_cores);
  writer.field("memory_bytes", machine.memory_bytes);
  writer.field("simd", machine.simd);
  writer.end_object();
  writer.end_object();
  return writer.text();
}

void print_text(const BuildDescription& build, const Machine& machine,
                const std::vector<Part>& parts) {
  std::cout << "crossdock " << build.version;
  if (!build.revision.empty()) std::cout << " (" << build.revision << ")";
  std::cout << ", " << build.build_type << " build by " << build.compiler;
  if (!build.sanitizers.empty()) std::cout << ", sanitizers: " << build.sanitizers;
  std::cout << "\n\n";
  for (const Part& part : parts) {
    std::cout << "  " << std::left << std::setw(9) << part.name << std::setw(11)
              << (part.works      ? "works"
                  : part.is_built ? "built"
                                  : "not built")
              << part.note << "\n";
  }
  std::cout << "\n  strategies";
  for (const std::string& name : strategy_names()) std::cout << "  " << name;
  std::cout << "\n  dtypes    ";
  for (const std::string_view name : token_dtypes()) std::cout << "  " << name;
  std::cout << "\n  machine     " << machine.num_usable_cores << " of " << machine.num_cores
            << " cores, " << machine.memory_bytes / (int64_t{1} << 30) << " GiB, " << machine.simd
            << "\n";
}

}  // namespace

int run_info(const InfoArgs& args) {
  const BuildDescription build = describe_build();
  const Machine machine = describe_machine();
  const std::vector<Part> parts = list_parts(build, machine);
  if (args.json) {
    std::cout << to_json(build, machine, parts) << "\n";
  } else {
    print_text(build, machine, parts);
  }
  return 0;
}

}  // namespace crossdock::cli
