#include "cli/plan/report.hpp"

#include <array>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <vector>

namespace crossdock::cli {
namespace {

constexpr int kNameWidth = 14;
constexpr int kColumnWidth = 12;

std::string number(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

// Three digits and a unit: "1.54 GB".
std::string with_unit(double value, const char* unit) {
  constexpr std::array<const char*, 6> kPrefixes = {"", "k", "M", "G", "T", "P"};
  size_t prefix = 0;
  for (; value >= 999.5 && prefix + 1 < kPrefixes.size(); ++prefix) value /= 1000.0;
  const int digits = value == 0 || (prefix == 0 && value == std::floor(value)) ? 0
                     : value < 9.995                                           ? 2
                     : value < 99.95                                           ? 1
                                                                               : 0;
  const std::string text = number(value, digits);
  const std::string suffix = std::string(kPrefixes[prefix]) + unit;
  return suffix.empty() ? text : text + " " + suffix;
}

std::string bytes(double value) {
  return with_unit(value, "B");
}

std::string time(double seconds) {
  const bool is_long = seconds >= 0.9995;
  const double value = is_long ? seconds : seconds * 1e3;
  return number(value, value < 9.995 ? 3 : value < 99.95 ? 2 : 1) + (is_long ? " s" : " ms");
}

class TextPlan {
 public:
  TextPlan(const PlanHeading& heading, const JobPlan& plan) : heading_(heading), plan_(plan) {}

  std::string text() {
    write_heading();
    write_links("rows sent by a rank", &OperationCost::rows,
                [](double rows) { return with_unit(rows, ""); });
    write_links("bytes sent by a rank", &OperationCost::bytes, bytes);
    if (is_uneven()) {
      write_links("most bytes that a rank sends or receives", &OperationCost::most_bytes, bytes);
    }
    write_times();
    write_memory();
    write_queue();
    write_choice();
    return out_.str();
  }

 private:
  void row(const std::string& name, const std::vector<std::string>& cells) {
    out_ << "  " << std::left << std::setw(kNameWidth) << name << std::right;
    for (const std::string& cell : cells) out_ << std::setw(kColumnWidth) << cell;
    out_ << "\n";
  }

  // A title over every two columns.
  void pair_titles(const std::vector<std::string>& titles) {
    out_ << "  " << std::setw(kNameWidth) << "" << std::right;
    for (const std::string& title : titles) out_ << std::setw(2 * kColumnWidth) << title;
    out_ << "\n";
  }

  void write_heading() {
    const JobDescription& job = heading_.job;
    const CostInputs& inputs = plan_.inputs;
    const RoutingEstimate& routing = plan_.costs.routing;
    out_ << (heading_.model.empty() ? "" : heading_.model + ": ") << "width " << job.width << ", "
         << job.top_k << " of " << job.num_experts << " experts, " << name_of(job.dtype) << "\n"
         << inputs.tokens << " tokens per rank";
    if (!job.tokens) {
      out_ << " (sequence " << job.sequence << " x micro-batch " << job.micro_batch;
      if (job.tp * job.cp > 1) out_ << " / " << job.tp * job.cp << " shards";
      out_ << ")";
    }
    out_ << "\n"
         << plan_.num_ranks << " ranks on " << job.nodes << (job.nodes == 1 ? " node" : " nodes")
         << "; an expert group has " << plan_.group_ranks << " on " << plan_.group_nodes
         << (plan_.group_nodes == 1 ? " node" : " nodes") << "; fabric " << job.fabric.name << "\n"
         << routing.most_experts << (routing.most_experts == 1 ? " expert" : " experts")
         << " per rank";
    if (plan_.expert_weight_bytes > 0) {
      out_ << " (" << bytes(static_cast<double>(plan_.expert_weight_bytes)) << " of weights)";
    }
    out_ << "; " << with_unit(routing.rows_per_rank, "") << " rows per rank, the most "
         << with_unit(routing.most_rows, "") << "\n"
         << (job.zipf > 0 ? "experts skewed by " + number(job.zipf, 2)
                          : std::string("experts alike"))
         << ": a token reaches " << number(routing.ranks_per_token, 3) << " ranks on "
         << number(routing.nodes_per_token, 3) << " nodes";
    if (job.capacity) {
      out_ << "\ncapacity " << number(*job.capacity, 2) << ": at most " << plan_.capacity_rows
           << " rows of a rank for an expert; " << number(100 * routing.dropped_share, 2)
           << " % of the routes are expected to be dropped (and count in the worst case alone)";
    }
    out_ << "\n\n";
  }

  // Whether some rank has clearly more to do than the mean.
  bool is_uneven() const {
    const auto differs = [](double most, double mean) { return most > 1.01 * mean; };
    for (const StrategyCost& cost : plan_.costs.strategies) {
      const OperationCost& out = cost.dispatch;
      if (differs(out.most_bytes.within_node, out.bytes.within_node) ||
          differs(out.most_bytes.between_nodes, out.bytes.between_nodes)) {
        return true;
      }
    }
    return false;
  }

  template <typename Show>
  void write_links(const char* title, LinkLoad OperationCost::*load, const Show& show) {
    out_ << title << "\n";
    pair_titles({"dispatch", "combine, exact", "combine, partial sums"});
    row("", {"in node", "between", "in node", "between", "in node", "between"});
    for (const StrategyCost& cost : plan_.costs.strategies) {
      std::vector<std::string> cells;
      for (const OperationCost* one : {&cost.dispatch, &cost.combine, &cost.partial_sums}) {
        cells.push_back(show((one->*load).within_node));
        cells.push_back(show((one->*load).between_nodes));
      }
      row(cost.name, cells);
    }
    const LinkLoad& least = plan_.costs.least_dispatch.*load;
    row("(least)", {show(least.within_node), show(least.between_nodes)});
    out_ << "\n";
  }

  void write_times() {
    out_ << "lower bound of time (a step: forward and backward, "
         << (heading_.job.partial_sums ? "partial sums" : "exact") << ")\n";
    row("", {"dispatch", "combine", "partial", "step", "with copies"});
    for (const StrategyCost& cost : plan_.costs.strategies) {
      row(cost.name, {time(cost.dispatch.lower_bound_s), time(cost.combine.lower_bound_s),
                      time(cost.partial_sums.lower_bound_s), time(cost.step_lower_bound_s),
                      time(cost.step_serial_s)});
    }
    row("(least)", {time(plan_.costs.least_dispatch.lower_bound_s)});
    out_ << "\n";
  }

  void write_memory() {
    const bool has_capacity = heading_.job.capacity.has_value();
    out_ << "memory of a rank, and requests in flight\n";
    std::vector<std::string> titles = {"expected", "worst case"};
    if (has_capacity) titles.emplace_back("capacity");
    titles.insert(titles.end(), {"of plan", "requests", "in flight"});
    row("", titles);
    for (const StrategyCost& cost : plan_.costs.strategies) {
      std::vector<std::string> cells = {bytes(cost.memory.expected.total()),
                                        bytes(cost.memory.worst_case.total())};
      if (has_capacity) cells.push_back(bytes(cost.memory.with_capacity->total()));
      cells.push_back(bytes(cost.memory.expected.plan_bytes));
      cells.push_back(number(std::ceil(cost.dispatch.requests), 0));
      cells.push_back(std::to_string(cost.max_in_flight));
      row(cost.name, cells);
    }
    write_excess("expected memory", [](const StepMemory& memory) { return memory.expected; });
    if (has_capacity) {
      write_excess("memory with capacity",
                   [](const StepMemory& memory) { return *memory.with_capacity; });
    }
    write_excess("worst case", [](const StepMemory& memory) { return memory.worst_case; });
    out_ << "\n";
  }

  // Names the strategies whose need exceeds the memory of the fabric.
  template <typename Need>
  void write_excess(const char* what, const Need& need) {
    const Fabric& fabric = heading_.job.fabric;
    std::string names;
    for (const StrategyCost& cost : plan_.costs.strategies) {
      if (fits(need(cost.memory), fabric)) continue;
      names.append(names.empty() ? "" : ", ").append(cost.name);
    }
    if (names.empty()) return;
    out_ << "  ! the " << what << " of " << names << " exceeds the "
         << bytes(static_cast<double>(fabric.memory_bytes)) << " of a rank of " << fabric.name
         << "\n";
  }

  void write_scheme(const char* name, const QueueNeed& need) {
    out_ << "  " << std::left << std::setw(kNameWidth) << name << std::right << need.entries
         << " entries for " << plan_.inputs.tokens
         << " tokens: " << (need.fits ? "fits" : "does not fit") << "; largest N "
         << need.largest_tokens << " (" << need.largest_rounded_tokens << " in steps of 64)\n";
  }

  void write_queue() {
    out_ << "send queue: " << heading_.job.fabric.send_queue_depth << " entries at most\n";
    write_scheme("3N+1 dispatch", plan_.dispatch_queue);
    write_scheme("2N+1 combine", plan_.combine_queue);
    out_ << "  " << std::left << std::setw(kNameWidth) << "crossdock" << std::right
         << heading_.job.engine.max_in_flight << " requests in flight at most, for any N: fits\n\n";
  }

  void write_choice() {
    out_ << "strategy: " << plan_.choice.name << "\n  " << plan_.choice.reason << "\n";
  }

  const PlanHeading& heading_;
  const JobPlan& plan_;
  std::ostringstream out_;
};

}  // namespace

bool fits(const MemoryNeed& need, const Fabric& fabric) {
  return fabric.memory_bytes == 0 || need.total() <= static_cast<double>(fabric.memory_bytes);
}

std::string plan_text(const PlanHeading& heading, const JobPlan& plan) {
  return TextPlan(heading, plan).text();
}

}  // namespace crossdock::cli
