// The sums of a group: all_reduce and reduce_scatter.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/agreed_failure.hpp"
#include "comm/agreed_items.hpp"
#include "comm/joined_bytes.hpp"
#include "comm/sum_blocks.hpp"
#include "comm/sum_rounds.hpp"
#include "core/check.hpp"
#include "core/tensor_check.hpp"
#include "crossdock/group.hpp"

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
