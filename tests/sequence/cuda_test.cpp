// Tokens on a GPU: the same bytes as on the CPU.
#include <cstring>

#include "dispatch/cuda/tensors.hpp"
#include "sequence/layouts.hpp"

namespace crossdock {
namespace {

class SequenceCuda : public CudaTest {};

std::vector<uint8_t> numbered_bytes(int64_t num_bytes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 131 / 7 + i / 251);
  return bytes;
}

/// 300 sequences: more runs than one launch can take.
PackedSequences many_sequences() {
  std::vector<int64_t> lengths(300);
  for (size_t s = 0; s < lengths.size(); ++s) lengths[s] = static_cast<int64_t>(s * 7 % 23);
  return pack(lengths, 2, 5);
}

std::vector<SequenceLayout> layouts() {
  std::vector<SequenceLayout> all = list_dense_layouts(3, 17, 4);
  all.push_back({.num_ranks = 4, .cut = SequenceCut::kZigzag, .packed = many_sequences()});
  return all;
}

void expect_same_moves(const SequenceLayout& layout, int64_t width) {
  const RankStream stream;
  const int64_t T = SequenceShard(layout, 0).num_global_tokens();
  const std::vector<uint8_t> x = numbered_bytes(T * width);
  const ConstTensorView host(x.data(), {T, width});
  const OwnedTensor global = to_device(host, stream);
  const OwnedTensor gathered = device_tensor(DType::kU8, {T, width}, stream);
  std::vector<OwnedTensor> locals;
  std::vector<ConstTensorView> views;
  for (int rank = 0; rank < layout.num_ranks; ++rank) {
    const SequenceShard shard(layout, rank);
    const Shape shape{shard.num_tokens(), width};
    std::vector<uint8_t> wanted(static_cast<size_t>(shape.num_elements()));
    shard_tokens(shard, host, {wanted.data(), shape});
    locals.push_back(device_tensor(DType::kU8, shape, stream));
    shard_tokens(shard, global.view, locals.back().view, stream.view());
    EXPECT_EQ(to_host(locals.back().view, stream), bytes_of({wanted.data(), shape}))
        << name_of(layout) << " rank " << rank << " width " << width;
    views.emplace_back(locals.back().view);
  }
  gather_shards(layout, views, gathered.view, stream.view());
  EXPECT_EQ(to_host(gathered.view, stream), bytes_of(host)) << name_of(layout);
}

TEST_F(SequenceCuda, ShardsAndGathersTheBytesOfTheCpu) {
  for (const SequenceLayout& layout : layouts()) {
    for (const int64_t width : {1, 3, 4, 16, 4096}) expect_same_moves(layout, width);
  }
}

TEST_F(SequenceCuda, PlacesNothingElsewhere) {
  const RankStream stream;
  const SequenceShard shard({.batch = 2, .length = 5, .num_ranks = 2}, 1);
  const std::vector<int32_t> rows = {3, 4, 8, 9};
  const OwnedTensor local = to_device({rows.data(), {2, 2}}, stream);
  const OwnedTensor global = device_tensor(DType::kI32, {2, 5}, stream);  // all -1
  place_tokens(shard, local.view, global.view, stream.view());
  const std::vector<int32_t> wanted = {-1, -1, -1, 3, 4, -1, -1, -1, 8, 9};
  EXPECT_EQ(to_host(global.view, stream), bytes_of({wanted.data(), {2, 5}}));
}

TEST_F(SequenceCuda, PadsAndTrims) {
  const RankStream stream;
  const std::vector<uint8_t> x = numbered_bytes(5 * 6);
  std::vector<uint8_t> wanted = x;
  wanted.resize(8 * 6, 0);
  const OwnedTensor own = to_device({x.data(), {5, 6}}, stream);
  const OwnedTensor padded = device_tensor(DType::kU8, {8, 6}, stream);
  pad_tokens(own.view, padded.view, stream.view());
  EXPECT_EQ(to_host(padded.view, stream), bytes_of({wanted.data(), {8, 6}}));
  const OwnedTensor trimmed = device_tensor(DType::kU8, {5, 6}, stream);
  trim_tokens(padded.view, trimmed.view, stream.view());
  EXPECT_EQ(to_host(trimmed.view, stream), bytes_of({x.data(), {5, 6}}));

  const OwnedTensor mask = device_tensor(DType::kBool, {8}, stream);
  pad_mask(5, {}, mask.view, stream.view());
  const std::vector<uint8_t> wanted_mask = {0, 0, 0, 0, 0, 1, 1, 1};
  EXPECT_EQ(to_host(mask.view, stream), bytes_of({wanted_mask.data(), {8}}));
}

TEST_F(SequenceCuda, RefusesTensorsOfTwoDevices) {
  const RankStream stream;
  std::vector<float> host(8);
  const OwnedTensor device = device_tensor(DType::kF32, {4}, stream);
  const SequenceShard shard({.length = 8, .num_ranks = 2}, 0);
  EXPECT_THROW(shard_tokens(shard, {host.data(), {8}}, device.view, stream.view()), Error);
}

}  // namespace
}  // namespace crossdock
