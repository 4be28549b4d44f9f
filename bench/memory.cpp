#include "bench/memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number that the file contains; kUnlimited if there is none.
int64_t read_number(const std::string& path) {
  std::ifstream file(path);
  int64_t number = kUnlimited;
  return file >> number ? number : kUnlimited;
}

int64_t available_in_machine() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "MemAvailable:") return kibibytes * 1024;
  }
  return kUnlimited;
}

int64_t available_in_control_group() {
  const std::string folder = "/sys/fs/cgroup/";
  const int64_t limit = read_number(folder + "memory.max");
  const int64_t used = read_number(folder + "memory.current");
  return limit == kUnlimited || used == kUnlimited ? kUnlimited : limit - used;
}

std::string gibibytes(double bytes) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << bytes / (1 << 30) << " GiB";
  return text.str();
}

}  // namespace

int64_t needed_bytes(const Scenario& s) {
  const int64_t tokens = s.token_bytes();
  const int64_t rows = s.row_bytes();
  if (s.kind != ScenarioKind::kMove) {
    // Parameters, gradients and the copy's buffers; what experts save for backward.
    const int64_t hidden = s.ranks * s.tokens * s.top_k * s.inner * s.element_bytes();
    return 4 * s.parameter_bytes() + 6 * tokens + 8 * rows + 10 * hidden;
  }
  const int64_t copies = tokens + (s.backward ? 2 : 1) * rows;
  // x, out and part of every rank's tokens (allgather); rows, y, packed and received; routes.
  const int64_t moved = (3 + s.ranks) * tokens + 4 * rows + s.ranks * s.tokens * s.top_k * 128;
  return moved + copies + (s.backward ? 2 * tokens + rows : 0);
}

int64_t available_bytes() {
  return std::min(available_in_machine(), available_in_control_group());
}

void check_memory(const Scenario& scenario) {
  check_memory("scenario " + scenario.name, static_cast<double>(needed_bytes(scenario)),
               scenario.ranks);
}

void check_memory(const std::string& what, double needed_bytes, int ranks) {
  const auto available = static_cast<double>(available_bytes());
  if (needed_bytes <= available) return;
  throw Error(ErrorCode::kCapacity,
              what + " needs " + gibibytes(needed_bytes) + " on " + std::to_string(ranks) +
                  " ranks, but this machine has only " + gibibytes(available) +
                  " left; choose a smaller one or fewer ranks (--ranks)");
}

}  // namespace crossdock::bench
