#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "crossdock/dispatcher.hpp"
#include "crossdock/moe_layer.hpp"
#include "layer/layer_parts.hpp"

namespace crossdock {

/// What ReplicatedTokens gathers.
struct AllTokens {
  int64_t num_tokens;  // T
  TensorView out;      // [T, D], optional
};

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

  /// Compares the number of tokens (or gradients) and a sample of them on all ranks; on a GPU, the
  /// sample in the first call of an operation only, which waits for `stream`. Returns the refusal
  /// of any rank, or a difference, on all ranks of the group. Collective.
  std::optional<Error> agree(const char* operation, const ConstTensorView& tokens,
                             std::optional<Error> refusal, Stream stream);

  /// Gathers the slices of all ranks. `parts` are the layer's. Collective.
  OwnedTensor gather(const char* operation, const TensorView& slice, const AllTokens& all,
                     LayerParts& parts);

  /// Tells the ranks that wait in `gather` that this rank will not arrive. `error` is the error of
  /// `group`, the layer's group. Collective.
  void refuse(const char* operation, const Group& group, const Error& error);

 private:
  // The slice of a tensor with a row for each token of x.
  ConstTensorView slice_of(const char* name, const ConstTensorView& tensor,
                           const ConstTensorView& x) const;
  uint64_t sample(const char* operation, const ConstTensorView& tokens, Stream stream) const;
  OwnedTensor gather_on_host(const char* operation, const TensorView& slice, const AllTokens& all);
  OwnedTensor gather_on_gpu(const char* operation, const TensorView& slice, const AllTokens& all,
                            LayerParts& parts);
  Dispatcher& dispatcher_for(int64_t width, int64_t num_tokens);

  Group& over_;
  std::vector<int64_t> token_ids_;  // of the slice in host memory, if the caller gave none
  std::set<std::string> compared_;  // operations with tensors on a GPU
  std::vector<std::unique_ptr<Dispatcher>> to_all_;  // graphs use all of them, calls the last
};

/// Throws Error(kUnsupported) if replicated tokens on a GPU need token_ids, because the router has
/// jitter, and have none.
void check_replicated(const RouterConfig& config, const MoeForwardArgs& args);

}  // namespace crossdock
