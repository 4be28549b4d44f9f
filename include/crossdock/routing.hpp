#pragma once

#include "crossdock/tensor.hpp"

namespace crossdock {

/// Where each token goes. Routes are explicit: a slot holds an expert id, or -1 for none; a weight
/// of exactly 0 is a real route. Weights of slots without a route are not looked at.
struct Routing {
  ConstTensorView expert_ids{};  // [T, K] int32 or int64; in [0, E) or -1, no id twice in a token
  ConstTensorView weights{};     // [T, K] fp32, or fp64 with fp64 tokens
  ConstTensorView mask{};        // [T] bool, optional: true = padding, the token has no routes
};

/// The same as a dense map; the slots of a token are its set bits in ascending expert order.
/// At most K bits may be set in a token.
struct DenseRouting {
  ConstTensorView map{};      // [T, E] bool
  ConstTensorView weights{};  // [T, E] fp32, or fp64 with fp64 tokens
  ConstTensorView mask{};     // [T] bool, optional
};

}  // namespace crossdock
