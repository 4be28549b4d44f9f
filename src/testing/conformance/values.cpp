#include "testing/conformance/values.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace crossdock::conformance {
namespace {

// Fraction bits of the mantissa.
int mantissa_bits(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 52;
    case DType::kF32:
      return 23;
    case DType::kF16:
      return 10;
    case DType::kBF16:
      return 7;
    default:
      return 3;
  }
}

// A value that uses all mantissa bits of the dtype, magnitude in [1/8, 8).
double full_value(DType dtype, uint64_t hash) {
  constexpr int kBits = 52;                         // of a double
  constexpr uint64_t kSmallestExponent = 1023 - 3;  // of 1/8
  const int bits = mantissa_bits(dtype);
  const uint64_t mantissa = (hash >> (64 - bits)) << (kBits - bits);
  const uint64_t exponent = (kSmallestExponent + hash % 6) << kBits;
  const uint64_t sign = (hash >> 8) % 2 << 63;
  return std::bit_cast<double>(sign | exponent | mantissa);
}

// Multiples of 1/4 up to 3 3/4: every sum of them, times such weights, is exact in fp32.
double short_value(uint64_t hash) {
  return (static_cast<double>(hash % 31) - 15.0) / 4.0;
}

double value_of(const World& world, uint64_t hash) {
  return world.exact_sums ? short_value(hash) : full_value(world.dtype, hash);
}

bool has_cancelling_slots(const World& world, uint64_t token) {
  return !world.exact_sums && world.num_slots() >= 3 && token % 3 == 0;
}

bool has_zero_weight(const World& world, uint64_t token, int64_t slot) {
  return !world.exact_sums && token % 5 == 4 && slot == 0 && !has_cancelling_slots(world, token);
}

// big, small, -big: sums to 0 in slot order, as rounding loses `small`; otherwise to `small`.
double cancelling_value(DType dtype, uint64_t hash, int64_t slot) {
  const double value = full_value(dtype, hash);
  const int exponent = std::ilogb(value);
  if (slot == 1) return std::ldexp(value, (dtype == DType::kF64 ? -44 : -14) - exponent);
  const double big = std::ldexp(value, 12 + static_cast<int>(hash % 3) - exponent);
  return slot == 0 ? big : -big;
}

// The largest n for which sums of all slots' short values, each times a weight of up to n quarters,
// are whole numbers of sixteenths that bf16 holds.
uint64_t short_weights(const World& world) {
  constexpr int64_t kLargestValue = 15;
  constexpr int64_t kExactInBf16 = 256;
  return static_cast<uint64_t>(
      std::max<int64_t>(1, kExactInBf16 / (kLargestValue * world.num_slots())));
}

// Weights whose products with short values have exact sums, even if partial sums are rounded.
double short_weight(const World& world, uint64_t hash) {
  if (world.config.partial_sums != PartialSums::kRowType) {
    return static_cast<double>(hash % 8 + 1) / 8.0;
  }
  return static_cast<double>(hash % short_weights(world) + 1) / 4.0;
}

}  // namespace

double unit_roundoff(DType dtype) {
  return std::ldexp(1.0, -mantissa_bits(dtype) - 1);
}

uint64_t hash_of(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t hash = 0x9e3779b97f4a7c15U;
  for (const uint64_t part : {a, b, c, d}) {
    hash = (hash ^ part) * 0xbf58476d1ce4e5b9U;
    hash = (hash ^ (hash >> 31)) * 0x94d049bb133111ebU;
    hash ^= hash >> 29;
  }
  return hash;
}

uint64_t hash_values(const std::vector<double>& values, uint64_t hash) {
  hash = hash_of(hash, values.size());
  for (const double value : values) {
    const uint64_t bits = std::isnan(value) ? ~uint64_t{0} : std::bit_cast<uint64_t>(value);
    hash = (hash ^ bits) * 0x9e3779b97f4a7c15U;
    hash ^= hash >> 32;
  }
  return hash;
}

int64_t global_token(const World& world, int rank, int64_t token) {
  for (int r = 0; r < rank; ++r) token += world.ranks[static_cast<size_t>(r)].T;
  return token;
}

std::vector<std::byte> token_bits(const World& world, int rank, int64_t row_bytes, uint64_t seed) {
  std::vector<std::byte> bytes;
  const int64_t T = world.ranks[static_cast<size_t>(rank)].T;
  bytes.reserve(static_cast<size_t>(T * row_bytes));
  uint64_t hash = 0;  // the next 8 bytes
  for (int64_t t = 0; t < T; ++t) {
    const auto id = static_cast<uint64_t>(global_token(world, rank, t));
    for (int64_t i = 0; i < row_bytes; ++i) {
      // The first bytes are the token's number, so that all tokens differ.
      if (i % 8 == 0) hash = hash_of(seed, id, static_cast<uint64_t>(i));
      const uint64_t bits = i < 2 ? (id >> (8 * i)) ^ seed : hash >> (8 * (i % 8));
      bytes.push_back(static_cast<std::byte>(bits));
    }
  }
  return bytes;
}

std::vector<double> route_values(const World& world, int rank, uint64_t seed) {
  std::vector<double> values;
  const int64_t T = world.ranks[static_cast<size_t>(rank)].T;
  for (int64_t t = 0; t < T; ++t) {
    const auto id = static_cast<uint64_t>(global_token(world, rank, t));
    for (int64_t k = 0; k < world.num_slots(); ++k) {
      for (int64_t d = 0; d < world.config.width; ++d) {
        const auto column = static_cast<uint64_t>(d);
        if (has_cancelling_slots(world, id) && k < 3) {
          values.push_back(cancelling_value(world.dtype, hash_of(seed, id, 3, column), k));
        } else if (has_zero_weight(world, id, k) && d == 0) {
          values.push_back(std::numeric_limits<double>::infinity());
        } else {
          values.push_back(value_of(world, hash_of(seed, id, static_cast<uint64_t>(k), column)));
        }
      }
    }
  }
  return values;
}

std::vector<double> token_values(const World& world, int rank, uint64_t seed) {
  std::vector<double> values;
  const int64_t T = world.ranks[static_cast<size_t>(rank)].T;
  for (int64_t t = 0; t < T; ++t) {
    const auto id = static_cast<uint64_t>(global_token(world, rank, t));
    for (int64_t d = 0; d < world.config.width; ++d) {
      values.push_back(value_of(world, hash_of(seed, id, ~uint64_t{0}, static_cast<uint64_t>(d))));
    }
  }
  return values;
}

reference::PerRank rows_of_routes(const reference::Layout& layout, int64_t D,
                                  const reference::PerRank& routes) {
  reference::PerRank rows;
  for (const reference::Receiver& receiver : layout.receivers) {
    std::vector<double> made;
    for (const reference::RowSource& source : receiver.sources) {
      if (source.rank < 0) {
        made.insert(made.end(), static_cast<size_t>(D), std::numeric_limits<double>::quiet_NaN());
        continue;
      }
      const auto first = routes[static_cast<size_t>(source.rank)].begin() +
                         (source.token * layout.K + source.slot) * D;
      made.insert(made.end(), first, first + D);
    }
    rows.push_back(std::move(made));
  }
  return rows;
}

void make_weights(World& world) {
  const DType dtype = world.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (size_t r = 0; r < world.ranks.size(); ++r) {
    reference::RankInput& rank = world.ranks[r];
    rank.weights.clear();
    for (int64_t t = 0; t < rank.T; ++t) {
      const auto id = static_cast<uint64_t>(global_token(world, static_cast<int>(r), t));
      const bool is_masked = !rank.mask.empty() && rank.mask[static_cast<size_t>(t)] != 0;
      for (int64_t k = 0; k < world.num_slots(); ++k) {
        const uint64_t hash = hash_of(17, id, static_cast<uint64_t>(k));
        const size_t slot = rank.weights.size();
        double weight = world.exact_sums ? short_weight(world, hash) : full_value(dtype, hash);
        if (has_zero_weight(world, id, k)) weight = 0.0;
        if (has_cancelling_slots(world, id) && k < 3) weight = 1.0;
        if (is_masked || rank.expert_ids[slot] < 0) {
          weight = std::numeric_limits<double>::quiet_NaN();
        }
        rank.weights.push_back(weight);
      }
    }
  }
}

}  // namespace crossdock::conformance
