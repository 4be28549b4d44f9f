// Case files: any text is a case or an Error.
#include <cstdint>
#include <string>

#include "cli/eval/case.hpp"
#include "cli/eval/dispatch_case.hpp"
#include "cli/eval/layer_case.hpp"
#include "crossdock/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace crossdock;
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const std::string kind = cli::kind_of_case(text);
    if (kind == "layer") {
      cli::parse_layer_case(text);
    } else if (!kind.empty()) {
      cli::parse_dispatch_case(text);
    } else {
      cli::parse_case(text);
    }
  } catch (const Error&) {
  }
  return 0;
}
