#include "bench/sweep.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "bench/whole_number.hpp"
#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

constexpr double kMostBytes = 0x1p56;  // far more than any machine has; sums of sizes stay exact

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::string in_quotes(std::string_view text) {
  return "\"" + std::string(text) + "\"";
}

[[noreturn]] void refuse_entry(const SizeOption& option, std::string_view entry) {
  refuse(std::string(option.name) +
         " must be a whole number or a range like 128:4096:x2 or 64:512:+64, or a list of them "
         "separated by commas; got " +
         in_quotes(entry));
}

// `entry`: what the number is a part of, for messages.
int64_t parse_number(const SizeOption& option, std::string_view text, std::string_view entry) {
  const std::optional<WholeNumber> number = parse_whole_number(text);
  if (!number) refuse_entry(option, entry);
  const int64_t value = number->value;
  if (!number->fits || value < option.least || value > option.largest) {
    refuse(std::string(option.name) + " must be from " + std::to_string(option.least) + " to " +
           std::to_string(option.largest) + ", got " + std::string(text));
  }
  return value;
}

struct SizeRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t change = 0;  // at least 1, or 2 for a factor
  bool is_factor = false;

  // The value after this one; larger than `last` at the end.
  int64_t next(int64_t value) const {
    if (is_factor) return value > last / change ? last + 1 : value * change;
    return value > last - change ? last + 1 : value + change;
  }
};

SizeRange parse_range(const SizeOption& option, std::string_view entry) {
  const size_t colon = entry.find(':');
  const size_t second = entry.find(':', colon + 1);
  if (second == std::string_view::npos || second + 1 == entry.size()) refuse_entry(option, entry);
  SizeRange range{.first = parse_number(option, entry.substr(0, colon), entry),
                  .last = parse_number(option, entry.substr(colon + 1, second - colon - 1), entry),
                  .is_factor = entry[second + 1] == 'x'};
  if (!range.is_factor && entry[second + 1] != '+') refuse_entry(option, entry);
  const int64_t least = range.is_factor ? 2 : 1;
  const std::optional<WholeNumber> change = parse_whole_number(entry.substr(second + 2));
  if (!change || !change->fits) refuse_entry(option, entry);
  range.change = change->value;
  if (range.change < least) {
    refuse(std::string(option.name) + ": the " + (range.is_factor ? "factor" : "step") +
           " of a range must be at least " + std::to_string(least) + ", got " + in_quotes(entry));
  }
  if (range.first > range.last) {
    refuse(std::string(option.name) +
           ": the first value of a range must be at most the last, got " + in_quotes(entry));
  }
  return range;
}

// Makes a copy of each scenario for every value.
template <typename Member, typename Value>
void vary(std::vector<Scenario>& list, Member Scenario::*member, const std::vector<Value>& values) {
  if (values.empty()) return;
  std::vector<Scenario> varied;
  for (const Scenario& scenario : list) {
    for (const Value value : values) {
      varied.push_back(scenario);
      varied.back().*member = static_cast<Member>(value);
    }
  }
  list = std::move(varied);
}

void require_dtype(const Scenario& s, DType dtype) {
  if (s.dtype == dtype) return;
  refuse("the dtype of scenario " + s.name + " must be " + std::string(name_of(dtype)) + ", got " +
         std::string(name_of(s.dtype)));
}

void check_dtype(const Scenario& s) {
  switch (s.kind) {
    case ScenarioKind::kExperts:
    case ScenarioKind::kLayer:
      return require_dtype(s, DType::kF32);
    case ScenarioKind::kCudaLayer:
    case ScenarioKind::kCudaOverlap:
    case ScenarioKind::kCudaProducts:
    case ScenarioKind::kCudaQuantise:
      return require_dtype(s, DType::kBF16);
    default:
      return;
  }
}

void check_sizes(const Scenario& s) {
  if (s.top_k > s.experts) {
    refuse("experts (" + std::to_string(s.experts) + ") must be at least top_k (" +
           std::to_string(s.top_k) + ")");
  }
  const double bytes = static_cast<double>(s.ranks) * static_cast<double>(s.tokens) *
                       static_cast<double>(s.width + 128) * static_cast<double>(s.top_k + s.ranks) *
                       static_cast<double>(s.element_bytes());
  const double parameters = static_cast<double>(s.experts) * static_cast<double>(s.width) *
                            static_cast<double>(s.inner + 1);
  if (std::max(bytes, parameters) > kMostBytes) {
    refuse("sizes must be smaller: " + std::to_string(s.ranks) + " ranks, " +
           std::to_string(s.tokens) + " tokens, width " + std::to_string(s.width) + ", top_k " +
           std::to_string(s.top_k) + " and " + std::to_string(s.experts) +
           " experts fit on no machine");
  }
  check_dtype(s);
  if (s.kind == ScenarioKind::kExperts && (s.top_k != 1 || s.tokens % s.experts != 0)) {
    refuse("in scenario " + s.name + " top_k (" + std::to_string(s.top_k) +
           ") must be 1 and tokens (" + std::to_string(s.tokens) + ") a multiple of experts (" +
           std::to_string(s.experts) + ")");
  }
}

size_t number_of_combinations(const Sizes& sizes) {
  size_t count = std::max<size_t>(sizes.dtypes.size(), 1);
  for (const auto* values :
       {&sizes.ranks, &sizes.tokens, &sizes.width, &sizes.top_k, &sizes.experts}) {
    count *= std::max<size_t>(values->size(), 1);
    if (count > kMaxRuns) {
      refuse("these sizes have more than " + std::to_string(kMaxRuns) +
             " combinations; sweep over fewer values");
    }
  }
  return count;
}

}  // namespace

std::vector<int64_t> parse_sizes(const SizeOption& option,
                                 const std::vector<std::string>& entries) {
  std::vector<int64_t> values;
  for (const std::string& entry : entries) {
    SizeRange range;
    if (entry.find(':') == std::string::npos) {
      const int64_t value = parse_number(option, entry, entry);
      range = {.first = value, .last = value, .change = 1};
    } else {
      range = parse_range(option, entry);
    }
    for (int64_t value = range.first; value <= range.last; value = range.next(value)) {
      values.push_back(value);
      if (values.size() > kMaxRuns) {
        refuse(std::string(option.name) + " must have at most " + std::to_string(kMaxRuns) +
               " values, but " + in_quotes(entry) + " makes it more");
      }
    }
  }
  return values;
}

std::vector<Scenario> sweep(const Scenario& scenario, const Sizes& sizes) {
  if (scenario.kind == ScenarioKind::kAgree && sizes.any_but_ranks()) {
    refuse("scenario " + scenario.name +
           " moves no rows, so --ranks must be its only size; leave the others out");
  }
  std::vector<Scenario> list;
  list.reserve(number_of_combinations(sizes));
  list.push_back(scenario);
  vary(list, &Scenario::dtype, sizes.dtypes);
  if (!scenario.has_one_rank()) vary(list, &Scenario::ranks, sizes.ranks);
  vary(list, &Scenario::experts, sizes.experts);
  vary(list, &Scenario::top_k, sizes.top_k);
  vary(list, &Scenario::width, sizes.width);
  vary(list, &Scenario::tokens, sizes.tokens);
  if (sizes.any_but_ranks()) std::ranges::for_each(list, check_sizes);
  return list;
}

}  // namespace crossdock::bench
