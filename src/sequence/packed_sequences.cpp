#include <limits>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/sequence.hpp"

namespace crossdock {
namespace {

// [N + 1]
std::vector<int64_t> read_offsets(std::string_view name, const ConstTensorView& tensor) {
  const bool is_i32 = tensor.dtype == DType::kI32;
  CROSSDOCK_CHECK(
      tensor.shape.rank() == 1 && tensor.shape[0] >= 1 && (is_i32 || tensor.dtype == DType::kI64),
      name, " must be [N + 1] int32 or int64 for N sequences, got ", describe(tensor));
  check_memory(name, tensor);
  std::vector<int64_t> offsets;
  if (is_i32) {
    const auto values = tensor.as<int32_t>();
    offsets.assign(values.begin(), values.end());
  } else {
    const auto values = tensor.as<int64_t>();
    offsets.assign(values.begin(), values.end());
  }
  CROSSDOCK_CHECK(offsets[0] == 0, name, "[0] must be 0, got ", offsets[0]);
  for (size_t i = 1; i < offsets.size(); ++i) {
    CROSSDOCK_CHECK(offsets[i] >= offsets[i - 1], name, "[", i, "] (", offsets[i],
                    ") must be at least ", name, "[", i - 1, "] (", offsets[i - 1], ")");
  }
  return offsets;
}

}  // namespace

PackedSequences::PackedSequences(const PackedSequencesArgs& args) {
  const std::vector<int64_t> offsets = read_offsets("cu_seqlens", args.cu_seqlens);
  const bool is_padded = args.cu_seqlens_padded.given();
  starts_ = is_padded ? read_offsets("cu_seqlens_padded", args.cu_seqlens_padded) : offsets;
  CROSSDOCK_CHECK(starts_.size() == offsets.size(), "cu_seqlens_padded must have ", offsets.size(),
                  " entries like cu_seqlens, got ", starts_.size());
  const size_t N = offsets.size() - 1;
  CROSSDOCK_CHECK(N <= std::numeric_limits<int32_t>::max(),
                  "cu_seqlens must have at most 2^31 - 1 sequences, got ", N);
  lengths_.reserve(N);
  for (size_t s = 0; s < N; ++s) {
    const int64_t length = offsets[s + 1] - offsets[s];
    const int64_t room = starts_[s + 1] - starts_[s];
    CROSSDOCK_CHECK(length <= room, "sequence ", s, " has ", length,
                    " tokens by cu_seqlens, but only ", room,
                    " by cu_seqlens_padded, which must not be less");
    lengths_.push_back(length);
  }
  num_tokens_ = args.num_tokens.value_or(starts_.back());
  CROSSDOCK_CHECK(starts_.back() <= num_tokens_, is_padded ? "cu_seqlens_padded" : "cu_seqlens",
                  "[", N, "] (", starts_.back(), ") must be at most num_tokens (", num_tokens_,
                  ")");
  CROSSDOCK_CHECK(num_tokens_ <= kMaxBytes, "num_tokens must be at most 2^60, got ", num_tokens_);
}

}  // namespace crossdock
