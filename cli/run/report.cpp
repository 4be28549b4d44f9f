#include "cli/run/report.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>
#include <set>
#include <sstream>

#include "cli/json_writer.hpp"
#include "cli/text/bars.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

constexpr int kIndent = 2;
constexpr int kLabelWidth = 12;  // with the indent: "  check     "

std::string hex(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

double total_us(const RunResult& result) {
  return result.forward_us + result.backward_us;
}

double operations_us(const RunResult& result) {
  double sum = 0;
  for (const OperationTime& operation : result.operations) sum += operation.median_us;
  return sum;
}

// A share of the step, or of the sum of all operations if that is longer, as it can be if
// operations overlap or different ranks are slow.
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

// ", on 1 GPU"; ", on 4 GPUs: 0 1 2 3 0 1 2 3", by rank. Nothing on the CPU.
std::string gpus_text(const std::vector<int>& gpu_of_rank) {
  const std::set<int> gpus(gpu_of_rank.begin(), gpu_of_rank.end());
  if (gpus.empty()) return "";
  std::string text = ", on " + counted(std::ssize(gpus), "GPU");
  if (gpus.size() == 1) return text;
  text += ":";
  for (const int gpu : gpu_of_rank) text += " " + std::to_string(gpu);
  return text;
}

class TextReport {
 public:
  TextReport(const RunJob& job, const RunResult& result, const TextStyle& style)
      : job_(job), result_(result), style_(style) {}

  std::string text() {
    write_head();
    write_operations();
    write_totals();
    write_load();
    write_check();
    write_trace_note();
    return text_;
  }

 private:
  void write_line(const std::string& line, int indent) {
    text_ += wrap(line, style_.width, indent) + "\n";
  }

  void write_labelled(std::string label, const std::string& words) {
    label.resize(kLabelWidth - kIndent, ' ');
    write_line(std::string(kIndent, ' ') + label + words, kLabelWidth);
  }

  std::string title(const char* words) const {
    return std::string(kIndent, ' ') + paint(words, Colour::kBold, style_);
  }

  void write_head() {
    const MoeLayerConfig& layer = job_.layer;
    if (!job_.preset.empty()) {
      write_line(job_.preset + (job_.scaling.empty() ? ", full size" : ", " + job_.scaling),
                 kIndent);
    }
    std::ostringstream line;
    line << counted(job_.num_ranks, "rank") << " (" << job_.communicator << ", "
         << counted(result_.num_nodes, "node") << gpus_text(result_.gpu_of_rank) << "), "
         << result_.strategy << (layer.strategy == "auto" ? " (auto)" : "") << ", "
         << name_of(job_.dtype()) << "; " << counted(job_.tokens_total, "token") << " of width "
         << layer.router.width << ", " << layer.router.top_k << " of " << layer.router.num_experts
         << " experts each, inner width " << layer.experts.inner;
    if (layer.shared_inner > 0) line << ", shared experts " << layer.shared_inner;
    if (layer.overlap_chunks > 1) {
      line << "; dispatch in up to " << layer.overlap_chunks << " chunks";
    }
    write_line(line.str(), kIndent);
    if (!result_.note.empty()) write_line("note: " + result_.note, kIndent);
    text_ += "\n";
  }

  void write_operations() {
    Table table(style_,
                {{"step", Align::kLeft}, {"time"}, {"share"}, {"bytes"}, {"", Align::kLeft}});
    const auto add = [&](const std::string& name, double us, int64_t bytes) {
      const double share = share_of(result_, us);
      table.add_row({name, time_text(us * 1e-6), fixed(100.0 * share, 1) + " %",
                     bytes > 0 ? bytes_text(static_cast<double>(bytes)) : "", Cell::bar(share)});
    };
    for (const OperationTime& operation : result_.operations) {
      add(operation.name, operation.median_us, operation.bytes);
    }
    const double waited_us = total_us(result_) - operations_us(result_);
    if (waited_us > 0) {
      add(job_.is_on_gpus() ? "waiting for the GPU" : "agreeing, waiting", waited_us, 0);
    }
    text_ += table.text();
  }

  void write_totals() {
    std::string times = "  forward " + time_text(result_.forward_us * 1e-6);
    if (job_.with_backward) times += ", backward " + time_text(result_.backward_us * 1e-6);
    write_line(times + ": medians of " + counted(job_.num_steps, "step") +
                   "; each line shows the slowest rank",
               kIndent);
    if (job_.is_on_gpus()) {
      write_line("  steps are queued, and their times are those of queueing", kIndent);
    }
    const Traffic& traffic = result_.traffic;
    std::string messages =
        "  sent by the communicator: " +
        bytes_text(static_cast<double>(traffic.bytes_within_node)) + " within nodes, " +
        bytes_text(static_cast<double>(traffic.bytes_between_nodes)) + " between nodes";
    if (traffic.requests_posted > 0) {
      messages += "; " + counted(traffic.requests_posted, "request") + ", at most " +
                  std::to_string(traffic.max_requests_in_flight) + " in flight per rank";
    }
    write_line(messages, kIndent);
    if (!job_.is_on_gpus()) write_memory();
    text_ += "\n";
  }

  void write_memory() {
    std::string memory =
        "  peak memory per rank: " +
        bytes_text(static_cast<double>(result_.memory.window_bytes + result_.memory.pool_bytes));
    if (job_.with_backward) {
      memory += ", planned " + bytes_text(static_cast<double>(result_.planned_bytes));
    }
    write_line(memory, kIndent);
  }

  void write_load() {
    const std::vector<int64_t>& ranks = result_.rows_per_rank;
    const std::vector<int64_t>& experts = result_.rows_per_expert;
    const auto most = static_cast<double>(std::max<int64_t>(1, *std::ranges::max_element(ranks)));
    text_ += title("rows per rank") + ", largest " + fixed(imbalance(ranks), 2) + " x the mean\n";
    Table table(style_, {{"", Align::kRight, 4}, {"", Align::kRight, 8}, {"", Align::kLeft}});
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      table.add_row({std::to_string(rank), std::to_string(ranks[rank]),
                     Cell::bar(static_cast<double>(ranks[rank]) / most)});
    }
    text_ += table.text();
    text_ += title("rows per expert") + ", largest " + fixed(imbalance(experts), 2) +
             " x the mean (" + std::to_string(*std::ranges::min_element(experts)) + " to " +
             std::to_string(*std::ranges::max_element(experts)) + ")\n" +
             std::string(kIndent, ' ') +
             paint(columns(experts, style_.width - 2 * kIndent, kIndent), Colour::kCyan, style_) +
             "\n\n";
  }

  void write_check() {
    if (const auto& check = result_.check; !check) {
      write_labelled("check", "skipped");
    } else if (check->passed) {
      std::string words =
          paint("passed", Colour::kGreen, style_) + ": " + counted(check->num_tokens, "token");
      if (job_.with_backward) {
        words += " and the weights of " + counted(check->num_experts, "expert");
      }
      write_labelled("check", words + " against the fp64 reference; largest error " +
                                  fixed(check->largest_error, 3) + " of the tolerance");
    } else {
      write_labelled("check", paint("FAILED", Colour::kRed, style_) + ": " + check->failure);
    }
    std::string sums = hex(result_.checksum) + " (outputs)";
    if (job_.with_backward) sums += ", " + hex(result_.grad_checksum) + " (gradients)";
    write_labelled("checksum", sums);
  }

  void write_trace_note() {
    if (!result_.trace) return;
    const TraceSummary& trace = *result_.trace;
    if (trace.num_lost == 0) {
      write_labelled("trace", trace.file + ": " + (trace.num_steps == 1 ? "" : "all ") +
                                  counted(trace.num_steps, "step"));
    } else {
      write_labelled("trace", trace.file + ": the last " + std::to_string(trace.num_steps) +
                                  " of " + counted(job_.num_steps, "step") + "; the first " +
                                  std::to_string(trace.num_lost) +
                                  " are missing or incomplete because the trace is full");
    }
  }

  const RunJob& job_;
  const RunResult& result_;
  TextStyle style_;
  std::string text_;
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
  writer.field("communicator", std::string_view(job.communicator));
  writer.field("ranks", job.num_ranks);
  writer.field("nodes", result.num_nodes);
  if (!result.note.empty()) writer.field("note", std::string_view(result.note));
  if (!result.gpu_of_rank.empty()) write_list(writer, "gpu_of_rank", result.gpu_of_rank);
  writer.field("strategy", std::string_view(result.strategy));
  writer.field("auto", layer.strategy == "auto");
  writer.field("device", std::string_view(job.device));
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
  if (job.with_backward)
    writer.field("planned_bytes", result.planned_bytes);  // covers forward and backward
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

std::string to_text(const RunJob& job, const RunResult& result, const TextStyle& style) {
  return TextReport(job, result, style).text();
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
