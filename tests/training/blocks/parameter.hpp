#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "crossdock/tensor.hpp"

namespace train {

/// How the ranks hold a parameter, and so which of them must still sum its gradient after backward:
/// the lists of crossdock::MeshGradients.
enum class Held : uint8_t {
  kDense,             // on every rank, applied to this rank's own tokens
  kReplicated,        // on every rank, applied to tokens that are the same on the tp ranks
  kExperts,           // split over ep and etp
  kExpertsReplicated  // split over ep only, with identical gradients on the etp ranks
};

template <typename Real>
struct Parameter {
  std::string name;
  Held held = Held::kDense;
  crossdock::Shape shape;
  std::vector<Real> value;
  std::vector<Real> grad{};
  std::vector<Real> velocity{};  // of SGD with momentum

  crossdock::ConstTensorView view() const { return {value.data(), shape}; }
  crossdock::TensorView grad_view() { return {grad.data(), shape}; }
  void clear_grad() { grad.assign(value.size(), 0); }
};

/// Uniform values in [-scale, scale) that depend on the name alone: identical on every rank.
template <typename Real>
std::vector<Real> random_values(const std::string& name, int64_t count, double scale);

}  // namespace train
