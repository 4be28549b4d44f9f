#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "crossdock/testing/reference.hpp"
#include "dispatch/cuda/tensors.hpp"

namespace crossdock::ops {

/// Segments with pad rows and a tail, in host memory and on GPU 0.
class RaggedRows {
 public:
  RaggedRows(std::vector<int64_t> counts_in, int64_t alignment, int64_t num_tail_rows,
             const RankStream& stream)
      : counts(std::move(counts_in)), starts{0} {
    for (const int64_t count : counts) {
      starts.push_back(starts.back() + (count + alignment - 1) / alignment * alignment);
    }
    R = starts.back() + num_tail_rows;
    device_starts_ = to_device(ConstTensorView(starts.data(), {std::ssize(starts)}), stream);
    device_counts_ = to_device(ConstTensorView(counts.data(), {std::ssize(counts)}), stream);
    stream.synchronize();
  }

  Segments device() const {
    return {static_cast<const int64_t*>(device_starts_.view.data),
            static_cast<const int64_t*>(device_counts_.view.data), std::ssize(counts),
            device_counts_.view.device};
  }
  int64_t num_experts() const { return std::ssize(counts); }
  /// The expert of a row; -1: none.
  int64_t expert_of(int64_t row) const {
    for (size_t e = 0; e < counts.size(); ++e) {
      if (row >= starts[e] && row < starts[e] + counts[e]) return static_cast<int64_t>(e);
    }
    return -1;
  }

  std::vector<int64_t> counts;
  std::vector<int64_t> starts;
  int64_t R = 0;

 private:
  OwnedTensor device_starts_;
  OwnedTensor device_counts_;
};

inline const std::vector<std::vector<int64_t>>& ragged_counts() {
  static const std::vector<std::vector<int64_t>> kAll = {
      {162, 0, 257, 46, 0, 83}, {0, 0, 0}, {0, 500, 0}, {1}, {0, 1, 0}};
  return kAll;
}

/// Normal values of [rows, width], representable in `dtype`; NaN in rows that belong to no expert.
inline std::vector<double> draw_rows(const RaggedRows& ragged, int64_t width, DType dtype,
                                     unsigned seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<size_t>(ragged.R * width), std::nan(""));
  for (int64_t r = 0; r < ragged.R; ++r) {
    if (ragged.expert_of(r) < 0) continue;
    for (int64_t i = 0; i < width; ++i) {
      values[static_cast<size_t>(r * width + i)] = reference::round_to(dtype, normal(generator));
    }
  }
  return values;
}

inline std::vector<double> draw(int64_t count, DType dtype, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) value = reference::round_to(dtype, normal(generator));
  return values;
}

/// On GPU 0, `offset` elements past an aligned address.
inline OwnedTensor upload(const std::vector<double>& values, DType dtype, const Shape& shape,
                          const RankStream& stream, int64_t offset = 0) {
  const OwnedTensor host = reference::to_tensor(dtype, shape, values);
  OwnedTensor copy = device_tensor(dtype, {shape.num_elements() + offset}, stream);
  auto* data = static_cast<std::byte*>(copy.view.data) + offset * size_of(dtype);
  cuda_ok(cudaMemcpyAsync(data, host.view.data, static_cast<size_t>(host.view.num_bytes()),
                          cudaMemcpyHostToDevice, stream.get()));
  stream.synchronize();
  copy.view = TensorView(data, dtype, shape, copy.view.device);
  return copy;
}

inline std::vector<double> download(const OwnedTensor& tensor, const RankStream& stream) {
  std::vector<std::byte> bytes = to_host(tensor.view, stream);
  return reference::to_values(ConstTensorView(bytes.data(), tensor.view.dtype, tensor.view.shape));
}

/// One unit in the last place of `dtype` at this value, and a little for the sums in fp32.
inline double unit(DType dtype, double value) {
  const double relative = dtype == DType::kBF16  ? std::ldexp(1.0, -7)
                          : dtype == DType::kF16 ? std::ldexp(1.0, -10)
                                                 : 4e-6;
  return relative * std::abs(value) + (dtype == DType::kF16 ? 1e-7 : 1e-6);
}

}  // namespace crossdock::ops
