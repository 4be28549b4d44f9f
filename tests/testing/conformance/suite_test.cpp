// The suite must detect the bugs it is meant for: strategies with one fault each must fail it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "crossdock/extend/plan_data.hpp"
#include "testing/conformance/expect_conformance.hpp"
#include "testing/conformance/faulty_strategy.hpp"

namespace crossdock::conformance {
namespace {

// The names of the checks that fail on any rank, with this fault in `alltoall`.
std::set<std::string> failing_checks(int num_ranks, const Faults& faults) {
  std::vector<Check> checks = quick_checks();
  std::erase_if(checks, [](const Check& check) {
    return check.name.starts_with("error/") || check.name.starts_with("mismatch/");
  });
  const StrategyFactory strategy = [&] {
    return std::make_unique<FaultyStrategy>(make_strategy("alltoall"), faults);
  };
  std::set<std::string> names;
  for (const Failure& failure : failures_on_threads({num_ranks}, strategy, checks)) {
    names.insert(failure.check);
  }
  return names;
}

void expect_seen(const Faults& faults, int num_ranks = 2) {
  EXPECT_FALSE(failing_checks(num_ranks, faults).empty());
}

TEST(Suite, PassesAStrategyWithoutFaults) {
  EXPECT_TRUE(failing_checks(2, {}).empty());
}

void swap_rows(const RowPart& part, int64_t a, int64_t b) {
  std::swap_ranges(part.rows + a * part.row_bytes, part.rows + (a + 1) * part.row_bytes,
                   part.rows + b * part.row_bytes);
}

TEST(Suite, SeesTwoRowsOfAnExpertSwapped) {
  expect_seen({.after_scatter = [](const StrategyCall& call, std::span<const RowPart> parts) {
    const Segments segments = call.plan.segments();
    for (int64_t e = 0; e < segments.num_segments; ++e) {
      if (segments.counts[e] < 2) continue;
      return swap_rows(parts[0], segments.starts[e], segments.starts[e] + 1);
    }
  }});
}

TEST(Suite, SeesTheLastRowLost) {
  expect_seen({.after_scatter = [](const StrategyCall& call, std::span<const RowPart> parts) {
    const int64_t R = call.plan.num_rows();
    if (R > 0)
      std::memset(parts[0].rows + (R - 1) * parts[0].row_bytes, 0, size_t(parts[0].row_bytes));
  }});
}

TEST(Suite, SeesPadRowsThatAreNotZero) {
  const Faults faults{
      .after_scatter = [](const StrategyCall& call, std::span<const RowPart> parts) {
        const Segments segments = call.plan.segments();
        for (int64_t e = 0; e < segments.num_segments; ++e) {
          const int64_t pad = segments.starts[e] + segments.counts[e];
          if (pad < segments.starts[e + 1]) parts[0].rows[pad * parts[0].row_bytes] = std::byte{1};
        }
      }};
  for (const std::string& name : failing_checks(2, faults)) {
    EXPECT_TRUE(name.ends_with("alignment") || name.ends_with("pad_to_capacity") ||
                name.ends_with("kept_segments"))
        << name;
  }
  expect_seen(faults);
}

TEST(Suite, SeesScalesThatStayBehind) {
  expect_seen(
      {.scatter = [](Strategy& inner, const StrategyCall& call, std::span<const RowPart> parts) {
        inner.scatter(call, parts.first(1));
      }});
}

TEST(Suite, SeesTheLastByteOfARowLost) {
  expect_seen({.after_scatter = [](const StrategyCall& call, std::span<const RowPart> parts) {
    const int64_t row_bytes = parts[0].row_bytes;
    for (int64_t row = 0; row < call.plan.num_rows(); ++row) {
      parts[0].rows[(row + 1) * row_bytes - 1] = std::byte{0};
    }
  }});
}

// A strategy with stale state: it returns each plan's first rows again.
TEST(Suite, SeesRowsOfAnEarlierCall) {
  auto mutex = std::make_shared<std::mutex>();
  auto seen = std::make_shared<
      std::map<std::tuple<const void*, size_t, int64_t>, std::vector<std::byte>>>();
  expect_seen({.after_scatter = [=](const StrategyCall& call, std::span<const RowPart> parts) {
    const std::lock_guard lock(*mutex);
    const auto num_bytes = static_cast<size_t>(call.plan.num_rows() * parts[0].row_bytes);
    const auto key =
        std::tuple(static_cast<const void*>(&call.plan.data()), parts.size(), parts[0].row_bytes);
    const auto [entry, is_new] = seen->try_emplace(key, parts[0].rows, parts[0].rows + num_bytes);
    if (!is_new && entry->second.size() == num_bytes && num_bytes > 0) {
      std::memcpy(parts[0].rows, entry->second.data(), num_bytes);
    }
  }});
}

// How one rank that holds all rows sums them; the defaults are correct.
struct LocalSum {
  std::function<std::vector<int64_t>(int64_t K)> slot_order = [](int64_t K) {
    std::vector<int64_t> order(static_cast<size_t>(K));
    for (int64_t k = 0; k < K; ++k) order[static_cast<size_t>(k)] = k;
    return order;
  };
  bool fused = true;
  bool round_each_step = false;
  bool skip_zero_weights = false;
  bool ignore_weights = false;

  void operator()(Strategy&, const StrategyCall& call, const GatherSumArgs& args) const {
    const PlanData& plan = call.plan.data();
    const bool is_f64 = args.rows.dtype == DType::kF64;
    const auto narrow = [&](double value) { return is_f64 ? value : double(float(value)); };
    const int64_t D = args.rows.shape[1];
    const std::vector<double> rows = reference::to_values(args.rows);
    const std::vector<double> weights =
        args.weights.given() ? reference::to_values(args.weights) : std::vector<double>{};
    std::vector<double> out(static_cast<size_t>(plan.T * D), 0.0);
    for (int64_t t = 0; t < plan.T; ++t) {
      for (const int64_t k : slot_order(plan.K)) {
        const auto slot = static_cast<size_t>(t * plan.K + k);
        if (plan.final_rows[slot] < 0) continue;
        const double weight = weights.empty() || ignore_weights ? 1.0 : weights[slot];
        if (skip_zero_weights && weight == 0.0) continue;
        for (int64_t d = 0; d < D; ++d) {
          const double y = rows[static_cast<size_t>(plan.final_rows[slot] * D + d)];
          double& acc = out[static_cast<size_t>(t * D + d)];
          const double product = narrow(weight * y);
          acc = !fused   ? narrow(product + acc)
                : is_f64 ? std::fma(weight, y, acc)
                         : double(std::fma(float(weight), float(y), float(acc)));
          if (round_each_step) acc = reference::round_to(args.out.dtype, acc);
        }
      }
    }
    const OwnedTensor rounded = reference::to_tensor(args.out.dtype, args.out.shape, out);
    if (args.out.num_bytes() > 0) {
      std::memcpy(args.out.data, rounded.view.data, static_cast<size_t>(args.out.num_bytes()));
    }
  }
};

TEST(Suite, PassesTheSumByHand) {
  EXPECT_TRUE(failing_checks(1, {.sum = LocalSum{}}).empty());
}

TEST(Suite, SeesSumsInDescendingSlots) {
  LocalSum sum;
  sum.slot_order = [](int64_t K) {
    std::vector<int64_t> order;
    for (int64_t k = K - 1; k >= 0; --k) order.push_back(k);
    return order;
  };
  expect_seen({.sum = sum}, 1);
}

TEST(Suite, SeesSumsMadePerRankInsteadOfInSlotOrder) {
  LocalSum sum;  // as if every second slot's expert were on another rank
  sum.slot_order = [](int64_t K) {
    std::vector<int64_t> order;
    for (int64_t k = 0; k < K; k += 2) order.push_back(k);
    for (int64_t k = 1; k < K; k += 2) order.push_back(k);
    return order;
  };
  const std::set<std::string> failing = failing_checks(1, {.sum = sum});
  EXPECT_TRUE(failing.count("vector/slot_order"));
  EXPECT_TRUE(std::any_of(failing.begin(), failing.end(), [](const std::string& name) {
    return name.find("bf16") != std::string::npos;  // even if most digits are rounded away
  }));
}

TEST(Suite, SeesProductsRoundedBeforeTheSum) {
  expect_seen({.sum = LocalSum{.fused = false}}, 1);
}

TEST(Suite, SeesEveryStepRounded) {
  expect_seen({.sum = LocalSum{.round_each_step = true}}, 1);
}

TEST(Suite, SeesRoutesOfWeightZeroLeftOut) {
  expect_seen({.sum = LocalSum{.skip_zero_weights = true}}, 1);
}

TEST(Suite, SeesWeightsNotApplied) {
  expect_seen({.sum = LocalSum{.ignore_weights = true}}, 1);
}

TEST(Suite, SeesOneBitOfOneSum) {
  expect_seen({.sum = [](Strategy& inner, const StrategyCall& call, const GatherSumArgs& args) {
    inner.gather_sum(call, args);
    if (args.out.num_bytes() > 0) *static_cast<std::byte*>(args.out.data) ^= std::byte{1};
  }});
}

TEST(Suite, SeesTokensWithoutRoutesLeftUntouched) {
  expect_seen({.sum = [](Strategy& inner, const StrategyCall& call, const GatherSumArgs& args) {
    const PlanData& plan = call.plan.data();
    const auto num_bytes = static_cast<size_t>(args.out.num_bytes());
    const auto* before = static_cast<const std::byte*>(args.out.data);
    const std::vector<std::byte> kept(before, before + num_bytes);
    inner.gather_sum(call, args);
    const auto row_bytes = static_cast<size_t>(args.out.row_bytes());
    for (int64_t t = 0; t < plan.T; ++t) {
      const auto first = plan.expert_ids.begin() + t * plan.K;
      if (std::any_of(first, first + plan.K, [](int32_t id) { return id >= 0; })) continue;
      std::memcpy(static_cast<std::byte*>(args.out.data) + static_cast<size_t>(t) * row_bytes,
                  kept.data() + static_cast<size_t>(t) * row_bytes, row_bytes);
    }
  }});
}

TEST(Suite, SeesAPartialSumLost) {
  const Faults faults{
      .partial_sum = [](Strategy& inner, const StrategyCall& call, const GatherSumArgs& args) {
        inner.gather_partial_sums(call, args);
        if (args.out.num_bytes() > 0) {
          std::memset(args.out.data, 0, static_cast<size_t>(args.out.row_bytes()));
        }
      }};
  expect_seen(faults);
}

TEST(Suite, SeesOneBitOfOnePartialSum) {
  const Faults faults{
      .partial_sum = [](Strategy& inner, const StrategyCall& call, const GatherSumArgs& args) {
        inner.gather_partial_sums(call, args);
        if (args.out.num_bytes() > 0) *static_cast<std::byte*>(args.out.data) ^= std::byte{1};
      }};
  const std::set<std::string> failing = failing_checks(2, faults);
  for (const char* name : {"partial_sums/bf16/fp32", "partial_sums/bf16/rows",
                           "partial_sums/fp16/rows", "partial_sums/fp64/rows"}) {
    EXPECT_TRUE(failing.count(name)) << name;
  }
}

void spoil_last_element(TensorView tensor) {
  if (tensor.num_elements() == 0) return;
  auto* last = static_cast<std::byte*>(tensor.data) + tensor.num_bytes() - 1;
  *last ^= std::byte{0x10};
}

TEST(Suite, SeesARowWeightChanged) {
  expect_seen({.after_scatter_routes = [](const StrategyCall& call, TensorView rows) {
    const Segments segments = call.plan.segments();
    for (int64_t e = 0; e < segments.num_segments; ++e) {
      if (segments.counts[e] > 0) return spoil_last_element({rows.data, rows.dtype, Shape{1}});
    }
  }});
}

TEST(Suite, SeesARouteGradientChanged) {
  expect_seen({.after_gather_routes = [](const StrategyCall&, TensorView routes) {
    spoil_last_element(routes);
  }});
}

TEST(Suite, SeesARankThatThrows) {
  const Faults faults{.after_scatter = [](const StrategyCall& call, std::span<const RowPart>) {
    if (call.group.rank() == 1) throw Error(ErrorCode::kInternal, "out of paper");
  }};
  EXPECT_FALSE(failing_checks(2, faults).empty());
}

}  // namespace
}  // namespace crossdock::conformance
