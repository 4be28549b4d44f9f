#include "cli/run/report.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>

#include "cli/json.hpp"
#include "cli/text/bars.hpp"
#include "cli/text/layout.hpp"
#include "cli/text/numbers.hpp"
#include "cli/text/table.hpp"

namespace crossdock::cli {
namespace {

constexpr int kIndent = 2;
constexpr int kLabelWidth = 12;  // with the indent: "  check     "

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
      const auto peak =
          static_cast<double>(result_.memory.window_bytes + result_.memory.pool_bytes);
      if (peak > 1.1 * static_cast<double>(result_.planned_bytes)) {
        memory += " for even routes (here one rank receives " +
                  fixed(imbalance(result_.rows_per_rank), 2) + " x the mean number of rows)";
      }
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
             paint(columns(experts, style_.width - 2 * kIndent, kIndent, style_.has_blocks),
                   Colour::kCyan, style_) +
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

Json json_of_job(const RunJob& job, const RunResult& result) {
  const MoeLayerConfig& layer = job.layer;
  Json json = {{"preset", job.preset},
               {"scaling", job.scaling},
               {"communicator", job.communicator},
               {"ranks", job.num_ranks},
               {"nodes", result.num_nodes}};
  if (!result.note.empty()) json["note"] = result.note;
  if (!result.gpu_of_rank.empty()) json["gpu_of_rank"] = result.gpu_of_rank;
  json.update(
      {{"strategy", result.strategy},
       {"auto", layer.strategy == "auto"},
       {"device", job.device},
       {"dtype", name_of(job.dtype())},
       {"activation", name_of(layer.experts.activation)},
       {"weights_in", layer.experts.weights_in == WeightsIn::kExperts ? "experts" : "combine"},
       {"overlap", layer.overlap_chunks},
       {"tokens_total", job.tokens_total},
       {"width", layer.router.width},
       {"inner", layer.experts.inner},
       {"shared_inner", layer.shared_inner},
       {"experts", layer.router.num_experts},
       {"top_k", layer.router.top_k},
       {"seed", static_cast<int64_t>(job.seed)},
       {"backward", job.with_backward}});
  return json;
}

void write_measured(const RunJob& job, const RunResult& result, Json& json) {
  json["forward_us"] = result.forward_us;
  json["backward_us"] = result.backward_us;
  json["steps_us"] = result.steps_us;
  json["ranks_us"] = Json::array();
  for (const RankTime& time : result.rank_times) {
    json["ranks_us"].push_back({{"forward", time.forward_us}, {"backward", time.backward_us}});
  }
  json["operations"] = Json::array();
  for (const OperationTime& operation : result.operations) {
    json["operations"].push_back({{"name", operation.name},
                                  {"median_us", operation.median_us},
                                  {"share", share_of(result, operation.median_us)},
                                  {"bytes", operation.bytes}});
  }
  const Traffic& traffic = result.traffic;
  json["traffic"] = {{"bytes_within_node", traffic.bytes_within_node},
                     {"bytes_between_nodes", traffic.bytes_between_nodes},
                     {"requests_posted", traffic.requests_posted},
                     {"max_requests_in_flight", traffic.max_requests_in_flight}};
  json["max_in_flight_seen"] = traffic.max_requests_in_flight;
  json["memory"] = {{"window_bytes", result.memory.window_bytes},
                    {"pool_bytes", result.memory.pool_bytes}};
  // covers forward and backward
  if (job.with_backward) json["memory"]["planned_bytes"] = result.planned_bytes;
}

Json json_of(const RunCheck& check) {
  return {{"passed", check.passed},
          {"tokens", check.num_tokens},
          {"experts", check.num_experts},
          {"largest_error", check.largest_error},
          {"largest_error_unit", "fraction of the tolerance"},
          {"failure", check.failure}};
}

}  // namespace

std::string to_text(const RunJob& job, const RunResult& result, const TextStyle& style) {
  return TextReport(job, result, style).text();
}

std::string to_json(const RunJob& job, const RunResult& result, const Origin& origin) {
  Json json = {{"schema", kRunSchema}};
  json.update(json_of(origin));
  json.update(json_of_job(job, result));
  write_measured(job, result, json);
  json["load"] = {{"rows_per_rank", result.rows_per_rank},
                  {"rows_per_expert", result.rows_per_expert},
                  {"rows_from_to", result.rows_from_to}};
  json["check"] = result.check ? json_of(*result.check) : Json();
  if (const auto& trace = result.trace) {
    json["trace"] = {
        {"file", trace->file}, {"steps", trace->num_steps}, {"steps_lost", trace->num_lost}};
  }
  json["checksum"] = hex(result.checksum);
  if (job.with_backward) json["grad_checksum"] = hex(result.grad_checksum);
  return json_text(json);
}

}  // namespace crossdock::cli
