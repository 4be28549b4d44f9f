#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// The tokens with which a rank takes part in a forward.
struct LocalTokens {
  ConstTensorView x{};     // [T, D], in host memory to be sampled or hashed
  ConstTensorView mask{};  // [T] bool, optional: true = padding, which is ignored
  int64_t first = 0;       // of a slice of replicated tokens: slices differ by their place
};

/// A hash of a few rows, to keep its cost independent of T and D: up to 16 tokens, spread evenly,
/// and up to 512 bytes of each. Equal tokens have equal samples. 0 if there are no tokens.
uint64_t sample_tokens(const LocalTokens& tokens);

/// The same for refuse_equal_tokens: also 0 for fewer than 8 tokens, which may be equal by chance.
uint64_t sample_to_compare(const LocalTokens& tokens);

/// A hash of all tokens. 0 if there are none.
uint64_t hash_tokens(const LocalTokens& tokens);

/// Throws Error(kInvalidArgument), the same on all ranks, if two ranks of the group have
/// bit-identical tokens. `samples` [P], by sample_to_compare, are known to all ranks; only if two
/// of them are equal do the ranks compare all tokens, with one more agreement. Collective.
void refuse_equal_tokens(Group& group, std::span<const uint64_t> samples,
                         const LocalTokens& tokens);

/// Copies of GPU tokens in host memory.
class HostTokens {
 public:
  /// Waits for the stream.
  HostTokens(const LocalTokens& on_gpu, Stream stream);

  const LocalTokens& tokens() const { return tokens_; }

 private:
  std::vector<std::byte> x_;
  std::vector<std::byte> mask_;
  LocalTokens tokens_;
};

}  // namespace crossdock
