#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "crossdock/activation.hpp"
#include "crossdock/error.hpp"

namespace crossdock {

/// The sizes of one MoE layer of a published model.
struct ModelPreset {
  std::string_view name;
  int64_t width = 0;        // D
  int64_t inner = 0;        // F of one routed expert
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  Activation activation = Activation::kSwiglu;
  int64_t shared_inner = 0;  // F of the shared experts together; 0: none
};

inline constexpr std::array kModelPresets = {
    ModelPreset{"qwen3-30b-a3b", 2048, 768, 128, 8, Activation::kSwiglu, 0},
    ModelPreset{"deepseek-v3", 7168, 2048, 256, 8, Activation::kSwiglu, 2048},
    ModelPreset{"gpt-oss-20b", 2880, 2880, 32, 4, Activation::kClampedSwiglu, 0},
    ModelPreset{"mixtral-8x7b", 4096, 14336, 8, 2, Activation::kSwiglu, 0},
};

/// Throws Error(kInvalidArgument) that lists the names.
inline const ModelPreset& find_model(std::string_view name) {
  std::string known;
  for (const ModelPreset& preset : kModelPresets) {
    if (preset.name == name) return preset;
    known.append(known.empty() ? "" : ", ").append(preset.name);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "model must be one of " + known + "; got \"" + std::string(name) + "\"");
}

}  // namespace crossdock
