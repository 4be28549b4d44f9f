#pragma once

#include "layer/background_work.hpp"
#include "layer/layer_parts.hpp"

namespace crossdock {

/// Dispatch and experts of a layer with overlap, replacing the plain sequence in moe_layer.cpp: a
/// worker thread computes while the calling thread dispatches. The worker never uses the group.
/// Results have the same bits.
///
/// - overlap_shared: the shared experts compute during the dispatch.
/// - overlap_chunks > 1: rows arrive in chunks, and the experts of a chunk compute during the
///   dispatch of the following chunks.
class Overlap {
 public:
  static bool is_requested(const MoeLayerConfig& config);

  /// `parts` must outlive this object. Throws Error(kUnsupported) if no thread can be started.
  explicit Overlap(LayerParts& parts) : parts_(parts) {}

  /// Sets `saved.sent`, `saved.experts` and `saved.shared`. Collective.
  ForwardRows forward(const MoeForwardArgs& args, MoeSaved& saved);

  /// Sets `args.saved->grad_y`. Collective.
  BackwardRows backward(const MoeBackwardArgs& args);

 private:
  LayerParts& parts_;
  Worker worker_;
};

/// The same on a GPU, without a thread: the dispatch runs in its own stream while the shared
/// experts, and the experts of chunks that have arrived, compute in the layer's stream. If the SMs
/// of the dispatch are limited, experts leave that many free until the last chunk has arrived.
/// Collective.
ForwardRows forward_beside_dispatch(LayerParts& parts, const MoeForwardArgs& args, MoeSaved& saved);
BackwardRows backward_beside_dispatch(LayerParts& parts, const MoeBackwardArgs& args);

}  // namespace crossdock
