// Structs of groups and dispatchers, and all constants.
#include "capi/abi.hpp"

namespace {

TEST(CAbi, ErrorInfo) {
  EXPECT_SIZE(crossdock_error_info, 32);
  EXPECT_FIELD(crossdock_error_info, struct_size, 0);
  EXPECT_FIELD(crossdock_error_info, status, 8);
  EXPECT_FIELD(crossdock_error_info, culprit, 12);
  EXPECT_FIELD(crossdock_error_info, sequence, 16);
  EXPECT_FIELD(crossdock_error_info, operation, 24);
}

TEST(CAbi, Tensor) {
  EXPECT_SIZE(crossdock_tensor, 56);
  EXPECT_FIELD(crossdock_tensor, data, 0);
  EXPECT_FIELD(crossdock_tensor, shape, 8);
  EXPECT_FIELD(crossdock_tensor, num_dims, 40);
  EXPECT_FIELD(crossdock_tensor, dtype, 44);
  EXPECT_FIELD(crossdock_tensor, device_kind, 48);
  EXPECT_FIELD(crossdock_tensor, device_index, 52);
}

TEST(CAbi, Output) {
  EXPECT_SIZE(crossdock_output, 64);
  EXPECT_FIELD(crossdock_output, tensor, 0);
  EXPECT_FIELD(crossdock_output, owner, 56);
}

TEST(CAbi, WaitNotice) {
  EXPECT_SIZE(crossdock_wait_notice, 72);
  EXPECT_FIELD(crossdock_wait_notice, struct_size, 0);
  EXPECT_FIELD(crossdock_wait_notice, rank, 8);
  EXPECT_FIELD(crossdock_wait_notice, size, 12);
  EXPECT_FIELD(crossdock_wait_notice, awaited, 16);
  EXPECT_FIELD(crossdock_wait_notice, num_awaited, 24);
  EXPECT_FIELD(crossdock_wait_notice, padding, 28);
  EXPECT_FIELD(crossdock_wait_notice, sequence, 32);
  EXPECT_FIELD(crossdock_wait_notice, operation, 40);
  EXPECT_FIELD(crossdock_wait_notice, waited_s, 48);
  EXPECT_FIELD(crossdock_wait_notice, left_s, 56);
  EXPECT_FIELD(crossdock_wait_notice, text, 64);
}

TEST(CAbi, GroupConfig) {
  EXPECT_SIZE(crossdock_group_config, 120);
  EXPECT_FIELD(crossdock_group_config, struct_size, 0);
  EXPECT_FIELD(crossdock_group_config, arrival_deadline_s, 8);
  EXPECT_FIELD(crossdock_group_config, progress_deadline_s, 16);
  EXPECT_FIELD(crossdock_group_config, setup_deadline_s, 24);
  EXPECT_FIELD(crossdock_group_config, recorded_events, 32);
  EXPECT_FIELD(crossdock_group_config, staging_bytes, 40);
  EXPECT_FIELD(crossdock_group_config, report_file, 48);
  EXPECT_FIELD(crossdock_group_config, num_threads, 56);
  EXPECT_FIELD(crossdock_group_config, ranks_per_node, 60);
  EXPECT_FIELD(crossdock_group_config, on_wait, 64);
  EXPECT_FIELD(crossdock_group_config, on_wait_context, 72);
  EXPECT_FIELD(crossdock_group_config, notice_after_s, 80);
  EXPECT_FIELD(crossdock_group_config, setup_notice_after_s, 88);
  EXPECT_FIELD(crossdock_group_config, on_log, 96);
  EXPECT_FIELD(crossdock_group_config, on_log_context, 104);
  EXPECT_FIELD(crossdock_group_config, log_level, 112);
  EXPECT_FIELD(crossdock_group_config, log_padding, 116);
}

TEST(CAbi, BootstrapConfig) {
  EXPECT_SIZE(crossdock_bootstrap_config, 72);
  EXPECT_FIELD(crossdock_bootstrap_config, struct_size, 0);
  EXPECT_FIELD(crossdock_bootstrap_config, address, 8);
  EXPECT_FIELD(crossdock_bootstrap_config, setup_deadline_s, 16);
  EXPECT_FIELD(crossdock_bootstrap_config, interrupt, 24);
  EXPECT_FIELD(crossdock_bootstrap_config, interrupt_context, 32);
  EXPECT_FIELD(crossdock_bootstrap_config, ranks_per_node, 40);
  EXPECT_FIELD(crossdock_bootstrap_config, padding, 44);
  EXPECT_FIELD(crossdock_bootstrap_config, on_wait, 48);
  EXPECT_FIELD(crossdock_bootstrap_config, on_wait_context, 56);
  EXPECT_FIELD(crossdock_bootstrap_config, notice_after_s, 64);
}

TEST(CAbi, JoinArgs) {
  EXPECT_SIZE(crossdock_join_args, 32);
  EXPECT_FIELD(crossdock_join_args, struct_size, 0);
  EXPECT_FIELD(crossdock_join_args, bytes, 8);
  EXPECT_FIELD(crossdock_join_args, offsets, 16);
  EXPECT_FIELD(crossdock_join_args, rank, 24);
  EXPECT_FIELD(crossdock_join_args, size, 28);
}

TEST(CAbi, Wait) {
  EXPECT_SIZE(crossdock_chunk, 40);
  EXPECT_FIELD(crossdock_chunk, callback, 0);
  EXPECT_FIELD(crossdock_chunk, result, 8);
  EXPECT_FIELD(crossdock_chunk, first_expert, 16);
  EXPECT_FIELD(crossdock_chunk, last_expert, 24);
  EXPECT_FIELD(crossdock_chunk, status, 32);
  EXPECT_FIELD(crossdock_chunk, padding, 36);
  EXPECT_SIZE(crossdock_wait, 32);
  EXPECT_FIELD(crossdock_wait, operation, 0);
  EXPECT_FIELD(crossdock_wait, sequence, 8);
  EXPECT_FIELD(crossdock_wait, arrival_s, 16);
  EXPECT_FIELD(crossdock_wait, progress_s, 24);
}

TEST(CAbi, Communicator) {
  EXPECT_SIZE(crossdock_communicator, 80);
  EXPECT_FIELD(crossdock_communicator, struct_size, 0);
  EXPECT_FIELD(crossdock_communicator, context, 8);
  EXPECT_FIELD(crossdock_communicator, rank, 16);
  EXPECT_FIELD(crossdock_communicator, size, 20);
  EXPECT_FIELD(crossdock_communicator, node_of_rank, 24);
  EXPECT_FIELD(crossdock_communicator, all_gather_v, 32);
  EXPECT_FIELD(crossdock_communicator, all_to_all_v, 40);
  EXPECT_FIELD(crossdock_communicator, subgroup, 48);
  EXPECT_FIELD(crossdock_communicator, abort, 56);
  EXPECT_FIELD(crossdock_communicator, leave, 64);
  EXPECT_FIELD(crossdock_communicator, destroy, 72);
}

TEST(CAbi, GroupInfo) {
  EXPECT_SIZE(crossdock_group_info, 64);
  EXPECT_FIELD(crossdock_group_info, struct_size, 0);
  EXPECT_FIELD(crossdock_group_info, rank, 8);
  EXPECT_FIELD(crossdock_group_info, size, 12);
  EXPECT_FIELD(crossdock_group_info, num_nodes, 16);
  EXPECT_FIELD(crossdock_group_info, node, 20);
  EXPECT_FIELD(crossdock_group_info, is_poisoned, 24);
  EXPECT_FIELD(crossdock_group_info, padding, 28);
  EXPECT_FIELD(crossdock_group_info, pool_bytes, 32);
  EXPECT_FIELD(crossdock_group_info, window_bytes, 40);
  EXPECT_FIELD(crossdock_group_info, communicator, 48);
  EXPECT_FIELD(crossdock_group_info, note, 56);
}

TEST(CAbi, DispatchConfig) {
  EXPECT_SIZE(crossdock_dispatch_config, 112);
  EXPECT_FIELD(crossdock_dispatch_config, struct_size, 0);
  EXPECT_FIELD(crossdock_dispatch_config, num_experts, 8);
  EXPECT_FIELD(crossdock_dispatch_config, top_k, 16);
  EXPECT_FIELD(crossdock_dispatch_config, width, 24);
  EXPECT_FIELD(crossdock_dispatch_config, alignment, 32);
  EXPECT_FIELD(crossdock_dispatch_config, max_rows, 40);
  EXPECT_FIELD(crossdock_dispatch_config, placement, 48);
  EXPECT_FIELD(crossdock_dispatch_config, strategy, 56);
  EXPECT_FIELD(crossdock_dispatch_config, capacity_factor, 64);
  EXPECT_FIELD(crossdock_dispatch_config, capacity_tokens, 72);
  EXPECT_FIELD(crossdock_dispatch_config, pad_to_capacity, 80);
  EXPECT_FIELD(crossdock_dispatch_config, drop_policy, 84);
  EXPECT_FIELD(crossdock_dispatch_config, nonfinite, 88);
  EXPECT_FIELD(crossdock_dispatch_config, partial_sums, 92);
  EXPECT_FIELD(crossdock_dispatch_config, keep_empty_segments, 96);
  EXPECT_FIELD(crossdock_dispatch_config, copies, 100);
  EXPECT_FIELD(crossdock_dispatch_config, max_routes_per_token, 104);
}

TEST(CAbi, DeviceOptions) {
  EXPECT_SIZE(crossdock_device_options, 32);
  EXPECT_FIELD(crossdock_device_options, struct_size, 0);
  EXPECT_FIELD(crossdock_device_options, stream, 8);
  EXPECT_FIELD(crossdock_device_options, nccl_comm, 16);
  EXPECT_FIELD(crossdock_device_options, max_sms, 24);
  EXPECT_FIELD(crossdock_device_options, max_begun_sms, 28);
}

TEST(CAbi, Routing) {
  EXPECT_SIZE(crossdock_routing, 232);
  EXPECT_FIELD(crossdock_routing, struct_size, 0);
  EXPECT_FIELD(crossdock_routing, expert_ids, 8);
  EXPECT_FIELD(crossdock_routing, map, 64);
  EXPECT_FIELD(crossdock_routing, weights, 120);
  EXPECT_FIELD(crossdock_routing, mask, 176);
}

TEST(CAbi, PlanInfo) {
  EXPECT_SIZE(crossdock_plan_info, 120);
  EXPECT_FIELD(crossdock_plan_info, struct_size, 0);
  EXPECT_FIELD(crossdock_plan_info, id, 8);
  EXPECT_FIELD(crossdock_plan_info, num_tokens, 16);
  EXPECT_FIELD(crossdock_plan_info, capacity_rows, 24);
  EXPECT_FIELD(crossdock_plan_info, num_local_experts, 32);
  EXPECT_FIELD(crossdock_plan_info, segment_starts, 40);
  EXPECT_FIELD(crossdock_plan_info, segment_counts, 48);
  EXPECT_FIELD(crossdock_plan_info, weights, 56);
  EXPECT_FIELD(crossdock_plan_info, device_kind, 112);
  EXPECT_FIELD(crossdock_plan_info, device_index, 116);
}

TEST(CAbi, DispatchResult) {
  EXPECT_SIZE(crossdock_dispatch_result, 200);
  EXPECT_FIELD(crossdock_dispatch_result, struct_size, 0);
  EXPECT_FIELD(crossdock_dispatch_result, rows, 8);
  EXPECT_FIELD(crossdock_dispatch_result, row_scales, 72);
  EXPECT_FIELD(crossdock_dispatch_result, row_weights, 136);
}

TEST(CAbi, DispatchArgs) {
  EXPECT_SIZE(crossdock_dispatch_args, 144);
  EXPECT_FIELD(crossdock_dispatch_args, struct_size, 0);
  EXPECT_FIELD(crossdock_dispatch_args, x, 8);
  EXPECT_FIELD(crossdock_dispatch_args, scales, 64);
  EXPECT_FIELD(crossdock_dispatch_args, with_row_weights, 120);
  EXPECT_FIELD(crossdock_dispatch_args, num_chunks, 124);
  EXPECT_FIELD(crossdock_dispatch_args, on_chunk, 128);
  EXPECT_FIELD(crossdock_dispatch_args, on_chunk_context, 136);
}

TEST(CAbi, CombineBackwardArgs) {
  EXPECT_SIZE(crossdock_combine_backward_args, 120);
  EXPECT_FIELD(crossdock_combine_backward_args, struct_size, 0);
  EXPECT_FIELD(crossdock_combine_backward_args, grad_out, 8);
  EXPECT_FIELD(crossdock_combine_backward_args, y, 64);
}

TEST(CAbi, CombineBackwardResult) {
  EXPECT_SIZE(crossdock_combine_backward_result, 136);
  EXPECT_FIELD(crossdock_combine_backward_result, struct_size, 0);
  EXPECT_FIELD(crossdock_combine_backward_result, grad_rows, 8);
  EXPECT_FIELD(crossdock_combine_backward_result, grad_weights, 72);
}

TEST(CAbi, QuantiseRowsArgs) {
  EXPECT_SIZE(crossdock_quantise_rows_args, 200);
  EXPECT_FIELD(crossdock_quantise_rows_args, struct_size, 0);
  EXPECT_FIELD(crossdock_quantise_rows_args, x, 8);
  EXPECT_FIELD(crossdock_quantise_rows_args, values, 64);
  EXPECT_FIELD(crossdock_quantise_rows_args, scales, 120);
  EXPECT_FIELD(crossdock_quantise_rows_args, amax_floor, 176);
  EXPECT_FIELD(crossdock_quantise_rows_args, scale, 184);
  EXPECT_FIELD(crossdock_quantise_rows_args, padding, 188);
  EXPECT_FIELD(crossdock_quantise_rows_args, stream, 192);
}

TEST(CAbi, DequantiseRowsArgs) {
  EXPECT_SIZE(crossdock_dequantise_rows_args, 184);
  EXPECT_FIELD(crossdock_dequantise_rows_args, struct_size, 0);
  EXPECT_FIELD(crossdock_dequantise_rows_args, values, 8);
  EXPECT_FIELD(crossdock_dequantise_rows_args, scales, 64);
  EXPECT_FIELD(crossdock_dequantise_rows_args, out, 120);
  EXPECT_FIELD(crossdock_dequantise_rows_args, stream, 176);
}

TEST(CAbi, Constants) {
  EXPECT_EQ(CROSSDOCK_FP8_SCALE_POW2, 0);
  EXPECT_EQ(CROSSDOCK_FP8_SCALE_EXACT, 1);
  EXPECT_EQ(CROSSDOCK_OK, 0);
  EXPECT_EQ(CROSSDOCK_INVALID_ARGUMENT, 1);
  EXPECT_EQ(CROSSDOCK_MISMATCH, 2);
  EXPECT_EQ(CROSSDOCK_UNSUPPORTED, 3);
  EXPECT_EQ(CROSSDOCK_CAPACITY, 4);
  EXPECT_EQ(CROSSDOCK_PEER_FAILED, 5);
  EXPECT_EQ(CROSSDOCK_TIMEOUT, 6);
  EXPECT_EQ(CROSSDOCK_COMMUNICATION, 7);
  EXPECT_EQ(CROSSDOCK_CUDA_FAILURE, 8);
  EXPECT_EQ(CROSSDOCK_INTERNAL, 9);
  EXPECT_EQ(CROSSDOCK_OUT_OF_MEMORY, 10);
  EXPECT_EQ(CROSSDOCK_F64, 1);
  EXPECT_EQ(CROSSDOCK_F32, 2);
  EXPECT_EQ(CROSSDOCK_BF16, 3);
  EXPECT_EQ(CROSSDOCK_F16, 4);
  EXPECT_EQ(CROSSDOCK_F8E4M3, 5);
  EXPECT_EQ(CROSSDOCK_E8M0, 6);
  EXPECT_EQ(CROSSDOCK_I64, 7);
  EXPECT_EQ(CROSSDOCK_I32, 8);
  EXPECT_EQ(CROSSDOCK_U8, 9);
  EXPECT_EQ(CROSSDOCK_BOOL, 10);
  EXPECT_EQ(CROSSDOCK_CPU, 0);
  EXPECT_EQ(CROSSDOCK_CUDA, 1);
  EXPECT_EQ(CROSSDOCK_DROP_BY_POSITION, 0);
  EXPECT_EQ(CROSSDOCK_DROP_BY_WEIGHT, 1);
  EXPECT_EQ(CROSSDOCK_NONFINITE_REJECT, 0);
  EXPECT_EQ(CROSSDOCK_NONFINITE_PROPAGATE, 1);
  EXPECT_EQ(CROSSDOCK_PARTIAL_SUMS_NONE, 0);
  EXPECT_EQ(CROSSDOCK_PARTIAL_SUMS_FP32, 1);
  EXPECT_EQ(CROSSDOCK_PARTIAL_SUMS_ROWS, 2);
  EXPECT_EQ(CROSSDOCK_SWIGLU, 0);
  EXPECT_EQ(CROSSDOCK_CLAMPED_SWIGLU, 1);
  EXPECT_EQ(CROSSDOCK_GEGLU, 2);
  EXPECT_EQ(CROSSDOCK_GELU, 3);
  EXPECT_EQ(CROSSDOCK_GELU_TANH, 4);
  EXPECT_EQ(CROSSDOCK_SQUARED_RELU, 5);
  EXPECT_EQ(CROSSDOCK_WEIGHTS_IN_COMBINE, 0);
  EXPECT_EQ(CROSSDOCK_WEIGHTS_IN_EXPERTS, 1);
  EXPECT_EQ(CROSSDOCK_SOFTMAX, 0);
  EXPECT_EQ(CROSSDOCK_SOFTMAX_AFTER_TOP_K, 1);
  EXPECT_EQ(CROSSDOCK_SIGMOID, 2);
  EXPECT_EQ(CROSSDOCK_SQRT_SOFTPLUS, 3);
  EXPECT_EQ(CROSSDOCK_GROUP_TOP_SHARE, 0);
  EXPECT_EQ(CROSSDOCK_GROUP_TOP_2, 1);
  EXPECT_EQ(CROSSDOCK_BALANCE_BATCH, 0);
  EXPECT_EQ(CROSSDOCK_BALANCE_SEQUENCE, 1);
  EXPECT_EQ(CROSSDOCK_BALANCE_GLOBAL_BATCH, 2);
}

}  // namespace
