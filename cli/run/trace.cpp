#include "cli/run/trace.hpp"

#include <algorithm>
#include <string_view>

#include "cli/json.hpp"
#include "cli/output_file.hpp"

namespace crossdock::cli {
namespace {

constexpr int64_t kMaxTracedEvents = 65536;  // per rank: about 2000 steps

constexpr int kTracksPerRank = 3;  // exchange, experts and shared experts may run at the same time

// Events of a track must nest. If two events overlap without nesting, the later one goes to another
// track.
class Tracks {
 public:
  int place(const Event& event) {
    for (int track = 0; track < kTracksPerRank; ++track) {
      std::vector<int64_t>& open = ends_[track];
      while (!open.empty() && open.back() <= event.begin_ns) open.pop_back();
      if (open.empty() || event.end_ns <= open.back()) {
        open.push_back(event.end_ns);
        return track;
      }
    }
    return kTracksPerRank - 1;
  }

 private:
  std::vector<int64_t> ends_[kTracksPerRank];  // of open events, outermost first
};

Json name_of_track(int track, const std::string& name) {
  return {
      {"ph", "M"}, {"pid", 0}, {"tid", track}, {"name", "thread_name"}, {"args", {{"name", name}}}};
}

Json json_of(const Event& event, int track) {
  const std::string operation = event.operation;
  return {{"ph", "X"},
          {"pid", 0},
          {"tid", track},
          {"name", *event.phase == '\0' ? operation : operation + " " + event.phase},
          {"cat", operation},
          {"ts", static_cast<double>(event.begin_ns) * 1e-3},
          {"dur", static_cast<double>(event.end_ns - event.begin_ns) * 1e-3},
          {"args",
           {{"sequence", static_cast<int64_t>(event.sequence)},
            {"bytes", event.bytes},
            {"peers", event.peers.count}}}};
}

// The entries of one rank, without the brackets of the array.
std::string entries_of(const Group& group, std::vector<Event> events) {
  std::erase_if(events, [](const Event& event) { return event.end_ns == 0; });
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
  });
  const int first = group.rank() * kTracksPerRank;
  const std::string name = "rank " + std::to_string(group.rank());
  Json entries = Json::array();
  Tracks tracks;
  int num_named = 0;
  for (const Event& event : events) {
    const int track = tracks.place(event);
    for (; num_named <= track; ++num_named) {
      entries.push_back(
          name_of_track(first + num_named, num_named == 0 ? name : name + " (overlapped)"));
    }
    entries.push_back(json_of(event, first + track));
  }
  const std::string text = json_text(entries, 1);
  return text.substr(1, text.size() - 2);
}

// Joins the entries of all ranks and counts the steps that some rank dropped.
std::string join(const Agreement& all, int num_ranks, TraceSummary& summary) {
  std::string entries;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto body = all.body(rank);
    const std::string_view text(reinterpret_cast<const char*>(body.data()), body.size());
    const size_t end = text.find('\n');
    summary.num_lost = std::max(summary.num_lost, std::stol(std::string(text.substr(0, end))));
    entries.append(rank > 0 ? "," : "").append(text.substr(end + 1));
  }
  return entries;
}

}  // namespace

void TraceLog::add_step(std::span<const Event> recorded, bool is_whole) {
  const auto is_new = [this](const Event& event) { return event.begin_ns > newest_ns_; };
  const auto first = std::ranges::find_if(recorded, is_new);
  steps_.emplace_back(first, recorded.end());
  num_events_ += std::ssize(steps_.back());
  for (const Event& event : steps_.back()) newest_ns_ = std::max(newest_ns_, event.begin_ns);
  ++num_steps_;
  if (!is_whole) num_lost_ = num_steps_;
  while (num_events_ > kMaxTracedEvents && steps_.size() > 1) {
    num_events_ -= std::ssize(steps_.front());
    steps_.pop_front();
  }
  num_lost_ = std::max(num_lost_, num_steps_ - std::ssize(steps_));
}

std::vector<Event> TraceLog::events() const {
  std::vector<Event> all;
  for (const std::vector<Event>& step : steps_) all.insert(all.end(), step.begin(), step.end());
  return all;
}

TraceSummary write_trace(Group& group, const TraceLog& log, const std::string& file) {
  const std::string own = std::to_string(log.num_lost()) + "\n" + entries_of(group, log.events());
  const Agreement all =
      group.agree({.operation = "run_trace", .body = std::as_bytes(std::span(own))});
  TraceSummary summary{.file = file, .num_steps = 0, .num_lost = 0};
  const std::string entries = join(all, group.size(), summary);
  summary.num_steps = log.num_steps() - summary.num_lost;
  std::optional<Error> failure;
  if (group.rank() == 0) {
    const Json steps = {{"steps", summary.num_steps},
                        {"steps_lost", summary.num_lost},
                        {"first_step", summary.num_lost + 1}};  // counted from 1
    try {
      write_file(kTrace, file,
                 "{\"displayTimeUnit\":\"ms\",\"otherData\":" + json_text(steps, 0) +
                     ",\"traceEvents\":[" + entries + "]}\n");
    } catch (const Error& error) {
      failure = error;
    }
  }
  group.agree({.operation = "run_trace", .refusal = failure ? &*failure : nullptr});
  return summary;
}

}  // namespace crossdock::cli
