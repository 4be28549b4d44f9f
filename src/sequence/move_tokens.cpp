#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "comm/memory/window.hpp"
#include "core/check.hpp"
#include "core/hash.hpp"
#include "core/stream_copy.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/sequence.hpp"
#include "ops/copy_rows.hpp"
#include "ops/cuda/device_rows.hpp"

namespace crossdock::sequence {

/// Bytes of a row in a tensor of tokens, for both ways to read its shape; -1: it cannot be read
/// that way. If both apply, they differ only for tensors without tokens: [0, 4] may be
/// [L = 0, B = 4] with one value per token, or [T = 0] with rows of four.
struct RowForms {
  int64_t full = -1;  // all dimensions of the tokens come first: [B, L, ...]
  int64_t flat = -1;  // one dimension for all tokens: [B * L, ...]

  friend bool operator==(const RowForms&, const RowForms&) = default;
};

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

/// `tokens` is the shape of the shard, or the global one. Throws Error(kInvalidArgument) if the
/// tensor has no form.
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

/// The tokens of a shard and of all ranks must match and have memory on one device.
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

namespace {

using sequence::RowForms;

// Must be identical on every rank.
std::string text_of(const SequenceLayout& layout, DType dtype) {
  const bool batch_first = layout.order == TokenOrder::kBatchFirst;
  const bool is_zigzag = layout.cut == SequenceCut::kZigzag;
  std::string text =
      concat("batch=", layout.batch, ";length=", layout.length,
             ";order=", batch_first ? "batch_first" : "sequence_first",
             ";cut=", is_zigzag ? "zigzag" : "contiguous", ";dtype=", name_of(dtype));
  if (layout.packed) {
    text += concat(";num_sequences=", layout.packed->num_sequences(),
                   ";num_tokens=", layout.packed->num_tokens(),
                   ";hash of starts=", hash_bytes(std::as_bytes(layout.packed->starts())));
  }
  return text;
}

void check_args(const Group& group, const SequenceShard& shard, const ConstTensorView& local,
                const TensorView& global) {
  CROSSDOCK_CHECK(shard.rank() == group.rank() && shard.layout().num_ranks == group.size(),
                  "the shard must be that of rank ", group.rank(), " of ", group.size(),
                  ", as in the group, got rank ", shard.rank(), " of ", shard.layout().num_ranks);
  check_memory("local", local);
  if (!global.given()) return;
  check_memory("global", global);
  sequence::check_tokens(shard, "local", local, global);
  check_no_overlap({{"global", global}}, {{"local", local}});
}

// The form that the tokens of all ranks share; row bytes of the other form are -1. Every rank
// compares the same forms, so either all throw or none does.
RowForms common_form(const Agreement& agreement, int num_ranks) {
  auto common = item_of<RowForms>(agreement, 0);
  for (int rank = 1; rank < num_ranks; ++rank) {
    const RowForms before = common;
    const auto form = item_of<RowForms>(agreement, rank);
    if (form.full != common.full) common.full = -1;
    if (form.flat != common.flat) common.flat = -1;
    CROSSDOCK_CHECK(common != RowForms{}, "gather_tokens: local must have the same number of ",
                    "dimensions and row size on all ranks; rank ", rank, " has rows of ",
                    std::max(form.full, form.flat), " bytes, the ranks before it have rows of ",
                    std::max(before.full, before.flat));
  }
  if (common.full >= 0) common.flat = -1;
  return common;
}

// The dimensions `tokens`, then those of `local` after its own token dimensions.
Shape gathered_shape(const Shape& tokens, const Shape& local) {
  std::array<int64_t, Shape::kMaxRank> dims{};
  for (int i = 0; i < local.rank(); ++i) {
    dims[static_cast<size_t>(i)] = i < tokens.rank() ? tokens[i] : local[i];
  }
  return Shape(std::span(dims).first(static_cast<size_t>(local.rank())));
}

// The tokens of all ranks, by rank.
struct Gathered {
  Buffer bytes;
  std::vector<int64_t> offsets{0};  // [P + 1]
};

Gathered exchange(Group& group, const std::vector<SequenceShard>& shards,
                  const ConstTensorView& local, int64_t row_bytes, uint64_t sequence) {
  Gathered all;
  Buffer own;
  run_agreed(group, [&] {
    const int64_t own_bytes = local.num_bytes();
    for (const SequenceShard& shard : shards) {
      all.offsets.push_back(all.offsets.back() + shard.num_tokens() * row_bytes);
    }
    own = group.pool().take_scratch(own_bytes);
    copy_bytes(own.data(), static_cast<const std::byte*>(local.data), own_bytes,
               stores_for(own_bytes));
    finish_stores();
    all.bytes = group.pool().take_scratch(all.offsets.back());
  });
  group.all_gather_v(shared_bytes(own), shared_bytes(all.bytes), all.offsets,
                     group.wait_context("gather_tokens", sequence));
  return all;
}

void place_all(const std::vector<SequenceShard>& shards, const Gathered& all, int64_t row_bytes,
               const TensorView& global) {
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    std::vector<ops::BlockCopy> blocks;
    for (const TokenRun& run : shards[rank].runs()) {
      blocks.push_back({.from = run.local, .to = run.global, .count = run.count});
    }
    ops::copy_blocks({.from = all.bytes.data() + all.offsets[rank],
                      .to = static_cast<std::byte*>(global.data),
                      .blocks = blocks,
                      .row_bytes = row_bytes});
  }
}

}  // namespace

OwnedTensor gather_tokens(Group& group, const SequenceShard& shard, const ConstTensorView& local,
                          const TensorView& global) {
  RowForms own;
  std::vector<SequenceShard> shards;
  const std::optional<Error> refusal = refusal_of([&] {
    own = sequence::row_forms("local", local, shard.shape());
    check_args(group, shard, local, global);
    for (int rank = 0; rank < group.size(); ++rank) shards.emplace_back(shard.layout(), rank);
  });
  const Agreement agreement = group.agree({.operation = "gather_tokens",
                                           .config = text_of(shard.layout(), local.dtype),
                                           .body = body_of(own),
                                           .refusal = as_refusal(refusal)});
  const RowForms form = common_form(agreement, group.size());
  const int64_t row_bytes = std::max(form.full, form.flat);
  const Gathered all = exchange(group, shards, local, row_bytes, agreement.sequence);

  OwnedTensor result{global, nullptr};
  run_agreed(group, [&] {
    if (!global.given()) {
      const Shape tokens = form.full >= 0 ? shard.global_shape() : Shape{shard.num_global_tokens()};
      result = group.pool().take(local.dtype, gathered_shape(tokens, local.shape));
    }
    place_all(shards, all, row_bytes, result.view);
  });
  return result;
}

}  // namespace crossdock
