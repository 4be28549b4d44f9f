#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "crossdock/plan.hpp"

namespace crossdock {

/// Throws Error(kInvalidArgument) that names the rule a configuration breaks for P ranks.
void check_config(const DispatchConfig& config, int num_ranks);

/// Whether the bytes of so many rows (a product) can be counted, whatever their dtype.
bool are_countable(std::initializer_list<int64_t> num_rows, const DispatchConfig& config);

/// The configuration as "key=value;key=value", for the ranks to compare.
std::string config_text(const DispatchConfig& config, std::string_view strategy_name);

}  // namespace crossdock
