// Callers that were compiled against an older or a newer header.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "capi/c_ranks.hpp"

extern "C" int count_wrong_inits();  // c_header.c

namespace crossdock::capi_test {
namespace {

TEST(StructSize, IsAllThatAnInitMacroSets) {
  EXPECT_EQ(count_wrong_inits(), 0);
}

TEST(StructSize, AnOlderSmallerConfigHasDefaultsForTheRest) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    auto config = Case::config();
    config.struct_size = offsetof(crossdock_dispatch_config, alignment);
    config.alignment = 12;  // invalid, but beyond the struct
    crossdock_dispatcher* dispatcher = nullptr;
    ASSERT_OK(crossdock_dispatcher_create(group, &config, &dispatcher));
    const Case input(0);
    const crossdock_routing routing = input.routing();
    crossdock_plan* plan = nullptr;
    EXPECT_OK(crossdock_plan_create(dispatcher, &routing, &plan));
    crossdock_plan_destroy(plan);
    crossdock_dispatcher_destroy(dispatcher);
  });
}

TEST(StructSize, AnOlderSmallerInfoIsNotWrittenBeyondItsEnd) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    crossdock_group_info info{};
    info.struct_size = offsetof(crossdock_group_info, num_nodes);
    info.num_nodes = -5;
    ASSERT_OK(crossdock_group_describe(group, &info));
    EXPECT_EQ(info.size, 1);
    EXPECT_EQ(info.num_nodes, -5);
    EXPECT_EQ(info.struct_size, offsetof(crossdock_group_info, num_nodes));
  });
}

// The config of an imaginary later version.
struct LaterConfig {
  crossdock_group_config known;
  int64_t later_field;
};

TEST(StructSize, ANewerLargerConfigIsAcceptedIfItsNewFieldsAreZero) {
  LaterConfig config{};
  config.known.struct_size = sizeof config;
  crossdock_group* group = nullptr;
  ASSERT_OK(crossdock_group_from_threads(1, &config.known, &group));
  crossdock_group_destroy(group);

  config.later_field = 1;
  EXPECT_EQ(crossdock_group_from_threads(1, &config.known, &group), CROSSDOCK_INVALID_ARGUMENT);
  EXPECT_NE(std::string(crossdock_last_error()).find("this library does not know"),
            std::string::npos);
}

// An uninitialised struct must not be read beyond its end.
TEST(StructSize, SizesThatNoVersionHasAreRefused) {
  crossdock_group_config config{};
  crossdock_group* group = nullptr;
  for (const size_t size :
       {size_t{0}, size_t{7}, sizeof config - 4, sizeof config + 1, size_t{16392}, ~size_t{0}}) {
    config.struct_size = size;
    EXPECT_EQ(crossdock_group_from_threads(1, &config, &group), CROSSDOCK_INVALID_ARGUMENT) << size;
    EXPECT_EQ(std::string(crossdock_last_error()),
              "crossdock_group_config: struct_size must be a multiple of 8 from 8 to 16384, got " +
                  std::to_string(size) + "; initialise the struct with its _INIT macro");
  }
  EXPECT_EQ(group, nullptr);
}

TEST(StructSize, AnOlderSmallerResultGetsTheOutputsThatItHas) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    const Case input(0);
    const Planned planned(group, input);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    args.with_row_weights = 1;
    auto whole = made<crossdock_dispatch_result>();
    ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &whole));

    auto sent = made<crossdock_dispatch_result>();
    sent.struct_size = offsetof(crossdock_dispatch_result, row_weights);
    std::memset(&sent.row_weights, 0x55, sizeof sent.row_weights);  // beyond the struct
    const crossdock_output untouched = sent.row_weights;
    ASSERT_OK(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent));
    EXPECT_EQ(doubles(sent.rows.tensor), doubles(whole.rows.tensor));
    EXPECT_EQ(std::memcmp(&sent.row_weights, &untouched, sizeof untouched), 0);
    EXPECT_EQ(sent.struct_size, offsetof(crossdock_dispatch_result, row_weights));
    EXPECT_OK(crossdock_output_release(&sent.rows, nullptr));

    crossdock_pending* pending = nullptr;
    ASSERT_OK(crossdock_begin_dispatch(planned.dispatcher, planned.plan, &args, nullptr, &pending));
    ASSERT_OK(crossdock_finish_dispatch(planned.dispatcher, pending, &sent));
    EXPECT_EQ(doubles(sent.rows.tensor), doubles(whole.rows.tensor));
    EXPECT_EQ(std::memcmp(&sent.row_weights, &untouched, sizeof untouched), 0);
    for (crossdock_output* output : {&sent.rows, &whole.rows, &whole.row_weights}) {
      EXPECT_OK(crossdock_output_release(output, nullptr));
    }
  });
}

TEST(StructSize, AResultMustHaveItsFirstOutput) {
  run_c_ranks(1, [](crossdock_group* group, int /*rank*/) {
    const Case input(0);
    const Planned planned(group, input);
    auto args = made<crossdock_dispatch_args>();
    args.x = tensor(input.x, input.T, Case::D);
    auto sent = made<crossdock_dispatch_result>();
    sent.struct_size = sizeof(size_t);
    EXPECT_EQ(crossdock_dispatch(planned.dispatcher, planned.plan, &args, &sent),
              CROSSDOCK_INVALID_ARGUMENT);
    EXPECT_EQ(sent.rows.owner, nullptr);
  });
}

}  // namespace
}  // namespace crossdock::capi_test
