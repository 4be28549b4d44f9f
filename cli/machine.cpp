#include "cli/machine.hpp"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>

namespace crossdock::cli {
namespace {

std::string_view simd_level() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
  return "sse2";
#elif defined(__aarch64__)
  return "neon";
#else
  return "unknown";
#endif
}

}  // namespace

Machine describe_machine() {
  Machine machine;
  machine.num_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t usable;
  machine.num_usable_cores =
      sched_getaffinity(0, sizeof(usable), &usable) == 0 ? CPU_COUNT(&usable) : machine.num_cores;
  machine.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  machine.simd = simd_level();
  return machine;
}

std::string find_program(std::string_view name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::string candidate = (folder.empty() ? "." : folder) + "/" + std::string(name);
    struct stat file {};
    const bool is_file = stat(candidate.c_str(), &file) == 0 && S_ISREG(file.st_mode);
    if (is_file && access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

}  // namespace crossdock::cli
