#include "plan/config_check.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_memory.hpp"
#include "plan/local_routes.hpp"
#include "plan/placement.hpp"

namespace crossdock {
namespace {

// The counts of all experts are kept for every rank; more experts are assumed to be a mistake.
constexpr int64_t kMaxExperts = int64_t{1} << 20;
constexpr int64_t kMaxPaddedRows = std::numeric_limits<int32_t>::max();
constexpr std::array<int64_t, 7> kAlignments = {1, 8, 16, 32, 64, 128, 256};

void check_capacity(const DispatchConfig& config, int num_ranks) {
  const Capacity& capacity = *config.capacity;
  CROSSDOCK_CHECK(std::isfinite(capacity.factor) && capacity.factor > 0,
                  "the capacity factor must be positive and finite, got ", capacity.factor);
  if (!capacity.pad_to_capacity) return;
  CROSSDOCK_CHECK(capacity.max_tokens >= 1,
                  "pad_to_capacity needs max_tokens, the largest number of tokens of any rank; "
                  "it must be at least 1, got ",
                  capacity.max_tokens);
  const int64_t rows = capacity_rows(config, capacity.max_tokens);
  CROSSDOCK_CHECK(
      row_bytes_fit_int64({rows + config.alignment, config.num_experts, num_ranks}, config),
      "capacity factor ", capacity.factor, " with max_tokens ", capacity.max_tokens, " asks for ",
      rows, " rows per expert and rank, more than can be counted");
}

// REQUIRES: a checked placement.
int64_t most_local_experts(const DispatchConfig& config, int num_ranks) {
  std::vector<int64_t> num_experts(index(num_ranks), 0);
  for (const int32_t owner : make_placement(config, num_ranks).owner) ++num_experts[index(owner)];
  return std::ranges::max(num_experts);
}

// With pad_to_capacity, the rows of a rank do not depend on the routing.
void check_padded_rows(const DispatchConfig& config, int num_ranks) {
  const int64_t rows = padded_rows_per_source(config);
  if (rows == 0) return;
  const int64_t num_segments = most_local_experts(config, num_ranks);
  CROSSDOCK_CHECK(product_within(kMaxPaddedRows, {rows, num_ranks, num_segments}),
                  "pad_to_capacity with capacity factor ", config.capacity->factor,
                  " and max_tokens ", config.capacity->max_tokens, " pads the ", num_segments,
                  " experts of a rank to ", rows, " rows for each of ", num_ranks,
                  " ranks; a rank can have at most ", kMaxPaddedRows,
                  " rows in all: reduce max_tokens to the largest number of tokens of any rank");
}

}  // namespace

bool row_bytes_fit_int64(std::initializer_list<int64_t> num_rows, const DispatchConfig& config) {
  const auto rows = product_within(kMaxBytes, num_rows);
  return rows && product_within(kMaxBytes, {*rows, config.width, int64_t{sizeof(double)}});
}

void check_config(const DispatchConfig& config, int num_ranks) {
  CROSSDOCK_CHECK(config.num_experts >= 1 && config.num_experts <= kMaxExperts,
                  "num_experts must be in [1, ", kMaxExperts, "], got ", config.num_experts);
  CROSSDOCK_CHECK(config.top_k >= 1, "top_k must be at least 1, got ", config.top_k);
  CROSSDOCK_CHECK(config.top_k <= config.num_experts, "num_experts (", config.num_experts,
                  ") must be at least top_k (", config.top_k, ")");
  CROSSDOCK_CHECK(config.width >= 1 && config.width <= kMaxWidth, "width must be in [1, ",
                  kMaxWidth, "], got ", config.width);
  CROSSDOCK_CHECK(
      std::find(kAlignments.begin(), kAlignments.end(), config.alignment) != kAlignments.end(),
      "alignment must be 1, 8, 16, 32, 64, 128 or 256, got ", config.alignment);
  CROSSDOCK_CHECK(
      config.max_routes_per_token == 0 || (config.max_routes_per_token >= config.top_k &&
                                           config.max_routes_per_token <= config.num_experts),
      "max_routes_per_token must be 0 (no bound) or from top_k (", config.top_k,
      ") to num_experts (", config.num_experts, "), got ", config.max_routes_per_token);
  if (config.capacity) check_capacity(config, num_ranks);
  if (!config.placement.empty()) {
    const auto num_placed = static_cast<int64_t>(config.placement.size());
    CROSSDOCK_CHECK(num_placed == config.num_experts,
                    "placement must name the rank of each of the ", config.num_experts,
                    " experts, got ", num_placed, " entries");
    for (size_t expert = 0; expert < config.placement.size(); ++expert) {
      CROSSDOCK_CHECK(config.placement[expert] >= 0 && config.placement[expert] < num_ranks,
                      "placement of expert ", expert, " must be a rank in [0, ", num_ranks,
                      "), got ", config.placement[expert]);
    }
  }
  check_padded_rows(config, num_ranks);
  CROSSDOCK_CHECK(!config.max_rows || *config.max_rows >= 0, "max_rows must not be negative, got ",
                  config.max_rows.value_or(0));
  CROSSDOCK_CHECK(row_bytes_fit_int64({config.max_rows.value_or(0)}, config), "max_rows (",
                  config.max_rows.value_or(0), ") rows of width ", config.width,
                  " are more than can be counted");
}

std::string config_text(const DispatchConfig& config, std::string_view strategy_name,
                        std::string_view candidates) {
  std::ostringstream out;
  out << std::setprecision(17);
  out << "num_experts=" << config.num_experts << ";top_k=" << config.top_k
      << ";width=" << config.width << ";alignment=" << config.alignment << ";capacity_factor=";
  if (config.capacity) {
    const Capacity& capacity = *config.capacity;
    out << capacity.factor
        << ";drop_policy=" << (capacity.policy == DropPolicy::kWeight ? "weight" : "position")
        << ";pad_to_capacity=" << capacity.pad_to_capacity << ";max_tokens=" << capacity.max_tokens;
  } else {
    out << "none";
  }
  out << ";placement=";
  if (config.placement.empty()) out << "contiguous";
  for (size_t expert = 0; expert < config.placement.size(); ++expert) {
    out << (expert > 0 ? "," : "") << config.placement[expert];
  }
  out << ";partial_sums=" << name_of(config.partial_sums)
      << ";nonfinite=" << (config.nonfinite == NonFinite::kReject ? "reject" : "propagate")
      << ";max_rows=";
  if (config.max_rows) {
    out << *config.max_rows;
  } else {
    out << "none";
  }
  if (config.keep_empty_segments) out << ";keep_empty_segments=1";
  if (config.max_routes_per_token != 0) {
    out << ";max_routes_per_token=" << config.max_routes_per_token;
  }
  if (config.copies != Copies::kAuto) out << ";copies=" << name_of(config.copies);
  if (!candidates.empty()) out << ";candidates=" << candidates;
  // Last, because "auto" depends on all the other settings.
  out << ";strategy=" << strategy_name;
  return out.str();
}

}  // namespace crossdock
