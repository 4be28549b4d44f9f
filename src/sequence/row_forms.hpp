#pragma once

#include <cstdint>
#include <string_view>

#include "crossdock/sequence.hpp"

namespace crossdock::sequence {

/// Bytes of a row in a tensor of tokens, for both ways to read its shape; -1: it cannot be read
/// that way. If both apply, they differ only for tensors without tokens: [0, 4] may be
/// [L = 0, B = 4] with one value per token, or [T = 0] with rows of four.
struct RowForms {
  int64_t full = -1;  // all dimensions of the tokens come first: [B, L, ...]
  int64_t flat = -1;  // one dimension for all tokens: [B * L, ...]

  friend bool operator==(const RowForms&, const RowForms&) = default;
};

/// `tokens` is the shape of the shard, or the global one. Throws Error(kInvalidArgument) if the
/// tensor has no form.
RowForms row_forms(std::string_view name, const ConstTensorView& tensor, const Shape& tokens);

/// The tokens of a shard and of all ranks must match and have memory on one device.
void check_tokens(const SequenceShard& shard, std::string_view local_name,
                  const ConstTensorView& local, const ConstTensorView& global);

}  // namespace crossdock::sequence
