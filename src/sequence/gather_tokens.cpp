#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/memory/window.hpp"
#include "comm/refusal.hpp"
#include "core/check.hpp"
#include "core/hash.hpp"
#include "core/stream_copy.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/sequence.hpp"
#include "ops/copy_rows.hpp"
#include "sequence/row_forms.hpp"

namespace crossdock {
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
