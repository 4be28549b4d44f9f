#include <string>
#include <vector>

#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/sequence.hpp"
#include "ops/copy_rows.hpp"
#include "ops/cuda/device_rows.hpp"
#include "sequence/row_forms.hpp"

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
