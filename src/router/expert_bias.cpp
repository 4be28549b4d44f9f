#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/router.hpp"
#include "router/backend.hpp"

namespace crossdock {
namespace {

void check_update(const BiasUpdate& update) {
  CROSSDOCK_CHECK(std::isfinite(update.rate), "the rate of an update of the expert bias must be ",
                  "finite, got ", update.rate);
}

int64_t total_of(std::span<const int64_t> load) {
  int64_t total = 0;
  for (size_t e = 0; e < load.size(); ++e) {
    CROSSDOCK_CHECK(load[e] >= 0 && load[e] <= std::numeric_limits<int64_t>::max() - total,
                    "the loads are numbers of routes: they must not be negative and must sum to at "
                    "most 2^63 - 1, got ",
                    load[e], " for expert ", e);
    total += load[e];
  }
  return total;
}

template <typename T>
void add_steps(TensorView bias, const std::vector<double>& steps) {
  const std::span<T> values = bias.as<T>();
  for (size_t e = 0; e < steps.size(); ++e) {
    values[e] = static_cast<T>(static_cast<double>(values[e]) + steps[e]);
  }
}

}  // namespace

void update_expert_bias(TensorView bias, const RouterStatistics& statistics,
                        const BiasUpdate& update, Stream stream) {
  if (!statistics.is_on_device()) return update_expert_bias(bias, statistics.load(), update);
  check_update(update);
  const ConstTensorView counts = statistics.device_counts.view;
  const int64_t E = counts.num_elements() / std::max<int64_t>(statistics.num_sequences, 1) - 1;
  check_tensor("bias", bias, counts.device, DType::kF32, Shape{E});
  router::update_bias_on_device(bias, statistics, update, stream);
}

void update_expert_bias(TensorView bias, std::span<const int64_t> load, const BiasUpdate& update) {
  check_update(update);
  const auto E = static_cast<int64_t>(load.size());
  const bool is_f64 = bias.dtype == DType::kF64;
  check_tensor("bias", bias, is_f64 ? DType::kF64 : DType::kF32, Shape{E});
  const int64_t total = total_of(load);
  std::vector<double> steps(load.size());
  for (size_t e = 0; e < load.size(); ++e) {
    // Compares the load with total / E, without rounding.
    const bool is_below = load[e] < total / E || (load[e] == total / E && total % E > 0);
    steps[e] = is_below ? update.rate : load[e] > total / E ? -update.rate : 0.0;
  }
  if (update.centred && E > 0) {
    const double mean = std::accumulate(steps.begin(), steps.end(), 0.0) / static_cast<double>(E);
    for (double& step : steps) step -= mean;
  }
  if (is_f64) {
    add_steps<double>(bias, steps);
  } else {
    add_steps<float>(bias, steps);
  }
}

}  // namespace crossdock
