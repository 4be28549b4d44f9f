#include "comm/agreement/flight_report.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string_view>

#include "core/check.hpp"
#include "core/descriptor.hpp"
#include "core/process.hpp"
#include "core/text.hpp"

namespace crossdock::comm {
namespace {

// Bytes that are not UTF-8 (a file name in a message, a truncated text) become U+FFFD.
std::string json_quoted(std::string_view text) {
  std::string result = "\"";
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    const char c = text[0];
    if (length == 0) {
      result += "\xef\xbf\xbd";
    } else if (c == '"' || c == '\\') {
      result.append(1, '\\').append(1, c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      result += escape.data();
    } else {
      result.append(text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result.append("\"");
}

std::string json_of(const EventPeers& peers) {
  std::string text = concat(",\"num_peers\":", peers.count, ",\"peers\":[");
  const char* separator = "";
  for (int rank = 0; rank < 64; ++rank) {
    if ((peers.first_64 >> rank & 1) == 0) continue;
    text += concat(separator, rank);
    separator = ",";
  }
  return text.append("]");
}

std::string json_of(const Event& event) {
  std::string text = concat("{\"operation\":", json_quoted(event.operation));
  if (*event.phase != '\0') text += concat(",\"phase\":", json_quoted(event.phase));
  text += concat(",\"sequence\":", event.sequence, ",\"bytes\":", event.bytes,
                 ",\"begin_ns\":", event.begin_ns);
  if (event.end_ns != 0) text += concat(",\"end_ns\":", event.end_ns);
  if (event.peers.count > 0) text += json_of(event.peers);
  return text.append("}");
}

// The report on one rank, written by itself or by `writer`.
struct Line {
  int rank;
  int writer;
  std::string message;
  ErrorContext context;
  std::vector<Event> events;
};

std::string json_of(Group& group, const Line& line) {
  std::string text =
      concat("{\"rank\":", line.rank, ",\"size\":", group.size(),
             ",\"engine\":", json_quoted(group.communicator().name()),
             ",\"error\":", json_quoted(line.message), ",\"culprit\":", line.context.culprit,
             ",\"operation\":", json_quoted(line.context.operation),
             ",\"sequence\":", line.context.sequence);
  if (line.writer != line.rank) text += concat(",\"written_by\":", line.writer);
  if (const std::string note = group.communicator().note(); !note.empty()) {
    text += concat(",\"note\":", json_quoted(note));
  }
  text += ",\"events\":[";
  const char* separator = "";
  for (const Event& event : line.events) {
    text.append(separator).append(json_of(event));
    separator = ",";
  }
  return text.append("]}\n");
}

void append(const std::string& file, const std::string& text) {
  // Non-blocking: a pipe without a reader must not delay a rank that has failed.
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
  const WriteSignalBlock no_signals;
  const Descriptor opened(open(file.c_str(), kFlags, 0644));
  if (!opened.is_open()) return;
  // One write, so lines appended by several ranks at once are not interleaved.
  [[maybe_unused]] const ssize_t written = write(opened.number(), text.data(), text.size());
}

}  // namespace

std::string default_report_file() {
  return environment_variable("CROSSDOCK_REPORT");
}

void PeerEvents::describe(EventRecorder& recorder, RendezvousHeader& header) {
  if (recorder.ring() == nullptr || recorder.ring()->descriptor() < 0) return;
  header.events_process = getpid();
  header.events_descriptor = recorder.ring()->descriptor();
}

void PeerEvents::open(std::span<const RendezvousHeader> headers, const Communicator& communicator) {
  if (!rings_.empty()) return;
  const std::vector<int>& nodes = communicator.topology().node_of_rank;
  const auto own = static_cast<size_t>(communicator.rank());
  rings_.resize(headers.size());
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const RendezvousHeader& header = headers[rank];
    if (rank == own || nodes[rank] != nodes[own] || header.events_descriptor < 0) continue;
    rings_[rank] = detail::EventRing::open(header.events_process, header.events_descriptor);
  }
}

detail::EventRing* PeerEvents::of(int rank) {
  const auto r = static_cast<size_t>(rank);
  return rank >= 0 && r < rings_.size() ? rings_[r].get() : nullptr;
}

void write_flight_report(Group& group, const std::string& message, const ErrorContext& context) {
  const std::string& file = group.options().report_file;
  if (file.empty()) return;
  Line line{.rank = group.rank(),
            .writer = group.rank(),
            .message = message,
            .context = context,
            .events = group.recorder().events()};
  detail::EventRing* own = group.recorder().ring();
  if (own == nullptr || own->claim()) append(file, json_of(group, line));
  detail::EventRing* of_culprit = peer_events_of(group).of(context.culprit);
  if (of_culprit == nullptr || !of_culprit->claim()) return;
  line.rank = context.culprit;
  line.events = of_culprit->events();
  append(file, json_of(group, line));
}

}  // namespace crossdock::comm
