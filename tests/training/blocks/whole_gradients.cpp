#include "whole_gradients.hpp"

#include <iterator>

#include "crossdock/expert_shards.hpp"

namespace train {
namespace {

using crossdock::TensorView;

template <typename Real>
std::vector<double> as_double(const std::vector<Real>& values) {
  return {values.begin(), values.end()};
}

// The gradients of the experts of one block, with this rank's part of them in place.
template <typename Real>
void place_experts(const crossdock::Mesh& mesh, const Model<Real>& model, Block<Real>& block,
                   WholeTensors& tensors) {
  const int64_t E = model.config().E;
  const int64_t D = model.config().D;
  const int64_t F = model.config().F;
  std::vector<Real> w1(static_cast<size_t>(E * 2 * F * D));
  std::vector<Real> b1(static_cast<size_t>(E * 2 * F));
  std::vector<Real> w2(static_cast<size_t>(E * D * F));
  std::vector<Real> b2(static_cast<size_t>(E * D));
  const crossdock::ExpertsConfig experts = model.whole_experts();
  const int64_t E_local = experts.num_local_experts;
  const int64_t first = model.first_expert();
  crossdock::ExpertGradients mine{.w1 = {w1.data() + first * 2 * F * D, {E_local, 2 * F, D}},
                                  .w2 = {w2.data() + first * D * F, {E_local, D, F}},
                                  .b1 = {b1.data() + first * 2 * F, {E_local, 2 * F}}};
  // All etp ranks hold the same b2: one of them contributes it.
  if (mesh.coordinates().etp == 0) mine.b2 = {b2.data() + first * D, {E_local, D}};
  if (mesh.coordinates().edp == 0) {
    crossdock::join_expert_shard(experts, model.shard(),
                                 {.w1 = block.w1.grad_view(),
                                  .w2 = block.w2.grad_view(),
                                  .b1 = block.b1.grad_view(),
                                  .b2 = block.b2.grad_view()},
                                 mine);
  }
  tensors[block.w1.name] = as_double(w1);
  tensors[block.b1.name] = as_double(b1);
  tensors[block.w2.name] = as_double(w2);
  tensors[block.b2.name] = as_double(b2);
}

}  // namespace

// One rank contributes each part, the others zeros: the sum over all ranks is the whole tensor.
template <typename Real>
WholeTensors gather_gradients(crossdock::Mesh& mesh, Model<Real>& model) {
  WholeTensors tensors;
  for (const Parameter<Real>* parameter : model.parameters()) {
    const bool is_dense = parameter->held == Held::kDense || parameter->held == Held::kReplicated;
    if (!is_dense) continue;
    const bool is_first = mesh.world().rank() == 0;
    tensors[parameter->name] =
        is_first ? as_double(parameter->grad) : std::vector<double>(parameter->grad.size());
  }
  for (Block<Real>& block : model.blocks()) place_experts(mesh, model, block, tensors);

  std::vector<TensorView> views;
  for (auto& [name, values] : tensors)
    views.emplace_back(values.data(), crossdock::Shape{std::ssize(values)});
  mesh.world().all_reduce(views);
  return tensors;
}

template WholeTensors gather_gradients(crossdock::Mesh&, Model<float>&);
template WholeTensors gather_gradients(crossdock::Mesh&, Model<double>&);

}  // namespace train
