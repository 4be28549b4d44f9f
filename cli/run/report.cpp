#include "cli/run/report.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iomanip>
#include <numeric>
#include <sstream>

#include "cli/bars.hpp"
#include "cli/json_writer.hpp"

namespace crossdock::cli {
namespace {

constexpr int kBarWidth = 24;
constexpr int kColumnsPerLine = 64;
constexpr int kIndent = 2;

std::string hex(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string time_text(double us) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(us < 99950.0 ? 2 : 0) << us * 1e-3 << " ms";
  return text.str();
}

std::string bytes_text(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto amount = static_cast<double>(bytes);
  size_t unit = 0;
  for (; amount >= 1024.0 && unit + 1 < kUnits.size(); ++unit) amount /= 1024.0;
  std::ostringstream text;
  text << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << amount << ' ' << kUnits[unit];
  return text.str();
}

double total_us(const RunResult& result) {
  return result.forward_us + result.backward_us;
}

double operations_us(const RunResult& result) {
  double sum = 0;
  for (const OperationTime& operation : result.operations) sum += operation.median_us;
  return sum;
}

// Shares are of all lines together: operations that overlap, or are slow on different ranks, may
// take longer in sum than the step.
double share_of(const RunResult& result, double us) {
  const double whole = std::max(total_us(result), operations_us(result));
  return whole > 0 ? us / whole : 0;
}

// The largest of the values divided by their mean.
double imbalance(const std::vector<int64_t>& values) {
  const int64_t sum = std::accumulate(values.begin(), values.end(), int64_t{0});
  if (sum == 0) return 1.0;
  return static_cast<double>(*std::ranges::max_element(values)) *
         static_cast<double>(values.size()) / static_cast<double>(sum);
}

class TextReport {
 public:
  TextReport(const RunJob& job, const RunResult& result, bool colour)
      : job_(job), result_(result), colour_(colour) {
    text_ << std::fixed;
  }

  std::string text() {
    write_head();
    write_operations();
    write_load();
    write_verdict();
    return text_.str();
  }

 private:
  std::string paint(const char* code, const std::string& words) const {
    return colour_ ? std::string("\x1b[") + code + "m" + words + "\x1b[0m" : words;
  }

  void write_head() {
    const MoeLayerConfig& layer = job_.layer;
    if (!job_.preset.empty()) {
      text_ << job_.preset << (job_.scaling.empty() ? ", full size" : ", " + job_.scaling) << "\n";
    }
    text_ << job_.num_ranks << (job_.num_ranks == 1 ? " rank" : " ranks") << " (" << job_.engine
          << (result_.num_nodes == 1 ? ", 1 node"
                                     : ", " + std::to_string(result_.num_nodes) + " nodes")
          << "), " << result_.strategy << (layer.strategy == "auto" ? " (auto)" : "") << ", "
          << name_of(job_.dtype()) << "; " << job_.tokens_total << " tokens of width "
          << layer.router.width << ", " << layer.router.top_k << " of " << layer.router.num_experts
          << " experts each, inner width " << layer.experts.inner;
    if (layer.shared_inner > 0) text_ << ", shared experts " << layer.shared_inner;
    if (layer.overlap_chunks > 1) {
      text_ << "; dispatch in up to " << layer.overlap_chunks << " chunks";
    }
    text_ << "\n\n";
  }

  void write_operation(const std::string& name, double us, int64_t bytes) {
    const double share = share_of(result_, us);
    text_ << "  " << std::left << std::setw(20) << name << std::right << std::setw(13)
          << time_text(us) << std::setw(7) << std::setprecision(1) << 100.0 * share << " %  "
          << std::setw(10) << (bytes > 0 ? bytes_text(bytes) : "") << "  "
          << paint("36", bar(share, kBarWidth)) << "\n";
  }

  void write_operations() {
    text_ << paint("1", "  step                         time    share       bytes") << "\n";
    for (const OperationTime& operation : result_.operations) {
      write_operation(operation.name, operation.median_us, operation.bytes);
    }
    const double waited_us = total_us(result_) - operations_us(result_);
    if (waited_us > 0) write_operation("meeting, waiting", waited_us, 0);
    text_ << "  forward " << time_text(result_.forward_us);
    if (job_.with_backward) text_ << ", backward " << time_text(result_.backward_us);
    text_ << ": medians of " << job_.num_steps << (job_.num_steps == 1 ? " step" : " steps")
          << ", every line of the rank that was slowest there\n";
    text_ << "  messages of the engine: " << bytes_text(result_.traffic.bytes_within_node)
          << " within nodes, " << bytes_text(result_.traffic.bytes_between_nodes)
          << " between nodes";
    if (result_.traffic.requests_posted > 0) {
      text_ << "; at most " << result_.traffic.max_requests_in_flight << " of "
            << result_.traffic.requests_posted << " requests in flight at a rank";
    }
    text_ << "\n  held at most by a rank: "
          << bytes_text(result_.memory.window_bytes + result_.memory.pool_bytes);
    if (job_.with_backward) text_ << ", planned " << bytes_text(result_.planned_bytes);
    text_ << "\n\n";
  }

  void write_load() {
    const int64_t most = std::max<int64_t>(1, *std::ranges::max_element(result_.rows_per_rank));
    text_ << paint("1", "  rows per rank") << ", largest " << std::setprecision(2)
          << imbalance(result_.rows_per_rank) << " x the mean\n";
    for (size_t rank = 0; rank < result_.rows_per_rank.size(); ++rank) {
      const int64_t rows = result_.rows_per_rank[rank];
      text_ << "  " << std::setw(4) << rank << std::setw(10) << rows << "  "
            << paint("36", bar(static_cast<double>(rows) / static_cast<double>(most), kBarWidth))
            << "\n";
    }
    text_ << paint("1", "  rows per expert") << ", largest " << imbalance(result_.rows_per_expert)
          << " x the mean (" << *std::ranges::min_element(result_.rows_per_expert) << " to "
          << *std::ranges::max_element(result_.rows_per_expert) << ")\n  "
          << paint("36", columns(result_.rows_per_expert, kColumnsPerLine, kIndent)) << "\n\n";
  }

  void write_verdict() {
    if (const auto& check = result_.check; !check) {
      text_ << "  check     left out\n";
    } else if (check->passed) {
      text_ << "  check     " << paint("32", "passed") << ": " << check->num_tokens << " tokens";
      if (job_.with_backward) text_ << " and the weights of " << check->num_experts << " experts";
      text_ << " against the fp64 reference; largest error " << std::setprecision(3)
            << check->largest_error << " of the tolerance\n";
    } else {
      text_ << "  check     " << paint("31", "FAILED") << ": " << check->failure << "\n";
    }
    text_ << "  checksum  " << hex(result_.checksum) << " (outputs)";
    if (job_.with_backward) text_ << ", " << hex(result_.grad_checksum) << " (gradients)";
    text_ << "\n";
    write_trace_note();
  }

  void write_trace_note() {
    if (!result_.trace) return;
    const TraceSummary& trace = *result_.trace;
    text_ << "  trace     " << trace.file << ": ";
    if (trace.num_lost == 0) {
      text_ << (trace.num_steps == 1 ? "1 step\n"
                                     : "all " + std::to_string(trace.num_steps) + " steps\n");
    } else {
      text_ << "the last " << trace.num_steps << " of " << job_.num_steps << " steps; the first "
            << trace.num_lost << " are missing or incomplete, as the trace is full\n";
    }
  }

  const RunJob& job_;
  const RunResult& result_;
  bool colour_;
  std::ostringstream text_;
};

void write_list(JsonWriter& writer, const char* name, const auto& values) {
  writer.key(name);
  writer.begin_array();
  for (const auto value : values) writer.value(value);
  writer.end_array();
}

void write_job(JsonWriter& writer, const RunJob& job, const RunResult& result) {
  const MoeLayerConfig& layer = job.layer;
  writer.field("preset", std::string_view(job.preset));
  writer.field("scaling", std::string_view(job.scaling));
  writer.field("communicator", std::string_view(job.engine));
  writer.field("ranks", job.num_ranks);
  writer.field("nodes", result.num_nodes);
  writer.field("strategy", std::string_view(result.strategy));
  writer.field("auto", layer.strategy == "auto");
  writer.field("dtype", name_of(job.dtype()));
  writer.field("activation", name_of(layer.experts.activation));
  writer.field("weights_in",
               layer.experts.weights_in == WeightsIn::kExperts ? "experts" : "combine");
  writer.field("overlap", layer.overlap_chunks);
  writer.field("tokens_total", job.tokens_total);
  writer.field("width", layer.router.width);
  writer.field("inner", layer.experts.inner);
  writer.field("shared_inner", layer.shared_inner);
  writer.field("experts", layer.router.num_experts);
  writer.field("top_k", layer.router.top_k);
  writer.field("seed", static_cast<int64_t>(job.seed));
  writer.field("backward", job.with_backward);
}

void write_measured(JsonWriter& writer, const RunJob& job, const RunResult& result) {
  writer.field("forward_us", result.forward_us);
  writer.field("backward_us", result.backward_us);
  write_list(writer, "steps_us", result.steps_us);
  writer.key("operations");
  writer.begin_array();
  for (const OperationTime& operation : result.operations) {
    writer.begin_object();
    writer.field("name", std::string_view(operation.name));
    writer.field("median_us", operation.median_us);
    writer.field("share", share_of(result, operation.median_us));
    writer.field("bytes", operation.bytes);
    writer.end_object();
  }
  writer.end_array();
  writer.key("traffic");
  writer.begin_object();
  writer.field("bytes_within_node", result.traffic.bytes_within_node);
  writer.field("bytes_between_nodes", result.traffic.bytes_between_nodes);
  writer.field("requests_posted", result.traffic.requests_posted);
  writer.field("max_requests_in_flight", result.traffic.max_requests_in_flight);
  writer.end_object();
  writer.field("max_in_flight_seen", result.traffic.max_requests_in_flight);
  writer.key("memory");
  writer.begin_object();
  writer.field("window_bytes", result.memory.window_bytes);
  writer.field("pool_bytes", result.memory.pool_bytes);
  if (job.with_backward) writer.field("planned_bytes", result.planned_bytes);  // it is of both
  writer.end_object();
}

void write_trace(JsonWriter& writer, const TraceSummary& trace) {
  writer.key("trace");
  writer.begin_object();
  writer.field("file", std::string_view(trace.file));
  writer.field("steps", trace.num_steps);
  writer.field("steps_lost", trace.num_lost);
  writer.end_object();
}

void write_check(JsonWriter& writer, const RunResult& result) {
  writer.key("check");
  if (!result.check) return writer.null();
  writer.begin_object();
  writer.field("passed", result.check->passed);
  writer.field("tokens", result.check->num_tokens);
  writer.field("experts", result.check->num_experts);
  writer.field("largest_error", result.check->largest_error);
  writer.field("largest_error_unit", "fraction of the tolerance");
  writer.field("failure", std::string_view(result.check->failure));
  writer.end_object();
}

}  // namespace

std::string to_text(const RunJob& job, const RunResult& result, bool colour) {
  return TextReport(job, result, colour).text();
}

std::string to_json(const RunJob& job, const RunResult& result) {
  JsonWriter writer(2);
  writer.begin_object();
  write_job(writer, job, result);
  write_measured(writer, job, result);
  writer.key("load");
  writer.begin_object();
  write_list(writer, "rows_per_rank", result.rows_per_rank);
  write_list(writer, "rows_per_expert", result.rows_per_expert);
  writer.end_object();
  write_check(writer, result);
  if (result.trace) write_trace(writer, *result.trace);
  writer.field("checksum", std::string_view(hex(result.checksum)));
  if (job.with_backward) {
    writer.field("grad_checksum", std::string_view(hex(result.grad_checksum)));
  }
  writer.end_object();
  return writer.text();
}

}  // namespace crossdock::cli
