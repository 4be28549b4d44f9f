#include "comm/sum_rounds.hpp"

#include <algorithm>
#include <cstring>

#include "comm/shared_bytes.hpp"
#include "comm/sum_blocks.hpp"

namespace crossdock::comm {
namespace {

// Larger rounds are no faster.
constexpr int64_t kMostRoundBytes = int64_t{8} << 20;

// The part of a staging buffer that this round uses.
SharedBytes first_bytes(const Buffer& buffer, int64_t num_bytes) {
  SharedBytes bytes = shared_bytes(buffer);
  bytes.num_bytes = num_bytes;
  return bytes;
}

void copy_out(const JoinedBytes<const std::byte>& from, int64_t begin, int64_t end, std::byte* to) {
  from.visit(begin, end, [&](std::span<const std::byte> piece) {
    std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  });
}

void copy_in(const std::byte* from, const JoinedBytes<std::byte>& to, int64_t begin, int64_t end) {
  to.visit(begin, end, [&](std::span<std::byte> piece) {
    std::memcpy(piece.data(), from, piece.size());
    from += piece.size();
  });
}

}  // namespace

int64_t SumRounds::staging_bytes(const Group& group) {
  return std::min(group.options().staging_bytes, kMostRoundBytes);
}

SumRounds::SumRounds(Group& group, DType dtype, int64_t longest_part)
    : group_(group),
      dtype_(dtype),
      slice_elements_(std::max<int64_t>(
          1, std::min(longest_part, staging_bytes(group) / size_of(dtype) / group.size()))) {
  const int64_t num_bytes = longest_part > 0 ? slice_elements_ * size_of(dtype) * group.size() : 0;
  sent_ = group.pool().take_scratch(num_bytes);
  received_ = group.pool().take_scratch(num_bytes);
}

SumRounds::Slice SumRounds::slice_of(int rank, std::span<const int64_t> parts,
                                     int64_t round) const {
  const auto r = static_cast<size_t>(rank);
  const int64_t begin = std::min(parts[r] + round * slice_elements_, parts[r + 1]);
  const int64_t end = std::min(begin + slice_elements_, parts[r + 1]);
  return {.begin = begin * size_of(dtype_), .end = end * size_of(dtype_)};
}

int64_t SumRounds::num_rounds(std::span<const int64_t> parts) const {
  int64_t longest = 0;
  for (size_t r = 0; r + 1 < parts.size(); ++r)
    longest = std::max(longest, parts[r + 1] - parts[r]);
  return (longest + slice_elements_ - 1) / slice_elements_;
}

// Leaves the sums of this rank's slice at the start of `sent_`.
void SumRounds::reduce_round(const JoinedBytes<const std::byte>& input,
                             std::span<const int64_t> parts, int64_t round,
                             const WaitContext& wait) {
  const int64_t own_bytes = slice_of(group_.rank(), parts, round).num_bytes();
  slice_offsets_.assign(1, 0);
  std::vector<int64_t> received_offsets = {0};
  for (int rank = 0; rank < group_.size(); ++rank) {
    const Slice slice = slice_of(rank, parts, round);
    copy_out(input, slice.begin, slice.end, sent_.data() + slice_offsets_.back());
    slice_offsets_.push_back(slice_offsets_.back() + slice.num_bytes());
    received_offsets.push_back(received_offsets.back() + own_bytes);
  }
  group_.all_to_all_v(first_bytes(sent_, slice_offsets_.back()), slice_offsets_,
                      first_bytes(received_, received_offsets.back()), received_offsets, wait);
  sum_blocks(dtype_, {.blocks = received_.data(),
                      .num_blocks = group_.size(),
                      .count = own_bytes / size_of(dtype_),
                      .out = sent_.data()});
}

void SumRounds::reduce_scatter(const JoinedBytes<const std::byte>& input,
                               std::span<const int64_t> parts, std::byte* out,
                               const WaitContext& wait) {
  for (int64_t round = 0; round < num_rounds(parts); ++round) {
    reduce_round(input, parts, round, wait);
    const int64_t own_bytes = slice_of(group_.rank(), parts, round).num_bytes();
    if (own_bytes == 0) continue;
    std::memcpy(out, sent_.data(), static_cast<size_t>(own_bytes));
    out += own_bytes;
  }
}

void SumRounds::all_reduce(const JoinedBytes<const std::byte>& input,
                           std::span<const int64_t> parts, const JoinedBytes<std::byte>& out,
                           const WaitContext& wait) {
  for (int64_t round = 0; round < num_rounds(parts); ++round) {
    reduce_round(input, parts, round, wait);
    const int64_t own_bytes = slice_of(group_.rank(), parts, round).num_bytes();
    group_.all_gather_v(first_bytes(sent_, own_bytes),
                        first_bytes(received_, slice_offsets_.back()), slice_offsets_, wait);
    for (int rank = 0; rank < group_.size(); ++rank) {
      const Slice slice = slice_of(rank, parts, round);
      copy_in(received_.data() + slice_offsets_[static_cast<size_t>(rank)], out, slice.begin,
              slice.end);
    }
  }
}

}  // namespace crossdock::comm
