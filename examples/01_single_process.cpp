// Four ranks as threads of one process: tokens go to their experts and return.
#include <crossdock/crossdock.hpp>
#include <cstdio>
using namespace crossdock;

int main() {
  run_ranks(4, [](Group& group) {  // on each rank:
    Dispatcher dispatcher(group, {.num_experts = 8, .top_k = 2, .width = 4}, "auto");
    const std::vector<float> x = {1, 2, 3, 4};       // [T, D]: one token
    const std::vector<int32_t> expert_ids = {0, 5};  // [T, K]: the experts it goes to
    const std::vector<float> weights = {0.25f, 0.75f};
    const Plan plan = dispatcher.plan(
        {.expert_ids = {expert_ids.data(), {1, 2}}, .weights = {weights.data(), {1, 2}}});
    const DispatchResult sent = dispatcher.dispatch(plan, {.x = {x.data(), {1, 4}}});
    // sent.rows are grouped by local expert, see plan.segments(); here an expert returns its rows.
    const OwnedTensor out = dispatcher.combine(plan, sent.rows.view);  // 0.25 x + 0.75 x
    const std::span<const float> values = out.view.as<float>();
    std::printf("rank %d: %g %g %g %g\n", group.rank(), values[0], values[1], values[2], values[3]);
  });
}
