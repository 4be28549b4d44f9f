#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/joined_bytes.hpp"
#include "crossdock/group.hpp"

namespace crossdock::comm {

/// Sums an array over the ranks of a group. The array is divided into one part per rank. In each
/// round, every rank receives the next slice of its part from all ranks and sums it in rank order.
/// Slices are small enough that those of all ranks fit in the staging memory.
class SumRounds {
 public:
  /// Allocates the staging memory. No part may have more than `longest_part` elements.
  SumRounds(Group& group, DType dtype, int64_t longest_part);

  /// Limit on the bytes that a rank sends per round; identical on every rank if GroupOptions are.
  static int64_t staging_bytes(const Group& group);

  /// Rank r sums elements [parts[r], parts[r + 1]). `out` receives this rank's part.
  void reduce_scatter(const JoinedBytes<const std::byte>& input, std::span<const int64_t> parts,
                      std::byte* out, const WaitContext& wait);
  /// `out` receives the whole sum; it may be the memory of the input.
  void all_reduce(const JoinedBytes<const std::byte>& input, std::span<const int64_t> parts,
                  const JoinedBytes<std::byte>& out, const WaitContext& wait);

 private:
  struct Slice {
    int64_t begin = 0;  // in bytes of the array
    int64_t end = 0;
    int64_t num_bytes() const { return end - begin; }
  };

  Slice slice_of(int rank, std::span<const int64_t> parts, int64_t round) const;
  int64_t num_rounds(std::span<const int64_t> parts) const;
  void reduce_round(const JoinedBytes<const std::byte>& input, std::span<const int64_t> parts,
                    int64_t round, const WaitContext& wait);

  Group& group_;
  DType dtype_;
  int64_t slice_elements_;  // per rank and round
  Buffer sent_;             // slices for all ranks; then the sums of this rank's slice
  Buffer received_;         // this rank's slice from all ranks; then the sums of all slices
  std::vector<int64_t> slice_offsets_;  // [P + 1] of the current round's slices, in bytes
};

}  // namespace crossdock::comm
