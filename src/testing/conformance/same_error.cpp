#include "testing/conformance/same_error.hpp"

#include "core/check.hpp"
#include "testing/conformance/trial.hpp"
#include "testing/conformance/worlds.hpp"

namespace crossdock::conformance {

void expect_same_error(Group& group, const StrategyFactory& strategy,
                       const ErrorExpectation& expected, const std::function<void()>& body,
                       Findings& findings) {
  const auto find = [&](const auto&... parts) {
    findings.push_back(concat("rank ", group.rank(), ": ", parts...));
  };
  std::string message;
  try {
    body();
    find("no error was thrown");
  } catch (const Error& error) {
    message = error.what();
    if (error.code() != expected.code) {
      find("the error is \"", name_of(error.code()), "\", must be \"", name_of(expected.code),
           "\": ", message);
    }
    for (const std::string& word : expected.words) {
      if (message.find(word) == std::string::npos) find("no \"", word, "\" in: ", message);
    }
  }
  group.check();  // an input error must not have poisoned it
  const Agreement all =
      group.agree({.operation = "conformance", .body = std::as_bytes(std::span(message))});
  for (int r = 0; r < group.size(); ++r) {
    const auto bytes = all.body(r);
    const std::string theirs(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (theirs != message) find("rank ", r, " has another message: ", theirs, "; here: ", message);
  }
  const World world =
      make_small_world(std::vector<int64_t>(static_cast<size_t>(group.size()), 3), 4, 1);
  Dispatcher dispatcher(group, world.config, strategy());
  Trial trial(dispatcher, world, 1, findings);
  trial.dispatch();
  trial.combine();
}

}  // namespace crossdock::conformance
