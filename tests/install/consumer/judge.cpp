// Compares a strategy with the reference of crossdock::testing.

#include <crossdock/crossdock.hpp>
#include <crossdock/testing/conformance.hpp>
#include <cstdio>

int main() {
  using namespace crossdock;
  bool is_right = true;
  run_ranks(2, [&](Group& group) {
    const uint64_t hash = conformance::output_hash(group, [] { return make_strategy("alltoall"); });
    if (group.rank() == 0) is_right = hash == conformance::expected_output_hash();
  });
  std::printf("alltoall is %s\n", is_right ? "right" : "wrong");
  return is_right ? 0 : 1;
}
