#include "bench/workload.hpp"

#include <algorithm>

#include "bench/mix.hpp"

namespace crossdock::bench {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix_bits(seed)) {}
  uint64_t next() { return mix_bits(state_ += kMixStep); }
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(next() % static_cast<uint64_t>(limit));
  }

 private:
  uint64_t state_;
};

// Values in [-1, 1) that use all bits of their dtype, so that sums are rounded.
template <typename T>
void fill_row(uint64_t seed, int64_t width, T* row) {
  const auto low = static_cast<uint32_t>(seed);
  const auto high = static_cast<uint32_t>(seed >> 32);
  for (int64_t d = 0; d < width; ++d) {
    uint32_t bits = (low + static_cast<uint32_t>(d)) * 0x9e3779b1u;
    bits = (bits ^ (bits >> 15) ^ high) * 0x85ebca77u;
    row[d] = from_float<T>(static_cast<float>(static_cast<int32_t>(bits) >> 8) * 0x1p-23f);
  }
}

}  // namespace

Workload::Workload(const Scenario& scenario) : scenario_(scenario) {
  const int64_t T = scenario.tokens;
  const int64_t K = scenario.top_k;
  std::vector<reference::RankInput> inputs;
  for (int rank = 0; rank < scenario.ranks; ++rank) {
    std::vector<int32_t> ids;
    std::vector<float> weights;
    Random random(static_cast<uint64_t>(rank) + 1);
    while (ids.size() < static_cast<size_t>(T * K)) {
      const auto token_begin = ids.end() - static_cast<int64_t>(ids.size()) % K;
      const auto expert = static_cast<int32_t>(random.below(scenario.experts));
      if (std::find(token_begin, ids.end(), expert) != ids.end()) continue;
      ids.push_back(expert);
      weights.push_back(static_cast<float>(1 + random.below((1 << 24) - 1)) * 0x1p-24f);
    }
    inputs.push_back({.T = T,
                      .x = {},
                      .expert_ids = {ids.begin(), ids.end()},
                      .weights = {weights.begin(), weights.end()},
                      .grad_out = {},
                      .mask = {}});
    expert_ids_.push_back(std::move(ids));
    weights_.push_back(std::move(weights));
  }
  layout_ = reference::lay_out(dispatch_config(), inputs);
}

DispatchConfig Workload::dispatch_config() const {
  return {.num_experts = scenario_.experts, .top_k = scenario_.top_k, .width = scenario_.width};
}

void Workload::fill(uint32_t what, int rank, int64_t t, int64_t k, void* row) const {
  const auto place = (static_cast<uint64_t>(rank) * static_cast<uint64_t>(scenario_.tokens) +
                      static_cast<uint64_t>(t)) *
                         static_cast<uint64_t>(scenario_.top_k) +
                     static_cast<uint64_t>(k);
  const uint64_t seed = mix_bits(place * 4 + what);
  switch (scenario_.dtype) {
    case DType::kBF16:
      return fill_row(seed, scenario_.width, static_cast<BF16*>(row));
    case DType::kF16:
      return fill_row(seed, scenario_.width, static_cast<F16*>(row));
    default:
      return fill_row(seed, scenario_.width, static_cast<float*>(row));
  }
}

}  // namespace crossdock::bench
