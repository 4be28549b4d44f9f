#include "layer/flat_args.hpp"

#include "core/sizes.hpp"

namespace crossdock {
namespace {

// B * L for tokens [B, L, D]; -1 for any other shape.
int64_t num_tokens(const Shape& x) {
  if (x.rank() != 3) return -1;
  return product_within(kMaxBytes, {x[0], x[1]}).value_or(-1);
}

// A tensor [B, L], or [B, L, n], of the tokens x [B, L, D].
template <typename View>
View flat(View tensor, const Shape& x) {
  const Shape& shape = tensor.shape;
  const int64_t T = num_tokens(x);
  if (T < 0 || shape.rank() < 2 || shape[0] != x[0] || shape[1] != x[1]) return tensor;
  if (shape.rank() == 2) {
    tensor.shape = {T};
  } else if (shape.rank() == 3) {
    tensor.shape = {T, shape[2]};
  }
  return tensor;
}

}  // namespace

MoeForwardArgs flat(const MoeForwardArgs& args) {
  MoeForwardArgs result = args;
  const Shape& x = args.x.shape;
  result.x = flat(args.x, x);
  result.out = flat(args.out, x);
  result.mask = flat(args.mask, x);
  result.sequence_ids = flat(args.sequence_ids, x);
  result.forced_ids = flat(args.forced_ids, x);
  result.token_ids = flat(args.token_ids, x);
  return result;
}

MoeBackwardArgs flat(const MoeBackwardArgs& args) {
  MoeBackwardArgs result = args;
  const Shape& x = args.x.shape;
  result.x = flat(args.x, x);
  result.grad_out = flat(args.grad_out, x);
  result.grad_x = flat(args.grad_x, x);
  return result;
}

MoeBackwardDwArgs flat(const MoeBackwardDwArgs& args) {
  MoeBackwardDwArgs result = args;
  const Shape& x = args.x.shape;
  result.x = flat(args.x, x);
  result.grad_out = flat(args.grad_out, x);
  return result;
}

TensorView shaped_like(const ConstTensorView& x, const TensorView& result) {
  return {result.data, result.dtype, x.shape, result.device};
}

}  // namespace crossdock
