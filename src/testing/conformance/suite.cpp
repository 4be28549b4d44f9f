#include <exception>

#include "core/check.hpp"
#include "testing/conformance/checks.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {
namespace {

constexpr std::array kDtypes = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64,
                                DType::kF8E4M3};

// Selects the checks of a routing: every dtype with plain, every variant with fp32, and two
// variants with each other dtype, chosen differently for each routing so that every pair of variant
// and dtype occurs. Partial sums in the row type apply only to rows smaller than fp32.
bool is_wanted(size_t routing, size_t variant, size_t dtype) {
  if (static_cast<Variant>(variant) == Variant::kPartialSumsInRowType) {
    return size_of(kDtypes[dtype]) < size_of(DType::kF32);
  }
  constexpr size_t kOthers = kVariantNames.size() - 2;  // without plain and the last
  if (variant == 0 || dtype == 0) return true;
  const size_t turn = (variant - 1 + routing + 2 * dtype) % kOthers;
  return turn == 0 || turn == kOthers / 2;
}

// The short run has every routing, every variant and every dtype, but few combinations.
bool is_quick(size_t routing, size_t variant, size_t dtype) {
  return (routing + 2 * variant + dtype) % 3 == 0;
}

std::vector<Check> list_routings() {
  std::vector<Check> checks;
  for (size_t routing = 0; routing < kRoutingNames.size(); ++routing) {
    for (size_t dtype = 0; dtype < kDtypes.size(); ++dtype) {
      for (size_t variant = 0; variant < kVariantNames.size(); ++variant) {
        if (!is_wanted(routing, variant, dtype)) continue;
        const auto make = [=](int num_ranks) {
          return make_world(static_cast<RoutingKind>(routing), static_cast<Variant>(variant),
                            kDtypes[dtype], num_ranks);
        };
        checks.push_back({"routing/" + make(1).name, is_quick(routing, variant, dtype),
                          [=](Group& group, const StrategyFactory& strategy) {
                            return judge(group, strategy, make(group.size()));
                          }});
      }
    }
  }
  return checks;
}

}  // namespace

std::vector<Check> list_checks() {
  std::vector<Check> checks = list_worked_vectors();
  for (auto& part : {list_routings(), list_scenarios(), list_partial_sums(), list_given_outputs(),
                     list_bad_inputs(), list_mismatches()}) {
    checks.insert(checks.end(), part.begin(), part.end());
  }
  return checks;
}

Report run_checks(Group& group, const StrategyFactory& strategy, std::span<const Check> checks,
                  const Progress& progress) {
  Report report;
  for (const Check& check : checks) {
    if (progress) progress(check);
    ++report.num_checks;
    Findings findings;
    try {
      findings = check.body(group, strategy);
    } catch (const std::exception& e) {
      findings.push_back(concat("rank ", group.rank(), ": ", e.what()));
    }
    for (std::string& message : findings) {
      report.failures.push_back({check.name, std::move(message)});
    }
    if (group.is_poisoned()) break;
  }
  return report;
}

}  // namespace crossdock::conformance
