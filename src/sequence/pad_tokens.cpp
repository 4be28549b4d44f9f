#include <array>
#include <cstring>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/sequence.hpp"
#include "ops/copy_rows.hpp"
#include "ops/cuda/device_rows.hpp"

namespace crossdock {
namespace {

bool same_rows(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.dtype != b.dtype || a.shape.rank() != b.shape.rank()) return false;
  for (int i = 1; i < a.shape.rank(); ++i) {
    if (a.shape[i] != b.shape[i]) return false;
  }
  return true;
}

void check_pair(const ConstTensorView& x, const ConstTensorView& padded) {
  CROSSDOCK_CHECK(x.given() && same_rows(x, padded) && padded.num_rows() >= x.num_rows(),
                  "padded must have the dtype and row shape of x and at least as many rows; x is ",
                  describe(x), ", padded is ", describe(padded));
  CROSSDOCK_CHECK(x.device == padded.device, "x and padded must be on the same device");
  check_not_null("x", x);
  check_not_null("padded", padded);
}

// Copies the first num_rows rows.
void copy(const ConstTensorView& from, const TensorView& to, int64_t num_rows, Stream stream) {
  if (num_rows == 0) return;
  const std::array<ops::BlockCopy, 1> all = {{{.from = 0, .to = 0, .count = num_rows}}};
  const ops::CopyBlocksArgs args{.from = pointer<std::byte>(from),
                                 .to = pointer<std::byte>(to),
                                 .blocks = all,
                                 .row_bytes = from.row_bytes()};
  if (from.device.is_cpu()) return ops::copy_blocks(args);
  ops::copy_blocks_on_device(args, from.device, stream);
}

// Sets bytes [first, last) of a tensor.
void fill(const TensorView& tensor, int64_t first, int64_t last, uint8_t value, Stream stream) {
  if (first == last) return;
  std::byte* begin = pointer<std::byte>(tensor) + first;
  if (!tensor.device.is_cpu()) {
    return ops::fill_on_device(begin, value, last - first, tensor.device, stream);
  }
  std::memset(begin, value, static_cast<size_t>(last - first));
}

}  // namespace

int64_t align_num_tokens(int64_t num_tokens, int64_t alignment) {
  CROSSDOCK_CHECK(num_tokens >= 0 && num_tokens <= kMaxBytes,
                  "num_tokens must be in [0, 2^60], got ", num_tokens);
  CROSSDOCK_CHECK(alignment >= 1 && alignment <= kMaxBytes, "alignment must be in [1, 2^60], got ",
                  alignment);
  return round_up(num_tokens, alignment);
}

void pad_tokens(const ConstTensorView& x, const TensorView& padded, Stream stream) {
  check_pair(x, padded);
  check_no_overlap({{"padded", padded}}, {{"x", x}});
  copy(x, padded, x.num_rows(), stream);
  fill(padded, x.num_bytes(), padded.num_bytes(), 0, stream);
}

void trim_tokens(const ConstTensorView& padded, const TensorView& x, Stream stream) {
  check_pair(x, padded);
  check_no_overlap({{"x", x}}, {{"padded", padded}});
  copy(padded, x, x.num_rows(), stream);
}

void pad_mask(int64_t num_tokens, const ConstTensorView& mask, const TensorView& padded,
              Stream stream) {
  CROSSDOCK_CHECK(padded.dtype == DType::kBool && padded.shape.rank() == 1 && num_tokens >= 0 &&
                      padded.num_rows() >= num_tokens,
                  "padded must be [T_padded] bool with T_padded at least num_tokens (", num_tokens,
                  "), got ", describe(padded));
  if (mask.given()) {
    CROSSDOCK_CHECK(mask.dtype == DType::kBool && mask.shape == Shape{num_tokens}, "mask must be [",
                    num_tokens, "] bool, got ", describe(mask));
    check_pair(mask, padded);
    check_no_overlap({{"padded", padded}}, {{"mask", mask}});
    copy(mask, padded, num_tokens, stream);
  } else {
    check_not_null("padded", padded);
    fill(padded, 0, num_tokens, 0, stream);
  }
  fill(padded, num_tokens, padded.num_rows(), 1, stream);
}

}  // namespace crossdock
