#include "experts/grouped_mlp.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/tensor_memory.hpp"

namespace crossdock::experts {

using ops::GemmProblem;
using ops::GemmTile;

namespace {

constexpr int64_t kChunkRows = 32;
constexpr int64_t kSumColumns = 256;

/// <a, b> with defined bits: sum j = 0 to 15 adds the products i = j modulo 16, ascending in i; the
/// 16 sums are then added in pairs (0 with 8, 1 with 9, ...; then 0 with 4, ...; 0 with 2; 0 with
/// 1).
template <typename T>
T dot(const T* a, const T* b, int64_t count) {
  constexpr int64_t kLanes = 16;
  T sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (int64_t lane = 0; i < count; ++i, ++lane) sums[lane] += a[i] * b[i];
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

}  // namespace

template <typename T>
std::vector<typename GroupedMlp<T>::RowChunk> GroupedMlp<T>::cut_rows(const Segments& segments) {
  std::vector<RowChunk> chunks;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    const int64_t end = segments.starts[e] + segments.counts[e];
    for (int64_t row = segments.starts[e]; row < end; row += kChunkRows) {
      chunks.push_back({row, std::min(row + kChunkRows, end), e});
    }
  }
  return chunks;
}

// Rows that belong to no expert: pad rows, and rows past the last segment.
template <typename T>
void GroupedMlp<T>::zero_unused_rows(const Segments& segments, const TensorView& rows) {
  const int64_t row_bytes = rows.row_bytes();
  auto* data = static_cast<std::byte*>(rows.data);
  const auto zero = [&](int64_t begin, int64_t end) {
    if (end > begin) {
      std::memset(data + begin * row_bytes, 0, static_cast<size_t>((end - begin) * row_bytes));
    }
  };
  int64_t used = 0;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    zero(used, segments.starts[e]);
    used = segments.starts[e] + segments.counts[e];
  }
  zero(used, rows.num_rows());
}

// Memory for [R, H].
template <typename T>
Buffer GroupedMlp<T>::take_hidden(const Segments& segments) {
  return buffers_.take(bytes_of<T>(segments.num_rows() * H_));
}

// hidden = W1 x + b1, rounded to T, [R, H].
template <typename T>
void GroupedMlp<T>::compute_hidden(const ExpertWeights& weights, const ConstTensorView& rows,
                                   const Segments& segments, T* hidden) {
  std::vector<GemmProblem> problems;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    problems.push_back({.a = by_rows(pointer<T>(rows) + segments.starts[e] * D_, D_),
                        .b = matrix(weights.w1, e, H_, D_),
                        .M = segments.counts[e],
                        .N = H_,
                        .K = D_});
  }
  const T* b1 = pointer<T>(weights.b1);
  ops::grouped_gemm<Sum>(problems, *pool_, [&](const GemmTile<Sum>& tile) {
    const T* bias = b1 != nullptr ? b1 + tile.problem * H_ + tile.column : nullptr;
    const int64_t first_row = segments.starts[tile.problem] + tile.row;
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      const Sum* from = tile.values + i * tile.stride;
      T* to = hidden + (first_row + i) * H_ + tile.column;
      for (int64_t j = 0; j < tile.num_columns; ++j) {
        to[j] = ops::narrow<T>(bias != nullptr ? from[j] + ops::widen(bias[j]) : from[j]);
      }
    }
  });
}

// a = act(h), times the row's weight if the experts apply it; in the sum type, [R, F].
template <typename T>
Buffer GroupedMlp<T>::compute_activation(const ExpertsForwardArgs& args, const T* hidden) {
  Buffer activated = buffers_.take(bytes_of<Sum>(args.segments.num_rows() * F_));
  const bool is_weighted = config_.weights_in == WeightsIn::kExperts;
  const std::vector<RowChunk> chunks = cut_rows(args.segments);
  pool_->parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t index) {
    const RowChunk& chunk = chunks[static_cast<size_t>(index)];
    std::vector<Sum> h(static_cast<size_t>(H_));
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      Sum* a = pointer<Sum>(activated) + row * F_;
      ops::widen_row(hidden + row * H_, H_, h.data());
      ops::activate(activation_, h.data(), a);
      if (!is_weighted) continue;
      const Sum weight = pointer<Sum>(args.row_weights)[row];
      for (int64_t f = 0; f < F_; ++f) a[f] *= weight;
    }
  });
  return activated;
}

template <typename T>
ExpertsSaved GroupedMlp<T>::begin_forward(const ExpertsForwardArgs& args) {
  zero_unused_rows(args.segments, args.y);
  ExpertsSaved saved;
  if (!config_.recompute) saved.hidden = take_hidden(args.segments);
  return saved;
}

template <typename T>
void GroupedMlp<T>::forward(const ExpertsForwardArgs& args, ExpertsSaved& saved) {
  const Segments& segments = args.segments;
  const Buffer own = config_.recompute ? take_hidden(segments) : Buffer();
  T* hidden = config_.recompute ? pointer<T>(own) : pointer<T>(saved.hidden);
  compute_hidden(args.weights, args.rows, segments, hidden);
  const Buffer activated = compute_activation(args, hidden);
  std::vector<GemmProblem> problems;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    problems.push_back({.a = by_rows(pointer<Sum>(activated) + segments.starts[e] * F_, F_),
                        .b = matrix(args.weights.w2, e, D_, F_),
                        .M = segments.counts[e],
                        .N = D_,
                        .K = F_});
  }
  with_result(args.y, [&]<typename Result>(Result* y) { this->multiply_into(args, problems, y); });
}

// y = W2 a + b2, rounded to Result.
template <typename T>
template <typename Result>
void GroupedMlp<T>::multiply_into(const ExpertsForwardArgs& args,
                                  const std::vector<GemmProblem>& problems, Result* y) {
  const Segments& segments = args.segments;
  const T* b2 = pointer<T>(args.weights.b2);
  const bool is_weighted = config_.weights_in == WeightsIn::kExperts;
  ops::grouped_gemm<Sum>(problems, *pool_, [&](const GemmTile<Sum>& tile) {
    const T* bias = b2 != nullptr ? b2 + tile.problem * D_ + tile.column : nullptr;
    const int64_t first_row = segments.starts[tile.problem] + tile.row;
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      const Sum* from = tile.values + i * tile.stride;
      const Sum weight = is_weighted ? pointer<Sum>(args.row_weights)[first_row + i] : Sum{1};
      Result* to = y + (first_row + i) * D_ + tile.column;
      for (int64_t j = 0; j < tile.num_columns; ++j) {
        to[j] =
            ops::narrow<Result>(bias != nullptr ? from[j] + weight * ops::widen(bias[j]) : from[j]);
      }
    }
  });
}

// u = W2^T g, [R, F].
template <typename T>
Buffer GroupedMlp<T>::multiply_by_w2(const ExpertsBackwardDxArgs& args) {
  const Segments& segments = args.segments;
  Buffer result = buffers_.take(bytes_of<Sum>(segments.num_rows() * F_));
  std::vector<GemmProblem> problems;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    problems.push_back({.a = by_rows(pointer<T>(args.grad_y) + segments.starts[e] * D_, D_),
                        .b = transpose(args.weights.w2, e, D_, F_),
                        .M = segments.counts[e],
                        .N = F_,
                        .K = D_});
  }
  ops::grouped_gemm<Sum>(problems, *pool_, [&](const GemmTile<Sum>& tile) {
    const int64_t first_row = segments.starts[tile.problem] + tile.row;
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      const Sum* from = tile.values + i * tile.stride;
      std::copy(from, from + tile.num_columns,
                pointer<Sum>(result) + (first_row + i) * F_ + tile.column);
    }
  });
  return result;
}

// Row by row: grad_weight = <a, u> + <b2, g>, then grad_a = p u and from it grad_h. `grad_a` holds
// u on entry. The results do not depend on where p was applied, here or in combine.
template <typename T>
void GroupedMlp<T>::backward_through_activation(const ExpertsBackwardDxArgs& args, const T* hidden,
                                                Sum* grad_a) {
  const T* b2 = pointer<T>(args.weights.b2);
  const Sum* row_weights = pointer<Sum>(args.row_weights);
  Sum* grad_row_weights = pointer<Sum>(args.grad_row_weights);
  const std::vector<RowChunk> chunks = cut_rows(args.segments);
  pool_->parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t index) {
    const RowChunk& chunk = chunks[static_cast<size_t>(index)];
    std::vector<Sum> h(static_cast<size_t>(H_));
    std::vector<Sum> a(static_cast<size_t>(F_));
    std::vector<Sum> g(static_cast<size_t>(b2 != nullptr ? D_ : 0));
    std::vector<Sum> bias(g.size());
    if (b2 != nullptr) ops::widen_row(b2 + chunk.expert * D_, D_, bias.data());
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      Sum* u = grad_a + row * F_;
      ops::widen_row(hidden + row * H_, H_, h.data());
      ops::activate(activation_, h.data(), a.data());
      if (grad_row_weights != nullptr) {
        Sum grad = dot(a.data(), u, F_);
        if (b2 != nullptr) {
          ops::widen_row(pointer<T>(args.grad_y) + row * D_, D_, g.data());
          grad += dot(bias.data(), g.data(), D_);
        }
        grad_row_weights[row] = grad;
      }
      const Sum weight = row_weights != nullptr ? row_weights[row] : Sum{1};
      for (int64_t f = 0; f < F_; ++f) u[f] *= weight;
      for (int64_t f = 0; f < F_; ++f) a[static_cast<size_t>(f)] *= weight;
      ops::activate_backward(activation_, h.data(), u, h.data());
      ops::narrow_row(h.data(), H_, pointer<T>(args.saved->grad_hidden) + row * H_);
      if (!args.keep_for_dw) continue;
      ops::narrow_row(a.data(), F_, pointer<T>(args.saved->weighted_activation) + row * F_);
    }
  });
}

// grad_x = W1^T grad_h.
template <typename T>
void GroupedMlp<T>::write_grad_rows(const ExpertsBackwardDxArgs& args, const T* grad_hidden) {
  const Segments& segments = args.segments;
  std::vector<GemmProblem> problems;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    problems.push_back({.a = by_rows(grad_hidden + segments.starts[e] * H_, H_),
                        .b = transpose(args.weights.w1, e, H_, D_),
                        .M = segments.counts[e],
                        .N = D_,
                        .K = H_});
  }
  with_result(args.grad_rows, [&]<typename Result>(Result* grad_rows) {
    ops::grouped_gemm<Sum>(problems, *pool_, [&](const GemmTile<Sum>& tile) {
      const int64_t first_row = segments.starts[tile.problem] + tile.row;
      for (int64_t i = 0; i < tile.num_rows; ++i) {
        ops::narrow_row(tile.values + i * tile.stride, tile.num_columns,
                        grad_rows + (first_row + i) * D_ + tile.column);
      }
    });
  });
}

template <typename T>
void GroupedMlp<T>::begin_backward_dx(const ExpertsBackwardDxArgs& args) {
  ExpertsSaved& saved = *args.saved;
  if (config_.recompute) saved.hidden = take_hidden(args.segments);
  saved.grad_hidden = take_hidden(args.segments);
  if (args.keep_for_dw) {
    saved.weighted_activation = buffers_.take(bytes_of<T>(args.segments.num_rows() * F_));
  }
  zero_unused_rows(args.segments, args.grad_rows);
  if (args.grad_row_weights.given()) zero_unused_rows(args.segments, args.grad_row_weights);
}

template <typename T>
void GroupedMlp<T>::backward_dx(const ExpertsBackwardDxArgs& args) {
  T* hidden = pointer<T>(args.saved->hidden);
  if (config_.recompute) compute_hidden(args.weights, args.rows, args.segments, hidden);
  const Buffer grad_a = multiply_by_w2(args);
  backward_through_activation(args, hidden, pointer<Sum>(grad_a));
  write_grad_rows(args, pointer<T>(args.saved->grad_hidden));
}

// grad[e] (+)= sum over the rows r of expert e of left[r] outer right[r]; transposed if the experts
// are.
template <typename T>
void GroupedMlp<T>::sum_products(const Segments& segments, const T* left, int64_t left_width,
                                 const T* right, int64_t right_width, bool accumulate,
                                 const TensorView& grad) {
  if (config_.transposed) {
    std::swap(left, right);
    std::swap(left_width, right_width);
  }
  std::vector<GemmProblem> problems;
  for (int64_t e = 0; e < segments.num_segments; ++e) {
    const bool is_untouched = accumulate && segments.counts[e] == 0;
    problems.push_back({.a = by_columns(left + segments.starts[e] * left_width, left_width),
                        .b = by_columns(right + segments.starts[e] * right_width, right_width),
                        .M = is_untouched ? 0 : left_width,
                        .N = right_width,
                        .K = segments.counts[e]});
  }
  ops::grouped_gemm<Sum>(problems, *pool_, [&](const GemmTile<Sum>& tile) {
    Sum* expert = pointer<Sum>(grad) + tile.problem * left_width * right_width;
    for (int64_t i = 0; i < tile.num_rows; ++i) {
      const Sum* from = tile.values + i * tile.stride;
      Sum* to = expert + (tile.row + i) * right_width + tile.column;
      for (int64_t j = 0; j < tile.num_columns; ++j) to[j] = accumulate ? to[j] + from[j] : from[j];
    }
  });
}

// grad[e] (+)= sum over the rows r of expert e of row_weights[r] * rows[r], in row order, in fp64.
template <typename T>
void GroupedMlp<T>::sum_rows(const Segments& segments, const T* rows, const Sum* row_weights,
                             bool accumulate, const TensorView& grad) {
  const int64_t width = grad.shape[1];
  const int64_t num_blocks = (width + kSumColumns - 1) / kSumColumns;
  pool_->parallel_for(segments.num_segments * num_blocks, [&](int64_t index) {
    const int64_t expert = index / num_blocks;
    const int64_t begin = index % num_blocks * kSumColumns;
    const int64_t count = std::min(kSumColumns, width - begin);
    if (accumulate && segments.counts[expert] == 0) return;
    std::array<double, kSumColumns> sums{};
    for (int64_t i = 0; i < segments.counts[expert]; ++i) {
      const int64_t row = segments.starts[expert] + i;
      const double weight = row_weights != nullptr ? static_cast<double>(row_weights[row]) : 1.0;
      const T* from = rows + row * width + begin;
      for (int64_t j = 0; j < count; ++j) {
        sums[static_cast<size_t>(j)] += weight * static_cast<double>(ops::widen(from[j]));
      }
    }
    Sum* to = pointer<Sum>(grad) + expert * width + begin;
    for (int64_t j = 0; j < count; ++j) {
      const Sum sum = static_cast<Sum>(sums[static_cast<size_t>(j)]);
      to[j] = accumulate ? to[j] + sum : sum;
    }
  });
}

template <typename T>
void GroupedMlp<T>::backward_dw(const ExpertsBackwardDwArgs& args) {
  const Segments& segments = args.segments;
  const T* grad_hidden = pointer<T>(args.saved->grad_hidden);
  const T* grad_y = pointer<T>(args.grad_y);
  if (args.grads.w1.given()) {
    sum_products(segments, grad_hidden, H_, pointer<T>(args.rows), D_, args.accumulate,
                 args.grads.w1);
  }
  if (args.grads.w2.given()) {
    sum_products(segments, grad_y, D_, pointer<T>(args.saved->weighted_activation), F_,
                 args.accumulate, args.grads.w2);
  }
  if (args.grads.b1.given()) {
    sum_rows(segments, grad_hidden, nullptr, args.accumulate, args.grads.b1);
  }
  if (args.grads.b2.given()) {
    sum_rows(segments, grad_y, pointer<Sum>(args.row_weights), args.accumulate, args.grads.b2);
  }
}

template class GroupedMlp<double>;
template class GroupedMlp<float>;
template class GroupedMlp<BF16>;
template class GroupedMlp<F16>;

std::unique_ptr<Backend> make_host_backend(const ExpertsConfig& config,
                                           std::shared_ptr<ThreadPool> pool) {
  switch (config.dtype) {
    case DType::kF64:
      return std::make_unique<GroupedMlp<double>>(config, std::move(pool));
    case DType::kBF16:
      return std::make_unique<GroupedMlp<BF16>>(config, std::move(pool));
    case DType::kF16:
      return std::make_unique<GroupedMlp<F16>>(config, std::move(pool));
    default:
      return std::make_unique<GroupedMlp<float>>(config, std::move(pool));
  }
}

}  // namespace crossdock::experts
