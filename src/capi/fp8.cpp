#include "crossdock/fp8.hpp"

#include <limits>

#include "capi/configs.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"
#include "core/check.hpp"

using namespace crossdock;
using capi::guarded;
using capi::to_view;

namespace {

static_assert(static_cast<int>(Fp8Scale::kPow2) == CROSSDOCK_FP8_SCALE_POW2);
static_assert(static_cast<int>(Fp8Scale::kExact) == CROSSDOCK_FP8_SCALE_EXACT);

Fp8Scale to_scale(int32_t scale) {
  CROSSDOCK_CHECK(scale == CROSSDOCK_FP8_SCALE_POW2 || scale == CROSSDOCK_FP8_SCALE_EXACT,
                  "scale must be CROSSDOCK_FP8_SCALE_POW2 (0) or CROSSDOCK_FP8_SCALE_EXACT (1), "
                  "got ",
                  scale);
  return static_cast<Fp8Scale>(scale);
}

// Larger numbers than fp32 has become infinite, and are refused then.
float to_float32(double value) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  return value > kLargest ? std::numeric_limits<float>::infinity() : static_cast<float>(value);
}

}  // namespace

crossdock_status crossdock_quantise_rows(const crossdock_quantise_rows_args* args) {
  return guarded([&] {
    const auto given = capi::read_struct("crossdock_quantise_rows_args", args);
    quantise_rows({.x = to_view("x", given.x),
                   .values = to_view("values", given.values),
                   .scales = to_view("scales", given.scales),
                   .scale = to_scale(given.scale),
                   .amax_floor = to_float32(given.amax_floor),
                   .stream = {given.stream}});
  });
}

crossdock_status crossdock_dequantise_rows(const crossdock_dequantise_rows_args* args) {
  return guarded([&] {
    const auto given = capi::read_struct("crossdock_dequantise_rows_args", args);
    dequantise_rows({.values = to_view("values", given.values),
                     .scales = to_view("scales", given.scales),
                     .out = to_view("out", given.out),
                     .stream = {given.stream}});
  });
}
