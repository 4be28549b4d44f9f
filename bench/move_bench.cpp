#include "bench/move_bench.hpp"

#include "bench/check.hpp"
#include "bench/mover.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::bench {
namespace {

std::vector<Step> move_steps(const Scenario& s, Mover& mover) {
  const int64_t tokens = s.token_bytes();
  const int64_t rows = s.row_bytes();
  std::vector<Step> steps = {
      {.name = "dispatch",
       .bytes = tokens + rows,
       .num_written = rows,
       .run = [&] { mover.dispatch(); }},
      {.name = "combine", .bytes = tokens + rows, .num_written = tokens, .run = [&] {
         mover.combine();
       }}};
  if (s.backward) {
    steps.push_back(
        {.name = "combine_backward", .bytes = tokens + 2 * rows, .num_written = rows, .run = [&] {
           mover.combine_backward();
         }});
    steps.push_back(
        {.name = "dispatch_backward", .bytes = tokens + rows, .num_written = tokens, .run = [&] {
           mover.dispatch_backward();
         }});
  }
  return steps;
}

// Reads expert ids and weights only.
Step plan_step(const Scenario& s, Mover& mover) {
  const int64_t route_bytes = static_cast<int64_t>(sizeof(int32_t) + sizeof(float));
  return {.name = "plan", .bytes = s.ranks * s.tokens * s.top_k * route_bytes, .run = [&] {
            mover.plan();
          }};
}

}  // namespace

std::vector<StepResult> run_move(const Workload& workload, Group& group, std::string_view strategy,
                                 const Repeats& repeats, bool check) {
  const Scenario& scenario = workload.scenario();
  const int rank = group.rank();
  const Shape shape{scenario.tokens, scenario.width};
  const Buffer x(shape.num_elements() * scenario.element_bytes());
  const Buffer grad_out(scenario.backward ? x.num_bytes() : 0);
  const int64_t row_bytes = scenario.width * scenario.element_bytes();
  for (int64_t t = 0; t < scenario.tokens; ++t) {
    workload.token(rank, t, x.data() + t * row_bytes);
    if (scenario.backward) workload.grad_out(rank, t, grad_out.data() + t * row_bytes);
  }
  const MoverInputs inputs{
      .workload = workload,
      .group = group,
      .x = x.view(scenario.dtype, shape),
      .grad_out = scenario.backward ? grad_out.view(scenario.dtype, shape) : ConstTensorView{}};
  const std::unique_ptr<Mover> mover =
      strategy == kAnchorName ? make_anchor_mover(inputs) : make_library_mover(inputs, strategy);

  // Rows are filled once per plan, so plans are measured first and the last one is used.
  std::vector<StepResult> results = measure(group, {plan_step(scenario, *mover)}, repeats);
  fill_expert_outputs(workload, rank, mover->y());
  for (StepResult& step : measure(group, move_steps(scenario, *mover), repeats)) {
    results.push_back(std::move(step));
  }
  if (check) check_move(workload, rank, *mover);
  return results;
}

}  // namespace crossdock::bench
