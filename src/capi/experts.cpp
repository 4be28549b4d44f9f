#include <memory>

#include "capi/configs.hpp"
#include "capi/handles.hpp"
#include "capi/status.hpp"
#include "capi/tensors.hpp"

using namespace crossdock;
using capi::guarded;
using capi::handle;
using capi::to_view;

namespace {

// Segments are on the device of the rows.
Segments to_segments(const crossdock_segments& given, const TensorView& rows) {
  CROSSDOCK_CHECK(given.num_segments <= 0 || (given.starts != nullptr && given.counts != nullptr),
                  "segments: starts and counts must not be NULL");
  return {.starts = given.starts,
          .counts = given.counts,
          .num_segments = given.num_segments,
          .device = rows.device};
}

crossdock_experts_backward_args read_args(const crossdock_experts_backward_args* args) {
  return capi::read_struct("crossdock_experts_backward_args", args);
}

}  // namespace

crossdock_status crossdock_experts_create(const crossdock_experts_config* config,
                                          crossdock_experts** experts) {
  return guarded([&] {
    crossdock_experts*& made = capi::pointee("experts", experts);
    const auto given = capi::read_struct("crossdock_experts_config", config);
    std::optional<Error> refusal;
    const ExpertsConfig converted = capi::to_config(given, refusal);
    capi::throw_if_set(refusal);
    made = new crossdock_experts(converted);
  });
}

void crossdock_experts_destroy(crossdock_experts* experts) {
  capi::destroy(experts);
}

crossdock_status crossdock_experts_forward(const crossdock_experts* experts,
                                           const crossdock_experts_forward_args* args,
                                           crossdock_experts_saved** saved) {
  return guarded([&] {
    const Experts& mlp = handle("experts", experts).experts;
    const auto given = capi::read_struct("crossdock_experts_forward_args", args);
    const TensorView rows = to_view("rows", given.rows);
    auto kept = std::make_unique<crossdock_experts_saved>();
    kept->saved = mlp.forward({.weights = capi::to_weights("weights", given.weights),
                               .rows = rows,
                               .segments = to_segments(given.segments, rows),
                               .row_weights = to_view("row_weights", given.row_weights),
                               .y = to_view("y", given.y),
                               .stream = {given.stream}});
    if (saved != nullptr) *saved = kept.release();
  });
}

crossdock_status crossdock_experts_backward_dx(const crossdock_experts* experts,
                                               const crossdock_experts_backward_args* args,
                                               crossdock_experts_saved* saved) {
  return guarded([&] {
    const Experts& mlp = handle("experts", experts).experts;
    const auto given = read_args(args);
    const TensorView grad_y = to_view("grad_y", given.grad_y);
    mlp.backward_dx({.weights = capi::to_weights("weights", given.weights),
                     .rows = to_view("rows", given.rows),
                     .segments = to_segments(given.segments, grad_y),
                     .row_weights = to_view("row_weights", given.row_weights),
                     .grad_y = grad_y,
                     .saved = &handle("saved", saved).saved,
                     .grad_rows = to_view("grad_rows", given.grad_rows),
                     .grad_row_weights = to_view("grad_row_weights", given.grad_row_weights),
                     .stream = {given.stream}});
  });
}

crossdock_status crossdock_experts_backward_dw(const crossdock_experts* experts,
                                               const crossdock_experts_backward_args* args,
                                               const crossdock_experts_saved* saved) {
  return guarded([&] {
    const Experts& mlp = handle("experts", experts).experts;
    const auto given = read_args(args);
    const TensorView grad_y = to_view("grad_y", given.grad_y);
    mlp.backward_dw({.rows = to_view("rows", given.rows),
                     .segments = to_segments(given.segments, grad_y),
                     .row_weights = to_view("row_weights", given.row_weights),
                     .grad_y = grad_y,
                     .saved = &handle("saved", saved).saved,
                     .grads = capi::to_gradients("grads", given.grads),
                     .accumulate = given.accumulate != 0,
                     .stream = {given.stream}});
  });
}

void crossdock_experts_saved_destroy(crossdock_experts_saved* saved) {
  capi::destroy(saved);
}
