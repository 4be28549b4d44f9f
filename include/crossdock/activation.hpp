#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "crossdock/error.hpp"

namespace crossdock {

/// What stands between the two matrices of an expert.
enum class Activation : uint8_t {
  kSwiglu,         // silu(gate) * linear
  kClampedSwiglu,  // gate at most limit, linear in [-limit, limit]:
                   // gate * sigmoid(1.702 * gate) * (linear + 1)
  kGeglu,          // gelu(gate) * linear
  kGelu,           // by erf
  kGeluTanh,       // the tanh approximation
  kSquaredRelu     // max(h, 0)^2
};

inline constexpr std::array<std::string_view, 6> kActivationNames = {
    "swiglu", "clamped_swiglu", "geglu", "gelu", "gelu_tanh", "squared_relu"};

/// Gated: W1 is [2F, D], gate and linear; otherwise [F, D].
constexpr bool is_gated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kClampedSwiglu ||
         activation == Activation::kGeglu;
}

constexpr std::string_view name_of(Activation activation) {
  return kActivationNames[static_cast<size_t>(activation)];
}

/// The inverse of name_of; throws Error(kInvalidArgument) that lists the names.
inline Activation parse_activation(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kActivationNames.size(); ++i) {
    if (kActivationNames[i] == name) return static_cast<Activation>(i);
    known.append(i == 0 ? "" : ", ").append(kActivationNames[i]);
  }
  throw Error(ErrorCode::kInvalidArgument,
              "activation must be one of " + known + "; got \"" + std::string(name) + "\"");
}

}  // namespace crossdock
