#include "bench/copy_ceiling.hpp"

#include <sched.h>

#include <chrono>
#include <cstring>

namespace crossdock::bench {
namespace {

// While it lives, this thread and those it starts may use every core of the machine.
class OnAllCores {
 public:
  OnAllCores() {
    is_changed_ = sched_getaffinity(0, sizeof(before_), &before_) == 0;
    cpu_set_t all;
    CPU_ZERO(&all);
    for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &all);
    is_changed_ = is_changed_ && sched_setaffinity(0, sizeof(all), &all) == 0;
  }
  ~OnAllCores() {
    if (is_changed_) sched_setaffinity(0, sizeof(before_), &before_);
  }
  OnAllCores(const OnAllCores&) = delete;
  OnAllCores& operator=(const OnAllCores&) = delete;

 private:
  cpu_set_t before_;
  bool is_changed_;
};

}  // namespace

CopyCeiling::CopyCeiling(int64_t max_bytes) : from_(max_bytes / 2), to_(max_bytes / 2) {
  const OnAllCores on_all_cores;
  pool_ = std::make_unique<ThreadPool>();
  std::memset(from_.data(), 1, static_cast<size_t>(from_.num_bytes()));
  std::memset(to_.data(), 0, static_cast<size_t>(to_.num_bytes()));
}

CopyCeiling::~CopyCeiling() = default;

double CopyCeiling::copy_us(int64_t num_bytes) {
  using Clock = std::chrono::steady_clock;
  const OnAllCores on_all_cores;
  const int64_t copied = num_bytes / 2;
  const int64_t parts = pool_->num_threads();
  const auto begin = Clock::now();
  pool_->parallel_for(parts, [&](int64_t part) {
    const int64_t first = copied * part / parts;
    const int64_t last = copied * (part + 1) / parts;
    std::memcpy(to_.data() + first, from_.data() + first, static_cast<size_t>(last - first));
  });
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

}  // namespace crossdock::bench
