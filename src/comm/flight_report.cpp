#include "comm/flight_report.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "core/check.hpp"

namespace crossdock::comm {
namespace {

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result.append(1, '\\').append(1, c);
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      result += escape.data();
    } else {
      result += c;
    }
  }
  return result.append("\"");
}

std::string json_of(const Event& event) {
  std::string text = concat("{\"operation\":", quoted(event.operation));
  if (*event.phase != '\0') text += concat(",\"phase\":", quoted(event.phase));
  text += concat(",\"sequence\":", event.sequence, ",\"bytes\":", event.bytes,
                 ",\"begin_ns\":", event.begin_ns);
  if (event.end_ns != 0) text += concat(",\"end_ns\":", event.end_ns);
  return text.append("}");
}

}  // namespace

std::string default_report_file() {
  const char* name = std::getenv("CROSSDOCK_REPORT");
  return name != nullptr ? name : "";
}

void write_flight_report(Group& group, const std::string& message, const ErrorContext& context) {
  const std::string& file = group.options().report_file;
  if (file.empty()) return;
  std::string line =
      concat("{\"rank\":", group.rank(), ",\"size\":", group.size(),
             ",\"engine\":", quoted(group.communicator().name()), ",\"error\":", quoted(message),
             ",\"culprit\":", context.culprit, ",\"operation\":", quoted(context.operation),
             ",\"sequence\":", context.sequence, ",\"events\":[");
  const char* separator = "";
  for (const Event& event : group.recorder().events()) {
    line.append(separator).append(json_of(event));
    separator = ",";
  }
  line += "]}\n";
  const int descriptor = open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor < 0) return;
  // One write: lines of ranks that append at the same time stay whole.
  [[maybe_unused]] const ssize_t written = write(descriptor, line.data(), line.size());
  close(descriptor);
}

}  // namespace crossdock::comm
