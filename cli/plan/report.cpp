#include "cli/plan/report.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <vector>

#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

class TextPlan {
 public:
  TextPlan(const PlanHeading& heading, const JobPlan& plan, const TextStyle& style)
      : heading_(heading), plan_(plan), style_(style) {}

  std::string text() {
    write_choice();
    write_layer();
    write_ranks();
    write_links("rows sent by a rank", &OperationCost::rows,
                [](double rows) { return with_unit(rows, ""); });
    write_links("bytes sent by a rank", &OperationCost::bytes, bytes_text);
    if (is_uneven()) {
      write_links("most bytes that a rank sends or receives", &OperationCost::most_bytes,
                  bytes_text);
    }
    write_times();
    write_memory();
    if (heading_.with_queue) write_queue();
    return text_;
  }

 private:
  void write_line(const std::string& line, int indent = 2) {
    text_ += wrap(line, style_.width, indent) + "\n";
  }

  void write_table(const std::string& title, const Table& table) {
    write_line(paint(title, Colour::kBold, style_));
    text_ += table.text();
  }

  std::string partial_sums_title() const {
    const JobDescription& job = heading_.job;
    const DType results = job.dtype == DType::kF8E4M3 ? DType::kBF16 : job.dtype;
    return "partial, " + std::string(name_of(partial_dtype(job.partial_sums, results)));
  }

  void write_layer() {
    const JobDescription& job = heading_.job;
    std::ostringstream line;
    line << (heading_.model.empty() ? "" : heading_.model + ": ") << "width " << job.width << ", "
         << job.top_k << " of " << job.num_experts << " experts, " << name_of(job.dtype);
    write_line(line.str());
    line.str("");
    line << plan_.inputs.tokens << " tokens per rank";
    if (!job.tokens) {
      line << " (sequence " << job.sequence << " x micro-batch " << job.micro_batch;
      if (job.tp * job.cp > 1) line << " / " << job.tp * job.cp << " shards";
      line << ")";
    }
    write_line(line.str());
  }

  void write_ranks() {
    const JobDescription& job = heading_.job;
    const RoutingEstimate& routing = plan_.costs.routing;
    write_line(counted(plan_.num_ranks, "rank") + " on " + counted(job.nodes, "node") +
               "; each expert group: " + counted(plan_.group_ranks, "rank") + " on " +
               counted(plan_.group_nodes, "node") + "; fabric " + std::string(job.fabric.name));
    std::string experts = counted(routing.most_experts, "expert") + " per rank";
    if (plan_.expert_weight_bytes > 0) {
      experts += " (" + bytes_text(static_cast<double>(plan_.expert_weight_bytes)) + " of weights)";
    }
    write_line(experts + "; rows per rank: mean " + with_unit(routing.rows_per_rank, "") +
               ", most " + with_unit(routing.most_rows, ""));
    write_line((job.zipf > 0 ? "experts skewed by " + fixed(job.zipf, 2)
                             : std::string("experts equally likely")) +
               ": a token reaches " + fixed(routing.ranks_per_token, 3) + " ranks on " +
               fixed(routing.nodes_per_token, 3) + " nodes");
    if (job.capacity) {
      write_line("capacity " + fixed(*job.capacity, 2) + ": at most " +
                 counted(plan_.capacity_rows, "row") + " from a rank to an expert; about " +
                 fixed(100 * routing.dropped_share, 2) +
                 " % of the routes are dropped (considered in the worst case only)");
    }
    text_ += "\n";
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
    std::vector<Column> columns = {{"", Align::kLeft}};
    for (int i = 0; i < 3; ++i) columns.insert(columns.end(), {{"in node"}, {"between"}});
    Table table(style_, columns);
    table.add_group("dispatch", 1, 2);
    table.add_group("combine, exact", 3, 2);
    table.add_group(partial_sums_title(), 5, 2);
    for (const StrategyCost& cost : plan_.costs.strategies) {
      std::vector<Cell> cells = {cost.name};
      for (const OperationCost* one : {&cost.dispatch, &cost.combine, &cost.partial_sums}) {
        cells.emplace_back(show((one->*load).within_node));
        cells.emplace_back(show((one->*load).between_nodes));
      }
      table.add_row(std::move(cells));
    }
    const LinkLoad& least = plan_.costs.least_dispatch.*load;
    table.add_row({"(minimum)", show(least.within_node), show(least.between_nodes)});
    write_table(title, table);
    text_ += "\n";
  }

  void write_times() {
    Table table(style_, {{"", Align::kLeft},
                         {"dispatch"},
                         {"combine"},
                         {partial_sums_title()},
                         {"step"},
                         {"with copies"}});
    for (const StrategyCost& cost : plan_.costs.strategies) {
      table.add_row({cost.name, time_text(cost.dispatch.lower_bound_s),
                     time_text(cost.combine.lower_bound_s),
                     time_text(cost.partial_sums.lower_bound_s), time_text(cost.step_lower_bound_s),
                     time_text(cost.step_serial_s)});
    }
    table.add_row({"(minimum)", time_text(plan_.costs.least_dispatch.lower_bound_s)});
    write_table(std::string("lower bound of time (step: forward and backward, ") +
                    (heading_.job.partial_sums == PartialSums::kNone ? "exact)" : "partial sums)"),
                table);
    text_ += "\n";
  }

  void write_memory() {
    const bool has_capacity = heading_.job.capacity.has_value();
    std::vector<Column> columns = {{"", Align::kLeft}, {"expected"}, {"worst case"}};
    if (has_capacity) columns.push_back({"capacity"});
    columns.insert(columns.end(), {{"plan"}, {"requests"}, {"in flight"}});
    Table table(style_, columns);
    for (const StrategyCost& cost : plan_.costs.strategies) {
      std::vector<Cell> cells = {cost.name, bytes_text(cost.memory.expected.total()),
                                 bytes_text(cost.memory.worst_case.total())};
      if (has_capacity) cells.emplace_back(bytes_text(cost.memory.with_capacity->total()));
      cells.emplace_back(bytes_text(cost.memory.expected.plan_bytes));
      cells.emplace_back(with_unit(std::ceil(cost.dispatch.requests), ""));
      cells.emplace_back(std::to_string(cost.max_in_flight));
      table.add_row(std::move(cells));
    }
    write_table("memory per rank, requests per dispatch", table);
    write_excess("expected memory", [](const StepMemory& memory) { return memory.expected; });
    if (has_capacity) {
      write_excess("memory with capacity",
                   [](const StepMemory& memory) { return *memory.with_capacity; });
    }
    write_excess("worst case", [](const StepMemory& memory) { return memory.worst_case; });
  }

  // Names the strategies that need more memory than the fabric has.
  template <typename Need>
  void write_excess(const char* what, const Need& need) {
    const Fabric& fabric = heading_.job.fabric;
    std::string names;
    for (const StrategyCost& cost : plan_.costs.strategies) {
      if (fits(need(cost.memory), fabric)) continue;
      names.append(names.empty() ? "" : ", ").append(cost.name);
    }
    if (names.empty()) return;
    write_line("  ! the " + std::string(what) + " of " + names + " exceeds the " +
                   bytes_text(static_cast<double>(fabric.memory_bytes)) + " per rank of " +
                   std::string(fabric.name),
               4);
  }

  void write_queue() {
    text_ += "\n";
    Table table(
        style_,
        {{"", Align::kLeft}, {"entries"}, {"", Align::kLeft}, {"largest N"}, {"multiple of 64"}});
    const auto add = [&](const char* scheme, const QueueNeed& need) {
      table.add_row({scheme, std::to_string(need.entries), need.fits ? "fits" : "does not fit",
                     std::to_string(need.largest_tokens),
                     std::to_string(need.largest_rounded_tokens)});
    };
    add("3N+1 dispatch", plan_.dispatch_queue);
    add("2N+1 combine", plan_.combine_queue);
    write_table("send queue of at most " + std::to_string(heading_.job.fabric.send_queue_depth) +
                    " entries, N = " + std::to_string(plan_.inputs.tokens) + " tokens",
                table);
    write_line("  crossdock: at most " + std::to_string(heading_.job.mpi.max_in_flight) +
                   " requests in flight for any N: fits",
               4);
  }

  // What the reader came for: the strategy, its time, and whether it fits.
  void write_choice() {
    const auto& all = plan_.costs.strategies;
    const auto chosen = std::ranges::find(all, plan_.choice.name, &StrategyCost::name);
    const Fabric& fabric = heading_.job.fabric;
    write_line("strategy: " + plan_.choice.name);
    write_line("  " + plan_.choice.reason);
    if (chosen != all.end()) {
      const StepMemory& memory = chosen->memory;
      const MemoryNeed& worst = memory.with_capacity ? *memory.with_capacity : memory.worst_case;
      write_line("  a step needs at least " + time_text(chosen->step_lower_bound_s) + " and " +
                     bytes_text(memory.expected.total()) + " of a rank's " +
                     (fabric.memory_bytes > 0 ? bytes_text(static_cast<double>(fabric.memory_bytes))
                                              : std::string("memory")) +
                     "; with the worst routes " + bytes_text(worst.total()) +
                     (fits(worst, fabric) ? "" : ", which does not fit"),
                 2);
    }
    text_ += "\n";
  }

  const PlanHeading& heading_;
  const JobPlan& plan_;
  TextStyle style_;
  std::string text_;
};

}  // namespace

bool fits(const MemoryNeed& need, const Fabric& fabric) {
  return fabric.memory_bytes == 0 || need.total() <= static_cast<double>(fabric.memory_bytes);
}

std::string plan_text(const PlanHeading& heading, const JobPlan& plan, const TextStyle& style) {
  return TextPlan(heading, plan, style).text();
}

}  // namespace crossdock::cli
