#pragma once

#include <vector>

#include "experts/backend.hpp"
#include "ops/activation.hpp"
#include "ops/convert.hpp"
#include "ops/gemm.hpp"

namespace crossdock::experts {

/// Experts in host memory, for rows of type T (double, float, BF16, F16).
/// h = W1 x + b1 [H = 2F or F] -> a = act(h) [F] -> y = W2 a + b2.
template <typename T>
class GroupedMlp final : public Backend {
 public:
  using Sum = ops::Compute<T>;

  GroupedMlp(const ExpertsConfig& config, std::shared_ptr<ThreadPool> pool)
      : D_(config.width),
        F_(config.inner),
        H_(config.hidden_width()),
        config_(config),
        activation_{config.activation, config.interleaved, config.limit, config.inner},
        pool_(std::move(pool)) {}

  void prepare(Stream /*stream*/) override {}
  ExpertsSaved begin_forward(const ExpertsForwardArgs& args) override;
  void forward(const ExpertsForwardArgs& args, ExpertsSaved& saved) override;
  void begin_backward_dx(const ExpertsBackwardDxArgs& args) override;
  void backward_dx(const ExpertsBackwardDxArgs& args) override;
  void backward_dw(const ExpertsBackwardDwArgs& args) override;

 private:
  // A few rows of one segment.
  struct RowChunk {
    int64_t begin;
    int64_t end;
    int64_t expert;
  };

  template <typename U>
  static ops::GemmOperand by_rows(const U* data, int64_t width) {
    return {data, DTypeOf<U>::value, width, 1};
  }
  // The transpose of a matrix stored as [K, width], as an operand.
  template <typename U>
  static ops::GemmOperand by_columns(const U* data, int64_t width) {
    return {data, DTypeOf<U>::value, 1, width};
  }

  // One expert's matrix, weights[row, column], as an operand; stored as [columns, rows] if the
  // experts are transposed.
  ops::GemmOperand matrix(const ConstTensorView& weights, int64_t expert, int64_t rows,
                          int64_t columns) const {
    const T* data = pointer<T>(weights) + expert * rows * columns;
    return config_.transposed ? by_columns(data, rows) : by_rows(data, columns);
  }
  // Its transpose.
  ops::GemmOperand transpose(const ConstTensorView& weights, int64_t expert, int64_t rows,
                             int64_t columns) const {
    const T* data = pointer<T>(weights) + expert * rows * columns;
    return config_.transposed ? by_rows(data, rows) : by_columns(data, columns);
  }

  // Calls work(rows) with result rows of type T, or of type Sum if the caller wants them unrounded.
  template <typename Work>
  static void with_result(const TensorView& rows, const Work& work) {
    if (rows.dtype == DTypeOf<T>::value) {
      work(static_cast<T*>(rows.data));
    } else {
      work(static_cast<Sum*>(rows.data));
    }
  }

  static std::vector<RowChunk> cut_rows(const Segments& segments);
  static void zero_unused_rows(const Segments& segments, const TensorView& rows);

  Buffer take_hidden(const Segments& segments);
  void compute_hidden(const ExpertWeights& weights, const ConstTensorView& rows,
                      const Segments& segments, T* hidden);
  Buffer compute_activation(const ExpertsForwardArgs& args, const T* hidden);
  template <typename Result>
  void multiply_into(const ExpertsForwardArgs& args, const std::vector<ops::GemmProblem>& problems,
                     Result* y);
  Buffer multiply_by_w2(const ExpertsBackwardDxArgs& args);
  void backward_through_activation(const ExpertsBackwardDxArgs& args, const T* hidden, Sum* grad_a);
  void write_grad_rows(const ExpertsBackwardDxArgs& args, const T* grad_hidden);
  void sum_products(const Segments& segments, const T* left, int64_t left_width, const T* right,
                    int64_t right_width, bool accumulate, const TensorView& grad);
  void sum_rows(const Segments& segments, const T* rows, const Sum* row_weights, bool accumulate,
                const TensorView& grad);

  int64_t D_;
  int64_t F_;
  int64_t H_;
  ExpertsConfig config_;
  ops::ActivationSpec activation_;
  std::shared_ptr<ThreadPool> pool_;
  BufferPool buffers_;
};

extern template class GroupedMlp<double>;
extern template class GroupedMlp<float>;
extern template class GroupedMlp<BF16>;
extern template class GroupedMlp<F16>;

}  // namespace crossdock::experts
