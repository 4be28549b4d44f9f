// The planner: any job is planned or is an Error, with costs that are numbers.
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "crossdock/error.hpp"
#include "crossdock/planner.hpp"
#include "fuzz/input.hpp"

namespace crossdock::fuzz {
namespace {

/// Mostly a size that a job can have; sometimes any number.
int64_t size(Input& input, int64_t most) {
  return input.one_in(16) ? input.take<int64_t>() : 1 + input.integer(0, most);
}

double factor(Input& input) {
  return input.one_in(8) ? input.take<double>() : static_cast<double>(input.integer(0, 64)) / 16;
}

JobDescription job_from(Input& input) {
  JobDescription job;
  job.width = size(input, 8192);
  job.inner = size(input, 4096);
  job.num_experts = size(input, 300);
  job.top_k = size(input, 12);
  job.dtype = static_cast<DType>(input.integer(-1, 12));
  job.sequence = size(input, 8192);
  job.micro_batch = size(input, 4);
  if (input.one_in(2)) job.tokens = size(input, 8192);
  job.nodes = size(input, 9);
  job.ranks_per_node = size(input, 8);
  job.tp = size(input, 4);
  job.cp = size(input, 4);
  job.pp = size(input, 4);
  if (input.one_in(2)) job.ep = size(input, 64);
  job.alignment = input.one_in(4) ? size(input, 256) : 1;
  if (input.one_in(2)) job.capacity = factor(input);
  job.partial_sums = static_cast<PartialSums>(input.integer(0, 2));
  job.copies = static_cast<Copies>(input.integer(0, 2));
  job.zipf = factor(input);
  job.fabric = kFabricPresets[static_cast<size_t>(input.integer(0, kFabricPresets.size() - 1))];
  if (input.one_in(4)) job.fabric.memory_bytes = size(input, 1 << 30);
  if (input.one_in(8)) job.fabric.memory_rate = factor(input);
  if (input.one_in(8)) job.fabric.within_node_rate = factor(input);
  if (input.one_in(8)) job.fabric.between_nodes_rate = factor(input);
  if (input.one_in(8)) job.fabric.send_queue_depth = size(input, 1 << 16);
  return job;
}

}  // namespace
}  // namespace crossdock::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  crossdock::fuzz::Input input(data, size);
  const crossdock::JobDescription job = crossdock::fuzz::job_from(input);
  try {
    const crossdock::JobPlan plan = crossdock::plan_job(job);
    if (plan.choice.name.empty()) std::abort();
    for (const crossdock::StrategyCost& cost : plan.costs.strategies) {
      if (!(cost.step_serial_s >= 0) || !(cost.memory.expected.total() >= 0)) std::abort();
    }
  } catch (const crossdock::Error&) {
  }
  return 0;
}
