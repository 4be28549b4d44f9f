#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda_bench.hpp"
#include "bench/cuda_layer_tensors.hpp"
#include "bench/cuda_steps.hpp"
#include "bench/kernels/activation_step.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::bench {
namespace {

// Sizes in bytes and flops, from which the floors of the steps follow.
struct LayerSizes {
  explicit LayerSizes(const Scenario& s)
      : tokens(s.token_bytes()),
        rows(s.row_bytes()),
        routes(s.tokens * s.top_k),
        hidden(routes * s.inner * s.element_bytes()),
        gate(s.experts * s.width * s.element_bytes()),
        logits(s.tokens * s.experts * int64_t{sizeof(float)}),
        parameters(s.parameter_bytes()),
        router_flops(2.0 * static_cast<double>(s.tokens * s.experts * s.width)),
        expert_flops(6.0 * static_cast<double>(routes * s.width * s.inner)) {}

  int64_t tokens, rows;  // T * D and T * K * D elements
  int64_t routes;        // T * K, as a number
  int64_t hidden;        // T * K * F elements
  int64_t gate, logits, parameters;
  double router_flops, expert_flops;  // of a forward
};

/// A whole layer, as users call it.
class WholeLayer {
 public:
  WholeLayer(const Scenario& s, Group& group, const CudaLayerTensors& tensors, cudaStream_t stream)
      : tensors_(tensors),
        layer_(group, cuda_layer_config(s),
               {.device = {.stream = {stream}, .max_sms = s.max_sms}}) {}

  const MoeLayerConfig& config() const { return layer_.config(); }

  void forward() {
    result_ = layer_.forward(
        {.weights = tensors_.weights(), .x = tensors_.x.view, .out = tensors_.out.view});
  }
  void backward() {
    layer_.backward({.weights = tensors_.weights(),
                     .x = tensors_.x.view,
                     .grad_out = tensors_.grad_out.view,
                     .saved = &result_.saved,
                     .grads = tensors_.grads(),
                     .grad_x = tensors_.grad_x.view});
  }
  void release() { result_ = {}; }

  std::vector<Step> steps(const LayerSizes& sizes) {
    const int64_t forward_bytes = 2 * sizes.tokens + sizes.parameters + sizes.gate;
    const double forward_flops = sizes.expert_flops + sizes.router_flops;
    const auto release = [this] { this->release(); };
    return {{.name = "forward",
             .bytes = forward_bytes,
             .flops = forward_flops,
             .run = [this] { forward(); },
             .settle = release},
            {.name = "forward+backward",
             .bytes = 3 * forward_bytes,
             .flops = 3 * forward_flops,
             .run =
                 [this] {
                   forward();
                   backward();
                 },
             .settle = release}};
  }

 private:
  const CudaLayerTensors& tensors_;
  MoeLayer layer_;
  MoeForwardResult result_;
};

OwnedTensor copy_of(const OwnedTensor& tensor, cudaStream_t stream) {
  OwnedTensor copy = device_tensor(tensor.view.dtype, tensor.view.shape, stream);
  check_cuda(cudaMemcpyAsync(copy.view.data, tensor.view.data,
                             static_cast<size_t>(tensor.view.num_bytes()), cudaMemcpyDeviceToDevice,
                             stream),
             "cudaMemcpyAsync");
  return copy;
}

/// The same layer from its parts, each of which can run alone. Has its own tokens and rows.
class LayerParts {
 public:
  LayerParts(const Scenario& s, const MoeLayerConfig& config, Group& group,
             const CudaLayerTensors& tensors, cudaStream_t stream)
      : tensors_(tensors),
        x_(copy_of(tensors.x, stream)),
        grad_out_(copy_of(tensors.grad_out, stream)),
        out_(copy_of(tensors.out, stream)),
        grad_x_(copy_of(tensors.grad_x, stream)),
        stream_{stream},
        router_(config.router),
        experts_(config.experts),
        dispatcher_(group, config.dispatch, "direct") {
    dispatcher_.set_device_options({.stream = stream_, .max_sms = s.max_sms});
    const int64_t R = s.tokens * s.top_k;
    row_weights_ = device_tensor(DType::kF32, {R}, stream);
    grad_row_weights_ = device_tensor(DType::kF32, {R}, stream);
    grad_weights_ = device_tensor(DType::kF32, {s.tokens, s.top_k}, stream);
    routes_ = route();
    plan_ = plan();
    for (OwnedTensor* rows : {&rows_, &y_, &grad_y_, &grad_rows_}) {
      *rows = dispatcher_.allocate_rows(plan_, s.dtype);
    }
    dispatch();
    dispatch_grad();
    experts(3);
    activation_backward_ = make_activation_backward(s, plan_.segments(), stream);
    collect();
  }

  const RouterOutput& routes() const { return routes_; }

  /// Everything but the products of the experts.
  std::vector<Step> steps(const LayerSizes& sizes) {
    const int64_t moved = sizes.tokens + sizes.rows;
    const auto of_routes = static_cast<int64_t>(sizeof(int32_t) + sizeof(float)) * sizes.routes;
    std::vector<Step> steps = {{.name = "router",
                                .bytes = sizes.tokens + sizes.gate + sizes.logits + of_routes,
                                .flops = sizes.router_flops,
                                .run = [this] { other_routes_ = route(); },
                                .settle = [this] { other_routes_ = {}; }},
                               {.name = "plan",
                                .bytes = of_routes,
                                .run = [this] { other_plan_ = plan(); },
                                .settle = [this] { other_plan_ = {}; }},
                               {.name = "dispatch", .bytes = moved, .run = [this] { dispatch(); }},
                               {.name = "combine", .bytes = moved, .run = [this] { combine(); }},
                               {.name = "dispatch_grad",
                                .bytes = moved + 2 * sizes.routes * int64_t{sizeof(float)},
                                .run = [this] { dispatch_grad(); }}};
    if (activation_backward_) {
      // Reads gate, linear and W2^T g; writes the gradients of both and the weighted activation.
      steps.push_back(
          {.name = "activation_grad", .bytes = 6 * sizes.hidden, .run = activation_backward_});
    }
    steps.push_back({.name = "dispatch_backward", .bytes = moved, .run = [this] { gather(); }});
    steps.push_back({.name = "collect",
                     .bytes = 2 * sizes.routes * int64_t{sizeof(float)},
                     .run = [this] { collect(); }});
    // An exact product of fp32 with bf16 takes three bf16 products (docs/router.md).
    steps.push_back({.name = "router_backward",
                     .bytes = 3 * sizes.tokens + 3 * sizes.gate + sizes.logits + of_routes,
                     .flops = 6 * sizes.router_flops,
                     .run = [this] { route_backward(); }});
    return steps;
  }

  /// The experts, with the kernels between their products.
  std::vector<Step> expert_steps(const LayerSizes& sizes) {
    std::vector<Step> steps;
    const std::vector<const char*> names = {"experts", "experts+dx", "experts+dx+dw"};
    for (int last = 1; last <= 3; ++last) {
      steps.push_back({.name = names[static_cast<size_t>(last - 1)],
                       .bytes = last * (2 * sizes.rows + sizes.parameters),
                       .flops = last * sizes.expert_flops,
                       .run = [this, last] { experts(last); },
                       .settle = [this] { saved_ = {}; }});
    }
    return steps;
  }

 private:
  RouterOutput route() {
    return router_.route({.x = x_.view, .gate = tensors_.weights().gate, .stream = stream_});
  }
  Plan plan() { return dispatcher_.plan(routes_.routing()); }
  void dispatch() { dispatcher_.dispatch(plan_, {.x = x_.view, .rows = rows_.view}); }
  void dispatch_grad() {
    dispatcher_.dispatch(plan_, {.x = grad_out_.view,
                                 .rows = grad_y_.view,
                                 .row_weights = row_weights_.view,
                                 .with_row_weights = true});
  }
  void combine() { dispatcher_.combine(plan_, y_.view, out_.view); }
  void gather() { dispatcher_.dispatch_backward(plan_, grad_rows_.view, grad_x_.view); }
  void collect() { dispatcher_.collect_routes(plan_, grad_row_weights_.view, grad_weights_.view); }
  void route_backward() {
    router_.backward({.x = x_.view,
                      .gate = tensors_.weights().gate,
                      .output = &routes_,
                      .grad_weights = grad_weights_.view,
                      .grad_x = grad_x_.view,
                      .accumulate_x = true,
                      .grad_gate = tensors_.grad_gate.view,
                      .stream = stream_});
  }

  // Forward, then dX, then dW: the first `last` of them.
  void experts(int last) {
    const ExpertWeights weights = tensors_.weights().experts;
    saved_ = experts_.forward({.weights = weights,
                               .rows = rows_.view,
                               .segments = plan_.segments(),
                               .y = y_.view,
                               .stream = stream_});
    if (last == 1) return;
    experts_.backward_dx({.weights = weights,
                          .rows = rows_.view,
                          .segments = plan_.segments(),
                          .row_weights = row_weights_.view,
                          .grad_y = grad_y_.view,
                          .saved = &saved_,
                          .grad_rows = grad_rows_.view,
                          .grad_row_weights = grad_row_weights_.view,
                          .stream = stream_});
    if (last == 2) return;
    experts_.backward_dw({.rows = rows_.view,
                          .segments = plan_.segments(),
                          .row_weights = row_weights_.view,
                          .grad_y = grad_y_.view,
                          .saved = &saved_,
                          .grads = tensors_.grads().experts,
                          .stream = stream_});
  }

  const CudaLayerTensors& tensors_;          // only parameters and their gradients
  OwnedTensor x_, grad_out_, out_, grad_x_;  // [T, D]
  Stream stream_;
  Router router_;
  Experts experts_;
  Dispatcher dispatcher_;
  RouterOutput routes_, other_routes_;  // inputs of all steps; results of a step
  Plan plan_, other_plan_;
  OwnedTensor rows_, y_, grad_y_, grad_rows_;   // [R, D]
  OwnedTensor row_weights_, grad_row_weights_;  // [R]
  OwnedTensor grad_weights_;                    // [T, K]
  ExpertsSaved saved_;
  std::function<void()> activation_backward_;  // null: not in this build
};

// Layers that run back to back, which hides the cost of launches as a model does.
constexpr int kLayersInARow = 8;

Step one_after_the_other(const std::vector<Step>& steps) {
  return {.name = {},
          .run =
              [steps] {
                for (const Step& step : steps) step.run();
              },
          .settle =
              [steps] {
                for (const Step& step : steps) {
                  if (step.settle) step.settle();
                }
              }};
}

// A step of several layers in one graph. No layer finds tokens or rows of another in the cache.
Step in_a_row(const std::vector<Step>& layers) {
  Step all = one_after_the_other(layers);
  all.name = layers[0].name + " x" + std::to_string(layers.size());
  all.bytes = layers[0].bytes;
  all.flops = layers[0].flops;
  return all;
}

// All steps of a layer in one graph.
Step together(const std::vector<Step>& steps) {
  Step all = one_after_the_other(steps);
  all.name = "all but products";
  for (const Step& step : steps) {
    all.bytes += step.bytes;
    all.flops += step.flops;
  }
  return all;
}

/// Times the steps of layers outside the products.
class StepsOutsideProducts {
 public:
  StepsOutsideProducts(CudaStepTimer& timer, Group& group, std::vector<std::vector<Step>> layers)
      : timer_(timer), group_(group), layers_(std::move(layers)) {}

  /// Each step of one layer by itself, and all together.
  std::vector<StepResult> time_alone() const {
    std::vector<StepResult> results;
    for (const Step& step : layers_[0]) results.push_back(timer_.time(group_, step));
    results.push_back(with_sum_of_floors(timer_.time(group_, together(layers_[0])), results));
    return results;
  }

  /// The same for layers in a row; the times are per layer.
  std::vector<StepResult> time_in_a_row() const {
    const auto num_layers = static_cast<int>(layers_.size());
    std::vector<StepResult> results;
    for (size_t i = 0; i < layers_[0].size(); ++i) {
      std::vector<Step> steps;
      for (const std::vector<Step>& layer : layers_) steps.push_back(layer[i]);
      results.push_back(timer_.time(group_, in_a_row(steps), num_layers));
    }
    std::vector<Step> all;
    for (const std::vector<Step>& layer : layers_) all.push_back(together(layer));
    results.push_back(with_sum_of_floors(timer_.time(group_, in_a_row(all), num_layers), results));
    return results;
  }

 private:
  static StepResult with_sum_of_floors(StepResult all, const std::vector<StepResult>& steps) {
    all.floor_us = 0.0;
    for (const StepResult& step : steps) all.floor_us += step.floor_us;
    return all;
  }

  CudaStepTimer& timer_;
  Group& group_;
  std::vector<std::vector<Step>> layers_;  // [layer][step]
};

}  // namespace

std::vector<StepResult> run_cuda_layer(const Scenario& scenario, const Repeats& repeats,
                                       bool check) {
  require_gpu(scenario);
  CudaStepTimer timer(repeats);
  const CudaLayerTensors tensors(scenario, timer.stream());
  const LayerSizes sizes(scenario);
  std::vector<StepResult> results;
  run_ranks(1, [&](Group& group) {
    const auto add = [&](const std::vector<StepResult>& more) {
      results.insert(results.end(), more.begin(), more.end());
    };
    const auto time_each = [&](const std::vector<Step>& steps) {
      for (const Step& step : steps) results.push_back(timer.time(group, step));
    };
    time_each({{.name = "nothing", .run = [] {}}});  // the clock alone
    WholeLayer layer(scenario, group, tensors, timer.stream());
    std::vector<std::unique_ptr<LayerParts>> parts;
    std::vector<std::vector<Step>> steps;
    for (int i = 0; i < kLayersInARow; ++i) {
      parts.push_back(
          std::make_unique<LayerParts>(scenario, layer.config(), group, tensors, timer.stream()));
      steps.push_back(parts.back()->steps(sizes));
    }
    time_each(layer.steps(sizes));
    if (check) check_layer(scenario, tensors, parts[0]->routes(), timer.stream());
    const StepsOutsideProducts outside(timer, group, std::move(steps));
    add(outside.time_alone());
    add(outside.time_in_a_row());
    time_each(parts[0]->expert_steps(sizes));
  });
  return results;
}

}  // namespace crossdock::bench
