#include "cli/origin.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>
#include <string_view>

#include "cli/machine.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

// ISO 8601, with the offset of the local time: "+00:00".
std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 40> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S%z", &local);
  std::string result = text.data();
  return result.insert(result.size() - 2, ":");
}

bool is_plain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-./:,=+@%").find(c) != std::string_view::npos;
}

// Quoted if a shell would otherwise change it.
std::string shell_word(const std::string& word) {
  if (!word.empty() && std::ranges::all_of(word, is_plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace

Origin describe_origin(const std::vector<std::string>& words) {
  const BuildDescription build = describe_build();
  const Machine machine = describe_machine();
  Origin origin{.version = std::string(build.version),
                .build = std::string(build.build_type) + " build by " + std::string(build.compiler),
                .host = host_name(),
                .num_cores = machine.num_cores,
                .num_usable_cores = machine.num_usable_cores,
                .time = time_now(),
                .command = "crossdock"};
  if (!build.revision.empty()) origin.version += " (" + std::string(build.revision) + ")";
  if (!build.sanitizers.empty()) origin.build += ", sanitizers: " + std::string(build.sanitizers);
  for (const std::string& word : words) origin.command += " " + shell_word(word);
  return origin;
}

Json json_of(const Origin& origin) {
  return {{"version", origin.version},
          {"build", origin.build},
          {"host", origin.host},
          {"cores", origin.num_cores},
          {"usable_cores", origin.num_usable_cores},
          {"time", origin.time},
          {"command", origin.command}};
}

}  // namespace crossdock::cli
