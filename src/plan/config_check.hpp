#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "crossdock/plan.hpp"

namespace crossdock {

/// Throws Error(kInvalidArgument) if the configuration is invalid for this number of ranks.
void check_config(const DispatchConfig& config, int num_ranks);

/// Whether the bytes of this many rows (the product of num_rows) fit in int64 for any dtype.
bool row_bytes_fit_int64(std::initializer_list<int64_t> num_rows, const DispatchConfig& config);

/// The configuration as "key=value;key=value", for Proposal::config. Without candidates their key
/// is omitted.
std::string config_text(const DispatchConfig& config, std::string_view strategy_name,
                        std::string_view candidates = {});

}  // namespace crossdock
