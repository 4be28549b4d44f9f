#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/mesh.hpp"
#include "crossdock/tensor.hpp"
#include "mistakes.hpp"

namespace train {

/// How the sequences of a batch are arranged in one tensor of tokens.
enum class Layout : uint8_t {
  kPacked,        // concatenated
  kBatchFirst,    // [B, L], padded to the longest
  kSequenceFirst  // [L, B], padded to the longest
};
inline constexpr std::array<std::string_view, 3> kLayoutNames = {"packed", "batch_first",
                                                                 "sequence_first"};

struct TokenOptions {
  Layout layout = Layout::kPacked;
  int64_t alignment = 1;  // sequences are padded to a multiple of this
  /// The tp ranks hold the same tokens, instead of a shard each.
  bool replicated = false;
};

/// Tokens with everything that the model needs to know about them.
struct Tokens {
  std::vector<int32_t> bytes;         // [T]
  std::vector<int32_t> targets;       // [T] the byte that follows; -1: none
  std::vector<int64_t> positions;     // [T] within the sequence
  std::vector<int32_t> sequence_ids;  // [T] within the data-parallel rank's part of the batch
  std::vector<uint8_t> is_padding;    // [T] 0 or 1
  int64_t num_sequences = 0;

  int64_t size() const { return static_cast<int64_t>(bytes.size()); }  // T
  crossdock::ConstTensorView mask() const {
    return {is_padding.data(), crossdock::DType::kBool, {size()}};
  }
};

/// This rank's tokens of a batch. The sequences are divided among the dp ranks; the tokens of each
/// part are cut among the cp ranks (zigzag) and then among the tp ranks (contiguous). Local.
Tokens take_share(const crossdock::Mesh& mesh, const std::vector<std::string>& batch,
                  const TokenOptions& options, Mistake mistake = Mistake::kNone);

}  // namespace train
