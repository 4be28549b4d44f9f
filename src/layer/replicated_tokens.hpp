#pragma once

#include <optional>
#include <vector>

#include "crossdock/moe_layer.hpp"

namespace crossdock {

/// Tokens that all ranks of a group hold (MoeLayerOptions::replicated_over): each rank takes part
/// in the layer with a slice of them, and the results of all slices are gathered.
class ReplicatedTokens {
 public:
  /// The group must outlive this object.
  explicit ReplicatedTokens(Group& over) : over_(over) {}

  /// Index of the first token in this rank's slice.
  int64_t first_of(int64_t num_tokens) const;

  /// The arguments for this rank's slice, without the output. Throws Error(kInvalidArgument) if a
  /// tensor does not have as many rows as x. Views of a forward are valid until the next slice.
  MoeForwardArgs slice(const MoeForwardArgs& args);
  MoeBackwardArgs slice(const MoeBackwardArgs& args) const;
  MoeBackwardDwArgs slice(const MoeBackwardDwArgs& args) const;

  /// Compares the number of tokens (or gradients) and a sample of them on all ranks. Returns the
  /// refusal of any rank, or a difference, on all ranks of the group. Collective.
  std::optional<Error> agree(const char* operation, const ConstTensorView& tokens,
                             std::optional<Error> refusal);

  /// Gathers the slices of all ranks, [T, D], in `out` if given. Collective.
  OwnedTensor gather(const char* operation, const TensorView& slice, TensorView out);

  /// Tells the ranks that wait in `gather` that this rank will not arrive. `error` is the error of
  /// `group`, the layer's group. Collective.
  void refuse(const char* operation, const Group& group, const Error& error);

 private:
  ConstTensorView slice_of(const char* name, const ConstTensorView& tensor,
                           int64_t num_tokens) const;

  Group& over_;
  std::vector<int64_t> token_ids_;  // of the slice, if the caller gave none
};

}  // namespace crossdock
