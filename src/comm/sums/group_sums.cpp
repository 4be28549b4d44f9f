// The sums of a group: all_reduce and reduce_scatter.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/agreement/items.hpp"
#include "comm/failure.hpp"
#include "comm/memory/window.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/dtype.hpp"
#include "crossdock/group.hpp"

namespace crossdock::comm {

/// Whether sum_blocks takes this dtype: fp64, fp32, bf16, fp16 and int64.
bool can_sum(DType dtype);

/// out[i] = blocks[0][i] + blocks[1][i] + ..., in this order. fp32, bf16 and fp16 are summed in
/// fp32 and rounded once; fp64 and int64 in their own dtype.
struct SumBlocksArgs {
  const std::byte* blocks = nullptr;  // [num_blocks, count]
  int num_blocks = 0;                 // at least 1
  int64_t count = 0;
  std::byte* out = nullptr;  // [count]; must not overlap the blocks
};
void sum_blocks(DType dtype, const SumBlocksArgs& args);

namespace {

// Type of the sums over values of type T. Unsigned: int64 sums wrap around.
template <typename T>
struct SumType {
  using Type = float;
};
template <>
struct SumType<double> {
  using Type = double;
};
template <>
struct SumType<int64_t> {
  using Type = uint64_t;
};

template <typename T>
typename SumType<T>::Type widened(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return static_cast<uint64_t>(value);
  } else {
    return to_float(value);
  }
}

template <typename T>
T narrowed(typename SumType<T>::Type sum) {
  if constexpr (std::is_same_v<T, double>) {
    return sum;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return static_cast<int64_t>(sum);
  } else {
    return from_float<T>(sum);
  }
}

template <typename T>
void sum_typed(const SumBlocksArgs& args) {
  constexpr int64_t kPiece = 512;  // elements whose sums stay in the cache
  std::array<typename SumType<T>::Type, kPiece> sums;
  const auto* blocks = reinterpret_cast<const T*>(args.blocks);
  auto* out = reinterpret_cast<T*>(args.out);
  for (int64_t begin = 0; begin < args.count; begin += kPiece) {
    const auto count = static_cast<size_t>(std::min(kPiece, args.count - begin));
    for (size_t i = 0; i < count; ++i) sums[i] = widened(blocks[begin + static_cast<int64_t>(i)]);
    for (int b = 1; b < args.num_blocks; ++b) {
      const T* block = blocks + b * args.count + begin;
      for (size_t i = 0; i < count; ++i) sums[i] += widened(block[i]);
    }
    for (size_t i = 0; i < count; ++i) out[begin + static_cast<int64_t>(i)] = narrowed<T>(sums[i]);
  }
}

}  // namespace

bool can_sum(DType dtype) {
  return is_summable(dtype) || dtype == DType::kI64;
}

void sum_blocks(DType dtype, const SumBlocksArgs& args) {
  switch (dtype) {
    case DType::kF64:
      return sum_typed<double>(args);
    case DType::kF32:
      return sum_typed<float>(args);
    case DType::kBF16:
      return sum_typed<BF16>(args);
    case DType::kF16:
      return sum_typed<F16>(args);
    case DType::kI64:
      return sum_typed<int64_t>(args);
    default:
      CROSSDOCK_ASSERT(can_sum(dtype));
  }
}

/// Memory in several pieces, addressed as one array of bytes. `Byte` is std::byte or const
/// std::byte.
template <typename Byte>
class JoinedBytes {
 public:
  /// Appends a piece; an empty piece may be null.
  void add(Byte* data, int64_t num_bytes) {
    pieces_.push_back({data, static_cast<size_t>(num_bytes)});
    offsets_.push_back(offsets_.back() + num_bytes);
  }

  int64_t num_bytes() const { return offsets_.back(); }

  /// Calls use(span) for each contiguous part of the bytes [begin, end), in order. REQUIRES:
  /// 0 <= begin <= end <= num_bytes().
  template <typename Use>
  void visit(int64_t begin, int64_t end, const Use& use) const {
    const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), begin);
    for (auto i = static_cast<size_t>(after - offsets_.begin()) - 1; begin < end; ++i) {
      const int64_t stop = std::min(end, offsets_[i + 1]);
      if (stop == begin) continue;  // an empty piece
      use(pieces_[i].subspan(static_cast<size_t>(begin - offsets_[i]),
                             static_cast<size_t>(stop - begin)));
      begin = stop;
    }
  }

 private:
  std::vector<std::span<Byte>> pieces_;
  std::vector<int64_t> offsets_ = {0};  // [pieces + 1]
};

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

namespace crossdock {
namespace {

using comm::JoinedBytes;
using comm::SumRounds;

void check_summable(const std::string& name, const ConstTensorView& tensor) {
  CROSSDOCK_CHECK(tensor.given(), name, " must be given, got nothing");
  CROSSDOCK_CHECK(comm::can_sum(tensor.dtype), name,
                  " must be fp64, fp32, bf16, fp16 or int64, got ", name_of(tensor.dtype));
  check_memory(name, tensor);
}

// Tensors of one dtype, which are summed as one array.
struct JoinedTensors {
  JoinedBytes<const std::byte> input;
  JoinedBytes<std::byte> output;
  std::vector<int64_t> parts;  // [P + 1] elements that each rank sums
  std::optional<SumRounds> rounds;
};

// Parts of nearly equal sizes.
std::vector<int64_t> equal_parts(int64_t num_elements, int num_parts) {
  std::vector<int64_t> parts;
  for (int64_t r = 0; r <= num_parts; ++r) {
    const int64_t larger = std::min<int64_t>(r, num_elements % num_parts);
    parts.push_back(r * (num_elements / num_parts) + larger);
  }
  return parts;
}

// In the order of the dtypes, which is the same on every rank.
std::map<DType, JoinedTensors> join_by_dtype(Group& group, std::span<const TensorView> tensors) {
  std::map<DType, JoinedTensors> joined;
  for (const TensorView& tensor : tensors) {
    JoinedTensors& same = joined[tensor.dtype];
    auto* data = static_cast<std::byte*>(tensor.data);
    same.input.add(data, tensor.num_bytes());
    same.output.add(data, tensor.num_bytes());
  }
  for (auto& [dtype, same] : joined) {
    const int64_t num_elements = same.input.num_bytes() / size_of(dtype);
    same.parts = equal_parts(num_elements, group.size());
    same.rounds.emplace(group, dtype, same.parts[1]);
  }
  return joined;
}

void check_tensors(std::span<const TensorView> tensors) {
  std::vector<std::string> names;
  for (size_t i = 0; i < tensors.size(); ++i) {
    names.push_back(tensors.size() == 1 ? "the tensor" : concat("tensor ", i));
    check_summable(names.back(), tensors[i]);
  }
  std::vector<NamedTensor> named;
  for (size_t i = 0; i < tensors.size(); ++i) named.push_back({names[i], tensors[i]});
  check_apart(std::move(named));
}

// Must be identical on every rank.
std::string text_of(const Group& group, std::span<const TensorView> tensors) {
  std::string text = concat("staging_bytes=", SumRounds::staging_bytes(group));
  for (size_t i = 0; i < tensors.size(); ++i) {
    text += concat(";tensor ", i, "=", describe(tensors[i]));
  }
  return text;
}

// The sizes as parts [P + 1] of the input; fewer entries if they exceed it.
std::vector<int64_t> to_parts(const std::vector<int64_t>& sizes, int64_t num_elements) {
  std::vector<int64_t> parts = {0};
  for (const int64_t size : sizes) {
    if (size > num_elements - parts.back()) break;
    parts.push_back(parts.back() + size);
  }
  return parts;
}

Error not_covered(const std::vector<int64_t>& sizes, int64_t num_elements, uint64_t sequence) {
  constexpr size_t kMostShown = 16;
  std::string shown;
  for (size_t r = 0; r < std::min(sizes.size(), kMostShown); ++r) {
    shown += concat(r > 0 ? ", " : "", sizes[r]);
  }
  if (sizes.size() > kMostShown) shown += ", ...";
  return {ErrorCode::kInvalidArgument,
          concat("the outputs of all ranks together must have the ", num_elements,
                 " elements of the input; by rank they have ", shown),
          {.culprit = -1, .sequence = sequence, .operation = "reduce_scatter"}};
}

}  // namespace

void Group::all_reduce(std::span<const TensorView> tensors) {
  constexpr const char* kOperation = "all_reduce";
  check();
  std::map<DType, JoinedTensors> joined;
  std::string config;
  const std::optional<Error> refusal = refusal_of([&] {
    check_tensors(tensors);
    config = text_of(*this, tensors);
    if (size() > 1) joined = join_by_dtype(*this, tensors);
  });
  const uint64_t sequence =
      agree({.operation = kOperation, .config = std::move(config), .refusal = as_refusal(refusal)})
          .sequence;
  run_agreed(*this, [&] {
    const WaitContext wait = wait_context(kOperation, sequence);
    for (auto& [dtype, same] : joined) {
      const EventRecorder::Scope scope(recorder(), kOperation, sequence, same.input.num_bytes());
      same.rounds->all_reduce(same.input, same.parts, same.output, wait);
    }
  });
}

void Group::reduce_scatter(const ConstTensorView& input, const TensorView& out) {
  constexpr const char* kOperation = "reduce_scatter";
  check();
  int64_t own_elements = 0;
  std::string config;
  std::optional<SumRounds> rounds;
  const std::optional<Error> refusal = refusal_of([&] {
    check_summable("input", input);
    check_summable("out", out);
    CROSSDOCK_CHECK(out.dtype == input.dtype, "out must be ", name_of(input.dtype),
                    " as the input, got ", name_of(out.dtype));
    check_no_overlap({{"out", out}}, {{"input", input}});
    own_elements = out.num_elements();
    config = concat("staging_bytes=", SumRounds::staging_bytes(*this), ";input=", describe(input));
    rounds.emplace(*this, input.dtype, input.num_elements());
  });
  const Agreement agreement = agree({.operation = kOperation,
                                     .config = std::move(config),
                                     .body = body_of(own_elements),
                                     .refusal = as_refusal(refusal)});
  std::vector<int64_t> sizes;  // [P] of all ranks' outputs
  std::vector<int64_t> parts;
  run_agreed(*this, [&] {
    sizes = items_of<int64_t>(agreement);
    parts = to_parts(sizes, input.num_elements());
  });
  const bool is_covered = parts.size() == sizes.size() + 1 && parts.back() == input.num_elements();
  if (!is_covered) throw not_covered(sizes, input.num_elements(), agreement.sequence);
  run_agreed(*this, [&] {
    const EventRecorder::Scope scope(recorder(), kOperation, agreement.sequence, input.num_bytes());
    JoinedBytes<const std::byte> bytes;
    bytes.add(static_cast<const std::byte*>(input.data), input.num_bytes());
    rounds->reduce_scatter(bytes, parts, static_cast<std::byte*>(out.data),
                           wait_context(kOperation, agreement.sequence));
  });
}

}  // namespace crossdock
