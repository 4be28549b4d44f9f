#include "bench/check.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock::bench {
namespace {

template <typename Body>
void with_element_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBF16:
      return body(BF16{});
    case DType::kF16:
      return body(F16{});
    default:
      return body(float{});
  }
}

[[noreturn]] void throw_difference(const char* what, int rank, int64_t row, int64_t column) {
  throw Error(ErrorCode::kInternal, std::string(what) + " of rank " + std::to_string(rank) +
                                        " is wrong in row " + std::to_string(row) + ", column " +
                                        std::to_string(column));
}

void check_num_rows(const char* what, int rank, const ConstTensorView& got, int64_t wanted) {
  if (got.num_rows() == wanted) return;
  throw Error(ErrorCode::kInternal, std::string(what) + " of rank " + std::to_string(rank) +
                                        " must have " + std::to_string(wanted) + " rows, got " +
                                        std::to_string(got.num_rows()));
}

// Every row of `got` must have the bits that `fill(row_number, row)` writes.
template <typename T, typename Fill>
void check_bits(const char* what, int rank, const ConstTensorView& got, Fill fill) {
  const auto row_bytes = static_cast<size_t>(got.row_bytes());
  std::vector<T> wanted(row_bytes / sizeof(T));
  const auto wanted_bytes = std::as_bytes(std::span(wanted));
  const auto* row = static_cast<const std::byte*>(got.data);
  for (int64_t r = 0; r < got.num_rows(); ++r, row += row_bytes) {
    fill(r, wanted.data());
    if (std::memcmp(row, wanted_bytes.data(), row_bytes) == 0) continue;
    const auto difference = std::mismatch(row, row + row_bytes, wanted_bytes.begin());
    throw_difference(what, rank, r, (difference.first - row) / static_cast<int64_t>(sizeof(T)));
  }
}

// out[t] = sum over k of weight * expert output, fma in slot order from +0, one rounding.
template <typename T>
class SlotSum {
 public:
  SlotSum(const Workload& workload, int rank, bool is_weighted)
      : workload_(workload),
        rank_(rank),
        is_weighted_(is_weighted),
        row_(static_cast<size_t>(workload.scenario().width)),
        sum_(row_.size()) {}

  const std::vector<float>& of_token(int64_t t) {
    const int64_t K = workload_.scenario().top_k;
    sum_.assign(sum_.size(), 0.0f);
    for (int64_t k = 0; k < K; ++k) {
      const float weight =
          is_weighted_ ? workload_.weights(rank_)[static_cast<size_t>(t * K + k)] : 1.0f;
      workload_.expert_output(rank_, t, k, row_.data());
      for (size_t d = 0; d < sum_.size(); ++d) {
        sum_[d] = std::fma(weight, to_float(row_[d]), sum_[d]);
      }
    }
    return sum_;
  }

  void operator()(int64_t t, T* out) {
    const std::vector<float>& sum = of_token(t);
    for (size_t d = 0; d < sum.size(); ++d) out[d] = from_float<T>(sum[d]);
  }

 private:
  const Workload& workload_;
  int rank_;
  bool is_weighted_;
  std::vector<T> row_;
  std::vector<float> sum_;
};

void check_near(const Workload& workload, int rank, const ConstTensorView& out) {
  SlotSum<float> slot_sum(workload, rank, true);
  const auto K = static_cast<float>(workload.scenario().top_k);
  const auto values = out.as<float>();
  for (int64_t t = 0; t < out.num_rows(); ++t) {
    const std::vector<float>& wanted = slot_sum.of_token(t);
    for (size_t d = 0; d < wanted.size(); ++d) {
      const float got = values[static_cast<size_t>(t) * wanted.size() + d];
      if (!(std::abs(got - wanted[d]) <= K * K * 0x1p-23f)) {
        throw_difference("out", rank, t, static_cast<int64_t>(d));
      }
    }
  }
}

template <typename T>
void check_all(const Workload& workload, int rank, Mover& mover) {
  const auto& sources = workload.layout().receivers[static_cast<size_t>(rank)].sources;
  const auto R = static_cast<int64_t>(sources.size());
  const int64_t tokens = workload.scenario().tokens;
  const auto source = [&](int64_t r) -> const reference::RowSource& {
    return sources[static_cast<size_t>(r)];
  };
  check_num_rows("rows", rank, mover.rows(), R);
  check_bits<T>("rows", rank, mover.rows(),
                [&](int64_t r, T* row) { workload.token(source(r).rank, source(r).token, row); });
  check_num_rows("out", rank, mover.out(), tokens);
  if (mover.sums_exactly()) {
    check_bits<T>("out", rank, mover.out(), SlotSum<T>(workload, rank, true));
  } else {
    check_near(workload, rank, mover.out());
  }
  if (!workload.scenario().backward) return;
  check_num_rows("grad_rows", rank, mover.grad_rows(), R);
  check_bits<T>("grad_rows", rank, mover.grad_rows(), [&](int64_t r, T* row) {
    const auto& [from, t, k] = source(r);
    const float weight =
        workload.weights(from)[static_cast<size_t>(t * workload.scenario().top_k + k)];
    workload.grad_out(from, t, row);
    for (int64_t d = 0; d < workload.scenario().width; ++d) {
      row[d] = from_float<T>(weight * to_float(row[d]));
    }
  });
  check_num_rows("grad_x", rank, mover.grad_x(), tokens);
  check_bits<T>("grad_x", rank, mover.grad_x(), SlotSum<T>(workload, rank, false));
}

}  // namespace

void fill_expert_outputs(const Workload& workload, int rank, TensorView y) {
  const auto& sources = workload.layout().receivers[static_cast<size_t>(rank)].sources;
  check_num_rows("y", rank, y, static_cast<int64_t>(sources.size()));
  auto* row = static_cast<std::byte*>(y.data);
  for (const reference::RowSource& source : sources) {
    workload.expert_output(source.rank, source.token, source.slot, row);
    row += y.row_bytes();
  }
}

void check_move(const Workload& workload, int rank, Mover& mover) {
  with_element_type(workload.scenario().dtype,
                    [&](auto element) { check_all<decltype(element)>(workload, rank, mover); });
}

}  // namespace crossdock::bench
