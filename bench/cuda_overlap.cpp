#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda_bench.hpp"
#include "bench/cuda_layer_tensors.hpp"
#include "bench/cuda_steps.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/error.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::bench {
namespace {

// Numbers of SMs for a begun dispatch, and of chunks in which its rows arrive.
constexpr int kSmCounts[] = {8, 16, 32};
constexpr int64_t kChunkCounts[] = {1, 2, 4, 8};

/// Dispatch and experts of a layer, separately and overlapped.
class OverlapParts {
 public:
  OverlapParts(const MoeLayerConfig& config, Group& group, const CudaLayerTensors& tensors,
               cudaStream_t stream)
      : tensors_(tensors),
        stream_{stream},
        experts_(config.experts),
        dispatcher_(group, config.dispatch, "direct") {
    set_sms(0);
    routes_ = Router(config.router)
                  .route({.x = tensors.x.view, .gate = tensors.weights().gate, .stream = stream_});
    plan_ = dispatcher_.plan(routes_.routing());
    rows_ = dispatcher_.allocate_rows(plan_, config.experts.dtype);
    y_ = dispatcher_.allocate_rows(plan_, config.experts.dtype);
  }

  std::vector<Step> steps() {
    std::vector<Step> steps = {{.name = "dispatch", .run = [this] { dispatch(); }},
                               {.name = "experts", .run = [this] { compute(0); }},
                               {.name = "dispatch, then experts", .run = [this] {
                                  dispatch();
                                  compute(0);
                                }}};
    for (const int sms : kSmCounts) {
      const std::string on = " on " + std::to_string(sms) + " SMs";
      steps.push_back({.name = "dispatch" + on, .run = [this, sms] { begin_and_finish(sms); }});
      steps.push_back({.name = "experts beside" + on, .run = [this, sms] { compute(sms); }});
      for (const int64_t chunks : kChunkCounts) {
        steps.push_back({.name = "both" + on + ", chunks " + std::to_string(chunks),
                         .run = [this, sms, chunks] { overlap(sms, chunks); }});
      }
    }
    for (Step& step : steps) {
      step.settle = [this] { saved_ = {}; };
    }
    return steps;
  }

  /// Throws Error(kInternal) unless the results are bit-identical to those without overlap.
  void check() {
    dispatch();
    compute(0);
    const OwnedTensor wanted = results();
    overlap(kSmCounts[0], 4);
    const OwnedTensor y = results();
    const auto num_bytes = static_cast<size_t>(wanted.view.num_bytes());
    if (std::memcmp(y.view.data, wanted.view.data, num_bytes) == 0) return;
    throw Error(ErrorCode::kInternal, "experts beside and after a dispatch give different bits");
  }

 private:
  // In host memory. Waits for the stream.
  OwnedTensor results() const { return to_host(y_.view, y_.view.num_rows(), stream_of(stream_)); }
  static cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

  void set_sms(int sms) {
    dispatcher_.set_device_options({.stream = stream_, .max_begun_sms = sms});
  }
  DispatchArgs dispatch_args(int64_t chunks = 1) const {
    return {.x = tensors_.x.view, .rows = rows_.view, .num_chunks = chunks};
  }
  ExpertsForwardArgs experts_args(int free_sms) const {
    return {.weights = tensors_.weights().experts,
            .rows = rows_.view,
            .segments = plan_.segments(),
            .y = y_.view,
            .stream = stream_,
            .free_sms = free_sms};
  }

  void dispatch() { dispatcher_.dispatch(plan_, dispatch_args()); }
  void compute(int free_sms) { saved_ = experts_.forward(experts_args(free_sms)); }

  void begin_and_finish(int sms) {
    set_sms(sms);
    dispatcher_.finish(dispatcher_.begin_dispatch(plan_, dispatch_args()));
  }

  // As in a layer.
  void overlap(int sms, int64_t chunks) {
    set_sms(sms);
    Pending<DispatchResult> pending = dispatcher_.begin_dispatch(plan_, dispatch_args(chunks));
    saved_ = experts_.begin_forward(experts_args(0));
    while (const std::optional<DispatchChunk> chunk = dispatcher_.next_chunk(pending)) {
      const bool is_last = chunk->last_expert == plan_.num_local_experts();
      experts_.forward_part(experts_args(is_last ? 0 : sms), saved_,
                            {chunk->first_expert, chunk->last_expert});
    }
    dispatcher_.finish(std::move(pending));
  }

  const CudaLayerTensors& tensors_;
  Stream stream_;
  Experts experts_;
  Dispatcher dispatcher_;
  RouterOutput routes_;
  Plan plan_;
  OwnedTensor rows_, y_;  // [R, D]
  ExpertsSaved saved_;
};

/// Forward and backward of a whole layer.
class OverlappedLayer {
 public:
  OverlappedLayer(const Scenario& s, int sms, Group& group, const CudaLayerTensors& tensors,
                  cudaStream_t stream)
      : tensors_(tensors),
        layer_(group, cuda_layer_config(s),
               {.device = {.stream = {stream}, .max_begun_sms = sms}}) {}

  const MoeLayerConfig& config() const { return layer_.config(); }

  Step step(const std::string& name) {
    return {.name = name, .run = [this] { run(); }, .settle = [this] { result_ = {}; }};
  }

 private:
  void run() {
    result_ = layer_.forward(
        {.weights = tensors_.weights(), .x = tensors_.x.view, .out = tensors_.out.view});
    layer_.backward({.weights = tensors_.weights(),
                     .x = tensors_.x.view,
                     .grad_out = tensors_.grad_out.view,
                     .saved = &result_.saved,
                     .grads = tensors_.grads(),
                     .grad_x = tensors_.grad_x.view});
  }

  const CudaLayerTensors& tensors_;
  MoeLayer layer_;
  MoeForwardResult result_;
};

}  // namespace

std::vector<StepResult> run_cuda_overlap(const Scenario& scenario, const Repeats& repeats,
                                         bool check) {
  require_gpu(scenario);
  CudaStepTimer timer(repeats);
  const CudaLayerTensors tensors(scenario, timer.stream());
  std::vector<StepResult> results;
  run_ranks(1, [&](Group& group) {
    const auto time = [&](const Step& step) { results.push_back(timer.time(group, step)); };
    Scenario whole = scenario;
    whole.overlap_chunks = 1;
    OverlappedLayer layer(whole, 0, group, tensors, timer.stream());
    time(layer.step("layer"));
    OverlapParts parts(layer.config(), group, tensors, timer.stream());
    if (check) parts.check();
    for (const Step& step : parts.steps()) time(step);
    const std::string in_chunks = "layer, chunks " + std::to_string(scenario.overlap_chunks);
    for (const int sms : {0, kSmCounts[0], kSmCounts[1]}) {
      OverlappedLayer overlapped(scenario, sms, group, tensors, timer.stream());
      time(overlapped.step(in_chunks + (sms == 0 ? "" : " on " + std::to_string(sms) + " SMs")));
    }
  });
  return results;
}

}  // namespace crossdock::bench
