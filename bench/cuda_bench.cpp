#include "bench/cuda_bench.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "bench/check.hpp"
#include "bench/cuda_device.hpp"
#include "bench/cuda_graph.hpp"
#include "bench/cuda_host_calls.hpp"
#include "bench/cuda_link.hpp"
#include "bench/cuda_memory.hpp"
#include "bench/cuda_steps.hpp"
#include "bench/link_rows.hpp"
#include "bench/mover.hpp"
#include "bench/sample_summary.hpp"
#include "bench/workload.hpp"
#include "crossdock/cuda.hpp"
#include "crossdock/dispatcher.hpp"
#include "crossdock/fp8.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::bench {
namespace {

int64_t largest_number_of_rows(const Workload& workload) {
  size_t most = 0;
  for (const auto& receiver : workload.layout().receivers) {
    most = std::max(most, receiver.sources.size());
  }
  return static_cast<int64_t>(most);
}

DispatchConfig config_of(const Workload& workload) {
  DispatchConfig config = workload.dispatch_config();
  config.max_rows = largest_number_of_rows(workload);
  config.copies = workload.scenario().copies;
  return config;
}

/// One rank's tensors and results on the GPU, with copies of the results for the check.
class CudaMover final : public Mover {
 public:
  CudaMover(const Workload& workload, Group& group, cudaStream_t stream)
      : workload_(workload),
        group_(group),
        stream_(stream),
        dispatcher_(group, config_of(workload), "direct") {
    const Scenario& s = workload.scenario();
    const Shape slots{s.tokens, s.top_k};
    const int rank = group.rank();
    dispatcher_.set_device_options({.stream = {stream}, .max_sms = s.max_sms});
    expert_ids_ = to_device({workload.expert_ids(rank).data(), slots}, stream);
    weights_ = to_device({workload.weights(rank).data(), slots}, stream);
    const Buffer tokens(s.tokens * s.width * s.element_bytes());
    const int64_t row_bytes = s.width * s.element_bytes();
    const Shape shape{s.tokens, s.width};
    for (int64_t t = 0; t < s.tokens; ++t) workload.token(rank, t, tokens.data() + t * row_bytes);
    x_ = to_device(tokens.view(s.dtype, shape), stream);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    for (int64_t t = 0; t < s.tokens; ++t) {
      workload.grad_out(rank, t, tokens.data() + t * row_bytes);
    }
    grad_out_ = to_device(tokens.view(s.dtype, shape), stream);
    out_ = device_tensor(s.dtype, shape, stream);
    grad_x_ = device_tensor(s.dtype, shape, stream);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    plan();
    fill_rows();
    if (has_fp8_steps(s)) {
      values_ = device_tensor(DType::kF8E4M3, shape, stream);
      scales_ = device_tensor(DType::kF32, {s.tokens, num_fp8_scales(s)}, stream);
      back_ = device_tensor(s.dtype, rows_.view.shape, stream);
      quantise();
    }
  }

  // Rows in fp8 with a scale per 128 values, for tokens in bf16.
  static bool has_fp8_steps(const Scenario& s) { return s.dtype == DType::kBF16; }
  static int64_t num_fp8_scales(const Scenario& s) { return (s.width + 127) / 128; }

  void plan() override {
    plan_ = dispatcher_.plan({.expert_ids = expert_ids_.view, .weights = weights_.view});
  }
  void dispatch() override { sent_ = dispatcher_.dispatch(plan_, {.x = x_.view}); }
  /// Writes to existing rows, to time a dispatch without a plan.
  void dispatch_again() { dispatcher_.dispatch(plan_, {.x = x_.view, .rows = rows_.view}); }
  void quantise() {
    quantise_rows(
        {.x = x_.view, .values = values_.view, .scales = scales_.view, .stream = {stream_}});
  }
  void dispatch_fp8() {
    sent_fp8_ = dispatcher_.dispatch(plan_, {.x = values_.view, .scales = scales_.view});
  }
  /// The rows of dispatch_fp8 in bf16.
  void dequantise() {
    dequantise_rows({.values = sent_fp8_.rows.view,
                     .scales = sent_fp8_.row_scales.view,
                     .out = back_.view,
                     .stream = {stream_}});
  }
  void combine() override { dispatcher_.combine(plan_, y_.view, out_.view); }
  void combine_backward() override {
    grads_ = dispatcher_.combine_backward(plan_, grad_out_.view, y_.view);
  }
  void dispatch_backward() override { dispatcher_.dispatch_backward(plan_, y_.view, grad_x_.view); }

  /// Keeps the tensors that a captured graph uses.
  void keep() { kept_.push_back({plan_, sent_, sent_fp8_, grads_}); }

  /// Copies results to the host and compares them.
  void check() {
    const auto R = static_cast<int64_t>(
        workload_.layout().receivers[static_cast<size_t>(group_.rank())].sources.size());
    const int64_t T = workload_.scenario().tokens;
    dispatcher_.check();
    host_rows_ = to_host(sent_.rows.view, R, stream_);
    host_out_ = to_host(out_.view, T, stream_);
    host_grad_rows_ = to_host(grads_.grad_rows.view, R, stream_);
    host_grad_x_ = to_host(grad_x_.view, T, stream_);
    check_move(workload_, group_.rank(), *this);
    host_rows_ = to_host(rows_.view, R, stream_);
    check_move(workload_, group_.rank(), *this);
  }

  TensorView y() override { return y_.view; }
  ConstTensorView rows() const override { return host_rows_.view; }
  ConstTensorView out() const override { return host_out_.view; }
  ConstTensorView grad_rows() const override { return host_grad_rows_.view; }
  ConstTensorView grad_x() const override { return host_grad_x_.view; }

 private:
  struct Kept {
    Plan plan;
    DispatchResult sent;
    DispatchResult sent_fp8;
    CombineBackwardResult grads;
  };

  void fill_rows() {
    const Scenario& s = workload_.scenario();
    y_ = dispatcher_.allocate_rows(plan_, s.dtype);
    rows_ = dispatcher_.allocate_rows(plan_, s.dtype);
    const auto R = static_cast<int64_t>(
        workload_.layout().receivers[static_cast<size_t>(group_.rank())].sources.size());
    const Buffer answers(R * s.width * s.element_bytes());
    const TensorView view = answers.view(s.dtype, {R, s.width});
    fill_expert_outputs(workload_, group_.rank(), view);
    check_cuda(cudaMemcpyAsync(y_.view.data, view.data, static_cast<size_t>(view.num_bytes()),
                               cudaMemcpyHostToDevice, stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  const Workload& workload_;
  Group& group_;
  cudaStream_t stream_;
  Dispatcher dispatcher_;
  OwnedTensor expert_ids_, weights_, x_, grad_out_, out_, grad_x_, y_, rows_;
  Plan plan_;
  DispatchResult sent_;
  OwnedTensor values_, scales_;  // x in fp8
  DispatchResult sent_fp8_;
  OwnedTensor back_;
  CombineBackwardResult grads_;
  std::vector<Kept> kept_;
  OwnedTensor host_rows_, host_out_, host_grad_rows_, host_grad_x_;
};

/// How steps are timed, and what they are compared with.
struct CudaTimes {
  Repeats repeats{};
  int num_gpus = 1;
  double bandwidth = 1.0;  // of a copy within the memory of one GPU, in bytes per microsecond
  std::shared_ptr<const CacheFlush> flush{};  // null: another rank flushes
};

/// The stream of a rank that is a process, on the current GPU.
class OwnStream {
 public:
  OwnStream() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// there: rows of a dispatch; back: rows of a combine.
std::vector<Step> steps_of(const Scenario& s, CudaMover& mover, const LinkRows& there,
                           const LinkRows& back) {
  const int64_t once = s.token_bytes() + s.row_bytes();
  const int64_t route_bytes = static_cast<int64_t>(sizeof(int32_t) + sizeof(float));
  const int64_t row_bytes = s.width * s.element_bytes();
  const int64_t crosses_there = there.most_one_way() * row_bytes;
  const int64_t crosses_back = back.most_one_way() * row_bytes;
  const int64_t crosses_both = most_there_and_back(there, back) * row_bytes;
  const int64_t gradients_cross = most_there_and_back(back, back) * row_bytes;
  const auto plan = [&] { mover.plan(); };
  const auto dispatch_again = [&] { mover.dispatch_again(); };
  const auto combine = [&] { mover.combine(); };
  const auto plan_dispatch = [&] {
    mover.plan();
    mover.dispatch();
  };
  const auto step = [&] {
    mover.plan();
    mover.dispatch();
    mover.combine();
  };
  std::vector<Step> steps = {
      {.name = "nothing", .bytes = 0, .run = [] {}},  // the overhead of timing
      {.name = "plan", .bytes = s.ranks * s.tokens * s.top_k * route_bytes, .run = plan},
      {.name = "dispatch", .bytes = once, .link_bytes = crosses_there, .run = dispatch_again},
      {.name = "plan+dispatch", .bytes = once, .link_bytes = crosses_there, .run = plan_dispatch},
      {.name = "combine", .bytes = once, .link_bytes = crosses_back, .run = combine},
      {.name = "dispatch_backward",
       .bytes = once,
       .link_bytes = crosses_back,
       .run = [&] { mover.dispatch_backward(); }},
      {.name = "combine_backward",
       .bytes = once + s.row_bytes(),
       .link_bytes = gradients_cross,
       .run = [&] { mover.combine_backward(); }},
      {.name = "plan+disp.+combine", .bytes = 2 * once, .link_bytes = crosses_both, .run = step}};
  if (CudaMover::has_fp8_steps(s)) {
    const int64_t T = s.ranks * s.tokens;
    const int64_t fp8_row_bytes = s.width + 4 * CudaMover::num_fp8_scales(s);
    const int64_t fp8_once = T * (1 + s.top_k) * fp8_row_bytes;
    const int64_t fp8_crosses = there.most_one_way() * fp8_row_bytes;
    const auto cast_and_dispatch = [&] {
      mover.quantise();
      mover.dispatch_fp8();
      mover.dequantise();
    };
    steps.push_back(
        {.name = "dispatch fp8", .bytes = fp8_once, .link_bytes = fp8_crosses, .run = [&] {
           mover.dispatch_fp8();
         }});
    steps.push_back({.name = "quant.+disp.+deq.",
                     .bytes = fp8_once + T * (1 + s.top_k) * (row_bytes + fp8_row_bytes),
                     .link_bytes = fp8_crosses,
                     .run = cast_and_dispatch});
  }
  return steps;
}

// Calls whose time on the caller's thread is measured.
std::vector<Step> host_calls_of(CudaMover& mover) {
  return {{.name = "host: plan", .run = [&] { mover.plan(); }},
          {.name = "host: dispatch", .run = [&] { mover.dispatch(); }},
          {.name = "host: combine", .run = [&] { mover.combine(); }}};
}

StepResult result_of(const Step& step, const std::vector<double>& times, const CudaTimes& how) {
  StepResult result = summarize(step.name, times);
  result.bytes = step.bytes;
  result.copy_us = static_cast<double>(step.bytes) / (how.bandwidth * how.num_gpus);
  result.link_bytes = step.link_bytes;
  return result;
}

// Rank 0 replays one graph of all ranks.
std::vector<StepResult> time_graphs(Group& group, const std::vector<Step>& steps, CudaMover& mover,
                                    RankStreams& streams, const CudaTimes& how) {
  std::vector<StepResult> results;
  for (const Step& step : steps) {
    step.run();  // allocates memory and fails early, before the capture
    const cudaGraphExec_t graph = streams.capture(group, [&] {
      step.run();
      mover.keep();
    });
    if (group.rank() == 0) {
      results.push_back(
          result_of(step, time_replays(streams, graph, *how.flush, how.repeats), how));
      cudaGraphExecDestroy(graph);
    }
    group.agree({.operation = "bench"});
  }
  return results;
}

// Every rank makes its calls and waits for its stream.
std::vector<StepResult> time_calls(Group& group, std::vector<Step> steps, cudaStream_t stream,
                                   const CudaTimes& how) {
  const auto wait = [stream] {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  for (Step& step : steps) {
    step.run = [run = step.run, wait] {
      run();
      wait();
    };
  }
  const auto times = time_steps(group, steps, how.repeats, [&](size_t /*step*/, bool /*is_timed*/) {
    if (how.flush) how.flush->run();
    wait();
  });
  std::vector<StepResult> results;
  for (size_t i = 0; i < steps.size(); ++i) {
    results.push_back(result_of(steps[i], times[i], how));
  }
  return results;
}

}  // namespace

CudaResult run_cuda_move(const Scenario& scenario, const Repeats& repeats, bool check) {
  request_a_queue_per_stream();
  require_gpu(scenario);
  const Workload workload(scenario);
  const int num_gpus = num_gpus_of(scenario.ranks);
  const bool is_captured = gpus_reach_each_other(num_gpus);
  const Copies copies = is_captured ? scenario.copies : Copies::kPerRoute;
  const LinkRows there = count_link_rows(workload, num_gpus, copies);
  const LinkRows back = count_link_rows(workload, num_gpus, Copies::kPerRoute);
  CudaResult result{.gpus = num_gpus, .link_rate = measure_link_rate(num_gpus)};
  RankStreams streams(scenario.ranks);
  const CudaTimes how{.repeats = repeats,
                      .num_gpus = num_gpus,
                      .bandwidth = measure_copy_bandwidth(streams.of(0)),
                      .flush = std::make_shared<const CacheFlush>(streams.one_per_gpu())};
  run_ranks(scenario.ranks, [&](Group& group) {
    check_cuda(cudaSetDevice(gpu_of_rank(group.rank())), "cudaSetDevice");
    CudaMover mover(workload, group, streams.of(group.rank()));
    const std::vector<Step> steps = steps_of(scenario, mover, there, back);
    CudaTimes own = how;
    if (group.rank() > 0) own.flush = nullptr;  // rank 0 flushes all caches
    std::vector<StepResult> timed = is_captured
                                        ? time_graphs(group, steps, mover, streams, own)
                                        : time_calls(group, steps, streams.of(group.rank()), own);
    if (group.rank() == 0) result.steps = std::move(timed);
    if (check) mover.check();
    for (StepResult& call :
         time_host_calls(group, host_calls_of(mover), streams.of(group.rank()), repeats)) {
      if (group.rank() == 0) result.steps.push_back(std::move(call));
    }
  });
  return result;
}

CudaResult run_cuda_move(const Scenario& scenario, Group& group, const Repeats& repeats,
                         bool check) {
  request_a_queue_per_stream();
  require_gpu(scenario);
  const Workload workload(scenario);
  check_cuda(cudaSetDevice(cuda_device_of(group)), "cudaSetDevice");
  const int num_nodes = group.topology().num_nodes;
  const int num_gpus = std::min(group.size(), num_nodes * cuda_device_count());
  const int num_linked = num_nodes == 1 ? num_gpus : 1;  // a network is not measured
  CudaResult result{.gpus = num_gpus};
  const OwnStream stream;
  CudaTimes how{.repeats = repeats,
                .num_gpus = num_gpus,
                .flush = std::make_shared<const CacheFlush>(std::vector{stream.get()})};
  if (group.rank() == 0) {
    result.link_rate = measure_link_rate(num_linked);
    how.bandwidth = measure_copy_bandwidth(stream.get());
  }
  group.agree({.operation = "bench"});
  CudaMover mover(workload, group, stream.get());
  const LinkRows there = count_link_rows(workload, num_linked, scenario.copies);
  const LinkRows back = count_link_rows(workload, num_linked, Copies::kPerRoute);
  result.steps = time_calls(group, steps_of(scenario, mover, there, back), stream.get(), how);
  if (check) mover.check();
  for (StepResult& call : time_host_calls(group, host_calls_of(mover), stream.get(), repeats)) {
    result.steps.push_back(std::move(call));
  }
  return result;
}

}  // namespace crossdock::bench
