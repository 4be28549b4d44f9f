/* crossdock.h in C99: every _INIT macro sets struct_size and nothing else. */
#include <string.h>

#include "crossdock/crossdock.h"

int count_wrong_inits(void);

/* The structs have no hidden padding, so all other bytes are fields. */
static int is_wrong(const void* data, size_t num_bytes) {
  const unsigned char* bytes = data;
  size_t struct_size = 0;
  memcpy(&struct_size, data, sizeof struct_size);
  for (size_t i = sizeof struct_size; i < num_bytes; ++i) {
    if (bytes[i] != 0) return 1;
  }
  return struct_size != num_bytes;
}

#define CHECK(type, init)                          \
  do {                                             \
    static const type kValue = init;               \
    num_wrong += is_wrong(&kValue, sizeof kValue); \
  } while (0)

int count_wrong_inits(void) {
  int num_wrong = 0;
  CHECK(crossdock_error_info, CROSSDOCK_ERROR_INFO_INIT);
  CHECK(crossdock_group_config, CROSSDOCK_GROUP_CONFIG_INIT);
  CHECK(crossdock_bootstrap_config, CROSSDOCK_BOOTSTRAP_CONFIG_INIT);
  CHECK(crossdock_join_args, CROSSDOCK_JOIN_ARGS_INIT);
  CHECK(crossdock_communicator, CROSSDOCK_COMMUNICATOR_INIT);
  CHECK(crossdock_group_info, CROSSDOCK_GROUP_INFO_INIT);
  CHECK(crossdock_dispatch_config, CROSSDOCK_DISPATCH_CONFIG_INIT);
  CHECK(crossdock_device_options, CROSSDOCK_DEVICE_OPTIONS_INIT);
  CHECK(crossdock_routing, CROSSDOCK_ROUTING_INIT);
  CHECK(crossdock_plan_info, CROSSDOCK_PLAN_INFO_INIT);
  CHECK(crossdock_dispatch_result, CROSSDOCK_DISPATCH_RESULT_INIT);
  CHECK(crossdock_dispatch_args, CROSSDOCK_DISPATCH_ARGS_INIT);
  CHECK(crossdock_combine_backward_args, CROSSDOCK_COMBINE_BACKWARD_ARGS_INIT);
  CHECK(crossdock_combine_backward_result, CROSSDOCK_COMBINE_BACKWARD_RESULT_INIT);
  CHECK(crossdock_experts_config, CROSSDOCK_EXPERTS_CONFIG_INIT);
  CHECK(crossdock_experts_forward_args, CROSSDOCK_EXPERTS_FORWARD_ARGS_INIT);
  CHECK(crossdock_experts_backward_args, CROSSDOCK_EXPERTS_BACKWARD_ARGS_INIT);
  CHECK(crossdock_quantise_rows_args, CROSSDOCK_QUANTISE_ROWS_ARGS_INIT);
  CHECK(crossdock_dequantise_rows_args, CROSSDOCK_DEQUANTISE_ROWS_ARGS_INIT);
  CHECK(crossdock_router_config, CROSSDOCK_ROUTER_CONFIG_INIT);
  CHECK(crossdock_layer_config, CROSSDOCK_LAYER_CONFIG_INIT);
  CHECK(crossdock_layer_forward_args, CROSSDOCK_LAYER_FORWARD_ARGS_INIT);
  CHECK(crossdock_layer_forward_result, CROSSDOCK_LAYER_FORWARD_RESULT_INIT);
  CHECK(crossdock_layer_report, CROSSDOCK_LAYER_REPORT_INIT);
  CHECK(crossdock_layer_backward_args, CROSSDOCK_LAYER_BACKWARD_ARGS_INIT);
  CHECK(crossdock_mesh_shape, CROSSDOCK_MESH_SHAPE_INIT);
  CHECK(crossdock_mesh_coordinates, CROSSDOCK_MESH_COORDINATES_INIT);
  CHECK(crossdock_mesh_gradients, CROSSDOCK_MESH_GRADIENTS_INIT);
  CHECK(crossdock_job, CROSSDOCK_JOB_INIT);
  CHECK(crossdock_job_summary, CROSSDOCK_JOB_SUMMARY_INIT);
  CHECK(crossdock_strategy_cost, CROSSDOCK_STRATEGY_COST_INIT);
  CHECK(crossdock_sequence_layout, CROSSDOCK_SEQUENCE_LAYOUT_INIT);
  CHECK(crossdock_sequence_shard_info, CROSSDOCK_SEQUENCE_SHARD_INFO_INIT);
  CHECK(crossdock_balance_args, CROSSDOCK_BALANCE_ARGS_INIT);
  return num_wrong;
}
