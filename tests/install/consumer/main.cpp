// Sends one token of every rank to two experts, which return it unchanged, and prints the sums.

#include <crossdock/crossdock.hpp>
#include <cstdio>
#include <vector>

int main() {
  using namespace crossdock;
  std::vector<float> sums(3);
  run_ranks(3, [&](Group& group) {
    Dispatcher dispatcher(group, {.num_experts = 6, .top_k = 2, .width = 4}, "alltoall");
    const auto rank = static_cast<float>(group.rank());
    const std::vector<float> x = {rank, rank + 1, rank + 2, rank + 3};
    const std::vector<int32_t> expert_ids = {group.rank(), 5 - group.rank()};
    const std::vector<float> weights = {0.25f, 0.5f};
    const Plan plan = dispatcher.plan(
        {.expert_ids = {expert_ids.data(), {1, 2}}, .weights = {weights.data(), {1, 2}}});
    const DispatchResult sent = dispatcher.dispatch(plan, {.x = {x.data(), {1, 4}}});
    const OwnedTensor out = dispatcher.combine(plan, sent.rows.view);
    for (const float value : out.view.as<float>()) sums[size_t(group.rank())] += value;
  });
  std::printf("sums %g %g %g\n", sums[0], sums[1], sums[2]);
  return sums == std::vector<float>{4.5f, 7.5f, 10.5f} ? 0 : 1;
}
