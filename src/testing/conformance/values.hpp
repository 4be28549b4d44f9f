#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "crossdock/testing/conformance.hpp"

namespace crossdock::conformance {

/// The same number for the same arguments on every machine; similar arguments give unrelated
/// numbers.
uint64_t hash_of(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);

/// Hash of the bits of values, on top of `hash`; all NaNs count as one.
uint64_t hash_values(const std::vector<double>& values, uint64_t hash);

/// The largest relative error of one rounding to the dtype.
double unit_roundoff(DType dtype);

/// Index of token `token` of rank `rank` among all tokens.
int64_t global_token(const World& world, int rank, int64_t token);

/// The tokens of a rank as bytes: any bits, different in every token of the world.
std::vector<std::byte> token_bits(const World& world, int rank, int64_t row_bytes, uint64_t seed);

/// Values that belong to routes, [T, K, D] of a rank, representable in the world's dtype. Without
/// exact_sums, they use all mantissa bits of the dtype, every third token has slots that cancel out
/// except for what rounding in slot order leaves, and a route of weight 0 carries an infinity.
std::vector<double> route_values(const World& world, int rank, uint64_t seed);

/// The same for tokens: [T, D].
std::vector<double> token_values(const World& world, int rank, uint64_t seed);

/// routes [T, K, D] of all ranks -> rows [R, D]; NaN in pad rows, whose values must not matter.
reference::PerRank rows_of_routes(const reference::Layout& layout, int64_t D,
                                  const reference::PerRank& routes);

/// Fills in the weights of all routes; NaN for slots without a route, which must be ignored.
void make_weights(World& world);

}  // namespace crossdock::conformance
