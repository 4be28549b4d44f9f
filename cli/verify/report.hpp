#pragma once

#include <string>
#include <vector>

#include "cli/verify/run.hpp"

namespace crossdock::cli {

/// Strategies down, engines and ranks across, then what failed.
std::string to_text(const std::vector<VerifyResult>& results, bool colour);

std::string to_json(const std::vector<VerifyResult>& results);

/// The inverse of to_json. Throws Error(kInternal).
std::vector<VerifyResult> parse_verify_results(const std::string& json);

}  // namespace crossdock::cli
