// Structs of experts, layers and the planner.
#include "capi/abi.hpp"

namespace {

TEST(CAbi, ExpertsConfig) {
  EXPECT_SIZE(crossdock_experts_config, 64);
  EXPECT_FIELD(crossdock_experts_config, struct_size, 0);
  EXPECT_FIELD(crossdock_experts_config, num_local_experts, 8);
  EXPECT_FIELD(crossdock_experts_config, width, 16);
  EXPECT_FIELD(crossdock_experts_config, inner, 24);
  EXPECT_FIELD(crossdock_experts_config, limit, 32);
  EXPECT_FIELD(crossdock_experts_config, dtype, 40);
  EXPECT_FIELD(crossdock_experts_config, activation, 44);
  EXPECT_FIELD(crossdock_experts_config, interleaved, 48);
  EXPECT_FIELD(crossdock_experts_config, weights_in, 52);
  EXPECT_FIELD(crossdock_experts_config, recompute, 56);
  EXPECT_FIELD(crossdock_experts_config, transposed, 60);
}

TEST(CAbi, ExpertWeights) {
  EXPECT_SIZE(crossdock_expert_weights, 224);
  EXPECT_FIELD(crossdock_expert_weights, w1, 0);
  EXPECT_FIELD(crossdock_expert_weights, w2, 56);
  EXPECT_FIELD(crossdock_expert_weights, b1, 112);
  EXPECT_FIELD(crossdock_expert_weights, b2, 168);
}

TEST(CAbi, Segments) {
  EXPECT_SIZE(crossdock_segments, 24);
  EXPECT_FIELD(crossdock_segments, starts, 0);
  EXPECT_FIELD(crossdock_segments, counts, 8);
  EXPECT_FIELD(crossdock_segments, num_segments, 16);
}

TEST(CAbi, ExpertsForwardArgs) {
  EXPECT_SIZE(crossdock_experts_forward_args, 432);
  EXPECT_FIELD(crossdock_experts_forward_args, struct_size, 0);
  EXPECT_FIELD(crossdock_experts_forward_args, weights, 8);
  EXPECT_FIELD(crossdock_experts_forward_args, segments, 232);
  EXPECT_FIELD(crossdock_experts_forward_args, rows, 256);
  EXPECT_FIELD(crossdock_experts_forward_args, row_weights, 312);
  EXPECT_FIELD(crossdock_experts_forward_args, y, 368);
  EXPECT_FIELD(crossdock_experts_forward_args, stream, 424);
}

TEST(CAbi, ExpertsBackwardArgs) {
  EXPECT_SIZE(crossdock_experts_backward_args, 776);
  EXPECT_FIELD(crossdock_experts_backward_args, struct_size, 0);
  EXPECT_FIELD(crossdock_experts_backward_args, weights, 8);
  EXPECT_FIELD(crossdock_experts_backward_args, segments, 232);
  EXPECT_FIELD(crossdock_experts_backward_args, rows, 256);
  EXPECT_FIELD(crossdock_experts_backward_args, row_weights, 312);
  EXPECT_FIELD(crossdock_experts_backward_args, grad_y, 368);
  EXPECT_FIELD(crossdock_experts_backward_args, grad_rows, 424);
  EXPECT_FIELD(crossdock_experts_backward_args, grad_row_weights, 480);
  EXPECT_FIELD(crossdock_experts_backward_args, grads, 536);
  EXPECT_FIELD(crossdock_experts_backward_args, accumulate, 760);
  EXPECT_FIELD(crossdock_experts_backward_args, padding, 764);
  EXPECT_FIELD(crossdock_experts_backward_args, stream, 768);
}

TEST(CAbi, RouterConfig) {
  EXPECT_SIZE(crossdock_router_config, 128);
  EXPECT_FIELD(crossdock_router_config, struct_size, 0);
  EXPECT_FIELD(crossdock_router_config, num_experts, 8);
  EXPECT_FIELD(crossdock_router_config, top_k, 16);
  EXPECT_FIELD(crossdock_router_config, width, 24);
  EXPECT_FIELD(crossdock_router_config, num_groups, 32);
  EXPECT_FIELD(crossdock_router_config, group_top_k, 40);
  EXPECT_FIELD(crossdock_router_config, scaling, 48);
  EXPECT_FIELD(crossdock_router_config, aux_loss_coeff, 56);
  EXPECT_FIELD(crossdock_router_config, z_loss_coeff, 64);
  EXPECT_FIELD(crossdock_router_config, jitter, 72);
  EXPECT_FIELD(crossdock_router_config, score, 80);
  EXPECT_FIELD(crossdock_router_config, group_score, 84);
  EXPECT_FIELD(crossdock_router_config, normalise, 88);
  EXPECT_FIELD(crossdock_router_config, aux_loss_scope, 92);
  EXPECT_FIELD(crossdock_router_config, force_balance, 96);
  EXPECT_FIELD(crossdock_router_config, padding, 100);
  EXPECT_FIELD(crossdock_router_config, aux_batch_coeff, 104);
  EXPECT_FIELD(crossdock_router_config, aux_sequence_coeff, 112);
  EXPECT_FIELD(crossdock_router_config, aux_global_batch_coeff, 120);
}

TEST(CAbi, LayerConfig) {
  EXPECT_SIZE(crossdock_layer_config, 96);
  EXPECT_FIELD(crossdock_layer_config, struct_size, 0);
  EXPECT_FIELD(crossdock_layer_config, router, 8);
  EXPECT_FIELD(crossdock_layer_config, experts, 16);
  EXPECT_FIELD(crossdock_layer_config, dispatch, 24);
  EXPECT_FIELD(crossdock_layer_config, counting_group, 32);
  EXPECT_FIELD(crossdock_layer_config, shared_inner, 40);
  EXPECT_FIELD(crossdock_layer_config, overlap_chunks, 48);
  EXPECT_FIELD(crossdock_layer_config, serial_shared, 56);
  EXPECT_FIELD(crossdock_layer_config, padding, 60);
  EXPECT_FIELD(crossdock_layer_config, etp, 64);
  EXPECT_FIELD(crossdock_layer_config, sequence_group, 72);
  EXPECT_FIELD(crossdock_layer_config, replicated_over, 80);
  EXPECT_FIELD(crossdock_layer_config, allow_equal_tokens, 88);
  EXPECT_FIELD(crossdock_layer_config, padding2, 92);
}

TEST(CAbi, LayerWeights) {
  EXPECT_SIZE(crossdock_layer_weights, 616);
  EXPECT_FIELD(crossdock_layer_weights, gate, 0);
  EXPECT_FIELD(crossdock_layer_weights, gate_bias, 56);
  EXPECT_FIELD(crossdock_layer_weights, expert_bias, 112);
  EXPECT_FIELD(crossdock_layer_weights, experts, 168);
  EXPECT_FIELD(crossdock_layer_weights, shared, 392);
}

TEST(CAbi, LayerGradients) {
  EXPECT_SIZE(crossdock_layer_gradients, 560);
  EXPECT_FIELD(crossdock_layer_gradients, gate, 0);
  EXPECT_FIELD(crossdock_layer_gradients, gate_bias, 56);
  EXPECT_FIELD(crossdock_layer_gradients, experts, 112);
  EXPECT_FIELD(crossdock_layer_gradients, shared, 336);
}

TEST(CAbi, LayerForwardArgs) {
  EXPECT_SIZE(crossdock_layer_forward_args, 944);
  EXPECT_FIELD(crossdock_layer_forward_args, struct_size, 0);
  EXPECT_FIELD(crossdock_layer_forward_args, weights, 8);
  EXPECT_FIELD(crossdock_layer_forward_args, x, 624);
  EXPECT_FIELD(crossdock_layer_forward_args, mask, 680);
  EXPECT_FIELD(crossdock_layer_forward_args, sequence_ids, 736);
  EXPECT_FIELD(crossdock_layer_forward_args, forced_ids, 792);
  EXPECT_FIELD(crossdock_layer_forward_args, token_ids, 848);
  EXPECT_FIELD(crossdock_layer_forward_args, num_sequences, 904);
  EXPECT_FIELD(crossdock_layer_forward_args, total_sequences, 912);
  EXPECT_FIELD(crossdock_layer_forward_args, jitter_seed, 920);
  EXPECT_FIELD(crossdock_layer_forward_args, decision, 928);
  EXPECT_FIELD(crossdock_layer_forward_args, earlier, 936);
}

TEST(CAbi, LayerForwardResult) {
  EXPECT_SIZE(crossdock_layer_forward_result, 168);
  EXPECT_FIELD(crossdock_layer_forward_result, struct_size, 0);
  EXPECT_FIELD(crossdock_layer_forward_result, out, 8);
  EXPECT_FIELD(crossdock_layer_forward_result, aux_loss, 72);
  EXPECT_FIELD(crossdock_layer_forward_result, z_loss, 80);
  EXPECT_FIELD(crossdock_layer_forward_result, aux_batch_loss, 88);
  EXPECT_FIELD(crossdock_layer_forward_result, aux_sequence_loss, 96);
  EXPECT_FIELD(crossdock_layer_forward_result, aux_global_batch_loss, 104);
  EXPECT_FIELD(crossdock_layer_forward_result, device_losses, 112);
}

TEST(CAbi, LayerBackwardArgs) {
  EXPECT_SIZE(crossdock_layer_backward_args, 1312);
  EXPECT_FIELD(crossdock_layer_backward_args, struct_size, 0);
  EXPECT_FIELD(crossdock_layer_backward_args, weights, 8);
  EXPECT_FIELD(crossdock_layer_backward_args, x, 624);
  EXPECT_FIELD(crossdock_layer_backward_args, grad_out, 680);
  EXPECT_FIELD(crossdock_layer_backward_args, grads, 736);
  EXPECT_FIELD(crossdock_layer_backward_args, grad_losses, 1296);
  EXPECT_FIELD(crossdock_layer_backward_args, accumulate, 1304);
  EXPECT_FIELD(crossdock_layer_backward_args, delay_dw, 1308);
}

TEST(CAbi, Job) {
  EXPECT_SIZE(crossdock_job, 160);
  EXPECT_FIELD(crossdock_job, struct_size, 0);
  EXPECT_FIELD(crossdock_job, model, 8);
  EXPECT_FIELD(crossdock_job, width, 16);
  EXPECT_FIELD(crossdock_job, inner, 24);
  EXPECT_FIELD(crossdock_job, num_experts, 32);
  EXPECT_FIELD(crossdock_job, top_k, 40);
  EXPECT_FIELD(crossdock_job, tokens, 48);
  EXPECT_FIELD(crossdock_job, sequence, 56);
  EXPECT_FIELD(crossdock_job, micro_batch, 64);
  EXPECT_FIELD(crossdock_job, nodes, 72);
  EXPECT_FIELD(crossdock_job, ranks_per_node, 80);
  EXPECT_FIELD(crossdock_job, tp, 88);
  EXPECT_FIELD(crossdock_job, cp, 96);
  EXPECT_FIELD(crossdock_job, pp, 104);
  EXPECT_FIELD(crossdock_job, ep, 112);
  EXPECT_FIELD(crossdock_job, alignment, 120);
  EXPECT_FIELD(crossdock_job, capacity_factor, 128);
  EXPECT_FIELD(crossdock_job, zipf, 136);
  EXPECT_FIELD(crossdock_job, fabric, 144);
  EXPECT_FIELD(crossdock_job, dtype, 152);
  EXPECT_FIELD(crossdock_job, partial_sums, 156);
}

TEST(CAbi, JobSummary) {
  EXPECT_SIZE(crossdock_job_summary, 120);
  EXPECT_FIELD(crossdock_job_summary, struct_size, 0);
  EXPECT_FIELD(crossdock_job_summary, strategy, 8);
  EXPECT_FIELD(crossdock_job_summary, reason, 16);
  EXPECT_FIELD(crossdock_job_summary, num_strategies, 24);
  EXPECT_FIELD(crossdock_job_summary, tokens, 32);
  EXPECT_FIELD(crossdock_job_summary, num_ranks, 40);
  EXPECT_FIELD(crossdock_job_summary, group_ranks, 48);
  EXPECT_FIELD(crossdock_job_summary, group_nodes, 56);
  EXPECT_FIELD(crossdock_job_summary, capacity_rows, 64);
  EXPECT_FIELD(crossdock_job_summary, expert_weight_bytes, 72);
  EXPECT_FIELD(crossdock_job_summary, ranks_per_token, 80);
  EXPECT_FIELD(crossdock_job_summary, nodes_per_token, 88);
  EXPECT_FIELD(crossdock_job_summary, rows_per_rank, 96);
  EXPECT_FIELD(crossdock_job_summary, most_rows, 104);
  EXPECT_FIELD(crossdock_job_summary, dropped_share, 112);
}

TEST(CAbi, OperationCost) {
  EXPECT_SIZE(crossdock_operation_cost, 32);
  EXPECT_FIELD(crossdock_operation_cost, bytes_within_node, 0);
  EXPECT_FIELD(crossdock_operation_cost, bytes_between_nodes, 8);
  EXPECT_FIELD(crossdock_operation_cost, lower_bound_s, 16);
  EXPECT_FIELD(crossdock_operation_cost, serial_s, 24);
}

TEST(CAbi, StrategyCost) {
  EXPECT_SIZE(crossdock_strategy_cost, 112);
  EXPECT_FIELD(crossdock_strategy_cost, struct_size, 0);
  EXPECT_FIELD(crossdock_strategy_cost, name, 8);
  EXPECT_FIELD(crossdock_strategy_cost, dispatch, 16);
  EXPECT_FIELD(crossdock_strategy_cost, combine, 48);
  EXPECT_FIELD(crossdock_strategy_cost, expected_bytes, 80);
  EXPECT_FIELD(crossdock_strategy_cost, worst_bytes, 88);
  EXPECT_FIELD(crossdock_strategy_cost, step_lower_bound_s, 96);
  EXPECT_FIELD(crossdock_strategy_cost, step_serial_s, 104);
}

}  // namespace
