#include "run_trace.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "crossdock/recorder.hpp"
#include "json_writer.hpp"

namespace crossdock::cli {
namespace {

constexpr int kTracksPerRank = 3;  // exchange, experts and shared experts at the same time

// Events of a track must nest. Of two that overlap without nesting the later goes to another
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
  std::vector<int64_t> ends_[kTracksPerRank];  // of the events that are open, outermost first
};

void write_name(JsonWriter& writer, int track, const std::string& name) {
  writer.begin_object();
  writer.field("ph", "M");
  writer.field("pid", 0);
  writer.field("tid", track);
  writer.field("name", "thread_name");
  writer.key("args");
  writer.begin_object();
  writer.field("name", name);
  writer.end_object();
  writer.end_object();
}

void write_event(JsonWriter& writer, const Event& event, int track) {
  writer.begin_object();
  writer.field("ph", "X");
  writer.field("pid", 0);
  writer.field("tid", track);
  writer.field("name", *event.phase == '\0' ? std::string(event.operation)
                                            : std::string(event.operation) + " " + event.phase);
  writer.field("cat", event.operation);
  writer.field("ts", static_cast<double>(event.begin_ns) * 1e-3);
  writer.field("dur", static_cast<double>(event.end_ns - event.begin_ns) * 1e-3);
  writer.key("args");
  writer.begin_object();
  writer.field("sequence", static_cast<int64_t>(event.sequence));
  writer.field("bytes", event.bytes);
  writer.field("peers", event.peers.count);
  writer.end_object();
  writer.end_object();
}

// What one rank adds: entries of the array, without its brackets.
std::string entries_of(const Group& group, std::vector<Event> events) {
  std::erase_if(events, [](const Event& event) { return event.end_ns == 0; });
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns;
  });
  const int first = group.rank() * kTracksPerRank;
  const std::string name = "rank " + std::to_string(group.rank());
  JsonWriter writer(1);
  writer.begin_array();
  Tracks tracks;
  int num_named = 0;
  for (const Event& event : events) {
    const int track = tracks.place(event);
    for (; num_named <= track; ++num_named) {
      write_name(writer, first + num_named, num_named == 0 ? name : name + " (overlapped)");
    }
    write_event(writer, event, first + track);
  }
  writer.end_array();
  const std::string& text = writer.text();
  return text.substr(1, text.size() - 2);
}

std::string temporary_name(const std::string& file) {
  return file + ".part";
}

Error cannot_write(const std::string& file) {
  return {ErrorCode::kInvalidArgument,
          "cannot write the trace to " + file + ": " + std::strerror(errno)};
}

std::optional<Error> try_write(const std::string& file, const std::string& text) {
  const std::string temporary = temporary_name(file);
  std::ofstream out(temporary);
  out << text;
  out.close();
  if (!out || std::rename(temporary.c_str(), file.c_str()) != 0) {
    Error error = cannot_write(file);
    std::remove(temporary.c_str());
    return error;
  }
  return std::nullopt;
}

}  // namespace

void check_trace_file(const std::string& file) {
  const std::string temporary = temporary_name(file);
  if (std::filesystem::is_directory(file)) errno = EISDIR;
  if (std::filesystem::is_directory(file) || !std::ofstream(temporary)) throw cannot_write(file);
  std::remove(temporary.c_str());
}

void write_trace(Group& group, const std::string& file) {
  const std::string own = entries_of(group, group.recorder().events());
  const Agreement all =
      group.agree({.operation = "run_trace", .body = std::as_bytes(std::span(own))});
  std::optional<Error> failure;
  if (group.rank() == 0) {
    std::string text = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto body = all.body(rank);
      text.append(rank > 0 ? "," : "")
          .append(reinterpret_cast<const char*>(body.data()), body.size());
    }
    failure = try_write(file, text.append("]}\n"));
  }
  group.agree({.operation = "run_trace", .rejection = failure ? &*failure : nullptr});
}

}  // namespace crossdock::cli
