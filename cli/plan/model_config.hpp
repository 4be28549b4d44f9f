#pragma once

#include <string>

#include "crossdock/planner.hpp"

namespace crossdock::cli {

/// The MoE layer of a model whose config.json, with Hugging Face's keys, is at `path`: the file or
/// its folder. Throws Error(kInvalidArgument), which names the keys that are missing.
struct ModelConfig {
  std::string name;  // "model_type", else the path
  int64_t width = 0;
  int64_t inner = 0;
  int64_t num_experts = 0;
  int64_t top_k = 0;
};
ModelConfig read_model_config(const std::string& path);

}  // namespace crossdock::cli
