#include "cli/run/rank.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <sstream>

#include "bench/median.hpp"
#include "cli/run/check.hpp"
#include "cli/run/checksum.hpp"
#include "crossdock/planner.hpp"

namespace crossdock::cli {
namespace {

using bench::median;
using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

// Times of one step on one rank.
struct StepTimes {
  double forward_us = 0;
  double backward_us = 0;
  std::vector<OperationTime> operations;  // in the order they began
};

void add(const Event& event, const std::string& name, StepTimes& step) {
  const auto known = std::find_if(step.operations.begin(), step.operations.end(),
                                  [&](const auto& one) { return one.name == name; });
  OperationTime& operation =
      known != step.operations.end() ? *known : step.operations.emplace_back();
  operation.name = name;
  operation.median_us += static_cast<double>(event.end_ns - event.begin_ns) * 1e-3;
  operation.bytes += event.bytes;
}

// As text, so that ranks may have different operations.
std::string to_text(const std::vector<StepTimes>& steps) {
  std::ostringstream text;
  for (const StepTimes& step : steps) {
    text << "step " << step.forward_us << ' ' << step.backward_us << '\n';
    for (const OperationTime& operation : step.operations) {
      text << operation.name << ' ' << operation.median_us << ' ' << operation.bytes << '\n';
    }
  }
  return text.str();
}

std::vector<StepTimes> from_text(std::span<const std::byte> body) {
  std::istringstream text(std::string(reinterpret_cast<const char*>(body.data()), body.size()));
  std::vector<StepTimes> steps;
  for (std::string name; text >> name;) {
    if (name == "step") {
      StepTimes& step = steps.emplace_back();
      text >> step.forward_us >> step.backward_us;
    } else {
      OperationTime& operation = steps.back().operations.emplace_back();
      operation.name = name;
      text >> operation.median_us >> operation.bytes;
    }
  }
  return steps;
}

Agreement share(Group& group, const char* operation, std::span<const std::byte> body) {
  return group.agree({.operation = operation, .body = body});
}

double median_of(const std::vector<StepTimes>& steps, double StepTimes::*time) {
  std::vector<double> times;
  times.reserve(steps.size());
  for (const StepTimes& step : steps) times.push_back(step.*time);
  return median(times);
}

// Takes the slowest rank of each step, then the median over the steps.
void merge_times(Group& group, const std::vector<StepTimes>& own, RunResult& result) {
  const std::string text = to_text(own);
  const Agreement all = share(group, "run_times", std::as_bytes(std::span(text)));
  std::vector<double> forward(own.size());
  std::vector<double> backward(own.size());
  result.steps_us.assign(own.size(), 0);
  std::map<std::string, std::vector<double>> slowest;
  std::map<std::string, int64_t> bytes;
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::vector<StepTimes> steps = from_text(all.body(rank));
    result.rank_times.push_back({.forward_us = median_of(steps, &StepTimes::forward_us),
                                 .backward_us = median_of(steps, &StepTimes::backward_us)});
    for (size_t i = 0; i < steps.size(); ++i) {
      forward[i] = std::max(forward[i], steps[i].forward_us);
      backward[i] = std::max(backward[i], steps[i].backward_us);
      result.steps_us[i] = std::max(result.steps_us[i], steps[i].forward_us + steps[i].backward_us);
      for (const OperationTime& operation : steps[i].operations) {
        std::vector<double>& times = slowest[operation.name];
        times.resize(own.size());
        times[i] = std::max(times[i], operation.median_us);
        if (i == 0) bytes[operation.name] += operation.bytes;
      }
    }
  }
  result.forward_us = bench::median(forward);
  result.backward_us = bench::median(backward);
  for (const OperationTime& operation : own[0].operations) {
    result.operations.push_back(
        {operation.name, bench::median(slowest[operation.name]), bytes[operation.name]});
  }
}

void merge_traffic(Group& group, RunResult& result) {
  const Traffic own = group.communicator().traffic();
  const Agreement all = share(group, "run_traffic", std::as_bytes(std::span(&own, 1)));
  for (int rank = 0; rank < group.size(); ++rank) {
    Traffic one;
    std::copy_n(all.body(rank).begin(), sizeof(one), reinterpret_cast<std::byte*>(&one));
    result.traffic.bytes_within_node += one.bytes_within_node;
    result.traffic.bytes_between_nodes += one.bytes_between_nodes;
    result.traffic.requests_posted += one.requests_posted;
    result.traffic.max_requests_in_flight =
        std::max(result.traffic.max_requests_in_flight, one.max_requests_in_flight);
  }
}

void merge_memory(Group& group, RunResult& result) {
  const GroupMemory own = group.memory();
  const Agreement all = share(group, "run_memory", std::as_bytes(std::span(&own, 1)));
  for (int rank = 0; rank < group.size(); ++rank) {
    GroupMemory one;
    std::copy_n(all.body(rank).begin(), sizeof(one), reinterpret_cast<std::byte*>(&one));
    if (one.pool_bytes + one.window_bytes > result.memory.pool_bytes + result.memory.window_bytes) {
      result.memory = one;
    }
  }
}

// Memory that the cost model predicts for a rank after a step, forward and backward.
int64_t planned_bytes(Group& group, const RunJob& job, const DispatchConfig& config,
                      const std::string& strategy) {
  const CostEstimate costs = estimate_costs({.config = config,
                                             .topology = group.topology(),
                                             .tokens = job.num_tokens(0),
                                             .dtype = job.dtype(),
                                             .staging_bytes = group.options().staging_bytes});
  for (const StrategyCost& cost : costs.strategies) {
    if (cost.name != strategy) continue;
    const MemoryNeed& need = cost.memory.expected;
    return static_cast<int64_t>(need.pool_bytes + need.window_bytes);
  }
  return 0;
}

// Every rank knows the rows of its own experts. Experts are ordered by rank.
void merge_load(Group& group, const Plan& plan, RankDevice& device, RunResult& result) {
  const Segments segments = plan.segments();
  std::vector<int64_t> own = {plan.num_rows()};
  if (segments.num_segments > 0) {
    const OwnedTensor counts =
        device.to_host({segments.counts, DType::kI64, {segments.num_segments}, segments.device});
    const auto rows = counts.view.as<int64_t>();
    own.insert(own.end(), rows.begin(), rows.end());
  }
  const Agreement all = share(group, "run_load", std::as_bytes(std::span(own)));
  for (int rank = 0; rank < group.size(); ++rank) {
    std::vector<int64_t> one(all.body(rank).size() / sizeof(int64_t));
    std::memcpy(one.data(), all.body(rank).data(), all.body(rank).size());
    result.rows_per_rank.push_back(one[0]);
    result.rows_per_expert.insert(result.rows_per_expert.end(), one.begin() + 1, one.end());
  }
}

// Counts this rank's routes by the rank of their experts.
void merge_routes(Group& group, const RunJob& job, const RouterOutput& routes, RunResult& result) {
  std::vector<int64_t> own(static_cast<size_t>(group.size()));
  std::vector<int> rank_of_expert;
  for (int rank = 0; rank < group.size(); ++rank) {
    rank_of_expert.resize(
        static_cast<size_t>(first_expert(job.layer.router.num_experts, group.size(), rank + 1)),
        rank);
  }
  for (const int32_t expert : routes.routing().expert_ids.as<int32_t>()) {
    ++own[static_cast<size_t>(rank_of_expert[static_cast<size_t>(expert)])];
  }
  const Agreement all = share(group, "run_routes", std::as_bytes(std::span(own)));
  for (int rank = 0; rank < group.size(); ++rank) {
    std::vector<int64_t>& row = result.rows_from_to.emplace_back(own.size());
    std::memcpy(row.data(), all.body(rank).data(), all.body(rank).size());
  }
}

void merge_gpus(Group& group, const RankDevice& device, RunResult& result) {
  const int own = device.device().index;
  const Agreement all = share(group, "run_gpus", std::as_bytes(std::span(&own, 1)));
  for (int rank = 0; rank < group.size(); ++rank) {
    std::memcpy(&result.gpu_of_rank.emplace_back(), all.body(rank).data(), sizeof(int));
  }
}

// Ids and weights of the routes, for the check.
std::shared_ptr<const RouterOutput> routes_on_host(const RouterOutput& routes, RankDevice& device) {
  auto copy = std::make_shared<RouterOutput>();
  copy->T = routes.T;
  copy->K = routes.K;
  copy->E = routes.E;
  copy->weight_dtype = routes.weight_dtype;
  copy->expert_ids = Buffer(routes.expert_ids.num_bytes());
  copy->weights = Buffer(routes.weights.num_bytes());
  const Routing from = routes.routing();
  const Shape shape{routes.T, routes.K};
  device.read(from.expert_ids, copy->expert_ids.view(DType::kI32, shape));
  device.read(from.weights, copy->weights.view(routes.weight_dtype, shape));
  return copy;
}

// Copies the results to be compared and printed from a GPU to the host.
void read_outcome(RankDevice& device, RunOutcome& outcome) {
  outcome.out = device.to_host(outcome.out.view);
  if (outcome.grad_x.view.given()) outcome.grad_x = device.to_host(outcome.grad_x.view);
  outcome.decision.router = routes_on_host(*outcome.decision.router, device);
}

// Runs and times one step and its operations. On a GPU, forward and backward include the wait for
// their results, operations only the time to queue them.
StepTimes run_step(Group& group, const RunJob& job, const RunTensors& tensors, MoeLayer& layer,
                   RankDevice& device, RunOutcome& outcome, TraceLog& log) {
  outcome = {};
  share(group, "run_step", {});
  const Clock::time_point begin = Clock::now();
  MoeForwardResult forward = layer.forward({.weights = tensors.weights, .x = tensors.x.view});
  device.wait();
  const Clock::time_point middle = Clock::now();
  if (job.with_backward) {
    outcome.grad_x = layer.backward({.weights = tensors.weights,
                                     .x = tensors.x.view,
                                     .grad_out = tensors.grad_out.view,
                                     .saved = &forward.saved,
                                     .grads = tensors.grads});
    device.wait();
  }
  const Clock::time_point end = Clock::now();
  outcome.out = std::move(forward.out);
  outcome.decision = std::move(forward.saved.decision);
  StepTimes step{.forward_us = microseconds(middle - begin),
                 .backward_us = microseconds(end - middle),
                 .operations = {}};
  const auto nanoseconds = [](Clock::time_point time) {
    return std::chrono::nanoseconds(time.time_since_epoch()).count();
  };
  const std::vector<Event> events = group.recorder().events();
  if (!job.trace_file.empty()) {
    const bool is_whole =
        std::ssize(events) < kRecordedEvents || events.front().begin_ns < nanoseconds(begin);
    log.add_step(events, is_whole);
  }
  for (const Event& event : events) {
    if (event.begin_ns < nanoseconds(begin) || !std::string_view(event.phase).empty()) continue;
    const bool is_again =
        event.begin_ns >= nanoseconds(middle) && std::string_view(event.operation) == "dispatch";
    add(event, is_again ? "dispatch_grad" : event.operation, step);
  }
  return step;
}

}  // namespace

RunResult run_rank(Group& group, const RunJob& job, const StepProgress& progress) {
  const auto say = [&](const std::string& words) {
    if (group.rank() == 0) progress(words);
  };
  say("creating parameters");
  const RunValues values(job);
  const std::unique_ptr<RankDevice> device = make_rank_device(job.device, group);
  const RunTensors on_host(job, values, group);
  std::optional<RunTensors> on_gpu;
  if (device->is_gpu()) on_gpu.emplace(on_host, *device);
  const RunTensors& tensors = on_gpu ? *on_gpu : on_host;
  MoeLayerConfig layer_config = job.layer;
  layer_config.allow_equal_tokens = true;  // random values: narrow tokens may be equal by chance
  MoeLayer layer(group, layer_config,
                 {.device = {.stream = device->stream(), .max_begun_sms = job.overlap_sms}});
  RunOutcome outcome;
  TraceLog log;
  std::vector<StepTimes> times;
  for (int step = 0; step < job.num_steps; ++step) {
    say("step " + std::to_string(step + 1) + " of " + std::to_string(job.num_steps));
    times.push_back(run_step(group, job, tensors, layer, *device, outcome, log));
  }
  RunResult result;
  if (!job.trace_file.empty()) result.trace = write_trace(group, log, job.trace_file);
  say("checking");
  result.strategy = layer.config().strategy;
  result.num_nodes = group.topology().num_nodes;
  result.note = group.communicator().note();
  const DispatchConfig& config = layer.config().dispatch;
  result.planned_bytes = planned_bytes(group, job, config, result.strategy);
  merge_traffic(group, result);
  merge_memory(group, result);
  merge_times(group, times, result);
  merge_load(group, outcome.decision.plan, *device, result);
  if (on_gpu) {
    merge_gpus(group, *device, result);
    read_outcome(*device, outcome);
    on_host.read_gradients(*on_gpu, *device);
  }
  merge_routes(group, job, *outcome.decision.router, result);
  result.checksum = checksum(group, outcome.out.view);
  if (job.with_backward) result.grad_checksum = checksum(group, outcome.grad_x.view);
  if (job.with_check) result.check = check_run(group, job, values, on_host, outcome);
  return result;
}

}  // namespace crossdock::cli
