#pragma once

#include <map>
#include <string>
#include <vector>

#include "crossdock/mesh.hpp"
#include "model.hpp"

namespace train {

/// Whole tensors by name, wherever the mesh holds their parts.
using WholeTensors = std::map<std::string, std::vector<double>>;

/// The gradients of all parameters, on every rank. Call it after sum_gradients. Collective over the
/// mesh. (A checkpoint that another mesh can read is made in the same way.)
template <typename Real>
WholeTensors gather_gradients(crossdock::Mesh& mesh, Model<Real>& model);

}  // namespace train
