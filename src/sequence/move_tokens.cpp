#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/sequence.hpp"
#include "ops/copy_rows.hpp"
#include "ops/cuda/device_rows.hpp"
#include "sequence/row_forms.hpp"

namespace crossdock::sequence {
namespace {

bool begins_with(const Shape& shape, const Shape& first) {
  if (shape.rank() < first.rank()) return false;
  for (int i = 0; i < first.rank(); ++i) {
    if (shape[i] != first[i]) return false;
  }
  return true;
}

// Bytes of a row, if the first token_dims dimensions are tokens.
int64_t row_bytes(std::string_view name, const ConstTensorView& tensor, int token_dims) {
  const auto dim = [&](int i) { return i < tensor.shape.rank() ? tensor.shape[i] : 1; };
  const auto bytes = product_within(kMaxBytes, {dim(token_dims), dim(token_dims + 1),
                                                dim(token_dims + 2), size_of(tensor.dtype)});
  CROSSDOCK_CHECK(bytes, name, " of shape ", tensor.shape.to_string(),
                  " has rows that are too large");
  return *bytes;
}

bool have_common_form(const RowForms& a, const RowForms& b) {
  const auto has = [&](int64_t bytes) {
    return bytes >= 0 && (bytes == b.full || bytes == b.flat);
  };
  return has(a.full) || has(a.flat);
}

}  // namespace

RowForms row_forms(std::string_view name, const ConstTensorView& tensor, const Shape& tokens) {
  RowForms forms;
  if (begins_with(tensor.shape, tokens)) forms.full = row_bytes(name, tensor, tokens.rank());
  if (tensor.given() && tensor.shape[0] == tokens.num_elements()) {
    forms.flat = row_bytes(name, tensor, 1);
  }
  CROSSDOCK_CHECK(forms != RowForms{}, name, " must have the dimensions ", tokens.to_string(),
                  " or [", tokens.num_elements(), "], followed by those of a row, got ",
                  describe(tensor));
  return forms;
}

void check_tokens(const SequenceShard& shard, std::string_view local_name,
                  const ConstTensorView& local, const ConstTensorView& global) {
  const RowForms local_forms = row_forms(local_name, local, shard.shape());
  const RowForms global_forms = row_forms("global", global, shard.global_shape());
  CROSSDOCK_CHECK(local.dtype == global.dtype && have_common_form(local_forms, global_forms),
                  "the tokens of ", local_name, " (", describe(local), ") and of global (",
                  describe(global), ") must have the same dtype and width");
  CROSSDOCK_CHECK(local.device == global.device, local_name,
                  " and global must be on the same device");
  check_not_null(local_name, local);
  check_not_null("global", global);
}

}  // namespace crossdock::sequence

namespace crossdock {
namespace {

enum class Direction { kToLocal, kToGlobal };

// REQUIRES: checked tensors.
void copy_runs(const SequenceShard& shard, Direction direction, const ConstTensorView& from,
               const TensorView& to, Stream stream) {
  if (shard.num_tokens() == 0) return;
  const bool to_local = direction == Direction::kToLocal;
  std::vector<ops::BlockCopy> blocks;
  blocks.reserve(shard.runs().size());
  for (const TokenRun& run : shard.runs()) {
    blocks.push_back({.from = to_local ? run.global : run.local,
                      .to = to_local ? run.local : run.global,
                      .count = run.count});
  }
  const int64_t local_bytes = to_local ? to.num_bytes() : from.num_bytes();
  const ops::CopyBlocksArgs args{.from = pointer<std::byte>(from),
                                 .to = pointer<std::byte>(to),
                                 .blocks = blocks,
                                 .row_bytes = local_bytes / shard.num_tokens()};
  if (from.device.is_cpu()) return ops::copy_blocks(args);
  ops::copy_blocks_on_device(args, from.device, stream);
}

}  // namespace

void shard_tokens(const SequenceShard& shard, const ConstTensorView& global,
                  const TensorView& local, Stream stream) {
  sequence::check_tokens(shard, "local", local, global);
  check_no_overlap({{"local", local}}, {{"global", global}});
  copy_runs(shard, Direction::kToLocal, global, local, stream);
}

void place_tokens(const SequenceShard& shard, const ConstTensorView& local,
                  const TensorView& global, Stream stream) {
  sequence::check_tokens(shard, "local", local, global);
  check_no_overlap({{"global", global}}, {{"local", local}});
  copy_runs(shard, Direction::kToGlobal, local, global, stream);
}

void gather_shards(const SequenceLayout& layout, std::span<const ConstTensorView> locals,
                   const TensorView& global, Stream stream) {
  CROSSDOCK_CHECK(std::ssize(locals) == layout.num_ranks, "locals must have one tensor per rank, ",
                  layout.num_ranks, ", got ", locals.size());
  std::vector<SequenceShard> shards;
  for (int rank = 0; rank < layout.num_ranks; ++rank) {
    const std::string name = concat("locals[", rank, "]");
    const ConstTensorView& local = locals[static_cast<size_t>(rank)];
    shards.emplace_back(layout, rank);
    sequence::check_tokens(shards.back(), name, local, global);
    check_no_overlap({{"global", global}}, {{name, local}});
  }
  for (const SequenceShard& shard : shards) {
    copy_runs(shard, Direction::kToGlobal, locals[static_cast<size_t>(shard.rank())], global,
              stream);
  }
}

}  // namespace crossdock
