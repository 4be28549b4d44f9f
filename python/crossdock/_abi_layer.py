"""The structs of crossdock.h for fp8, experts, layers and the planner; see _abi.py."""
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p

from ._abi import COutput, CTensor, DispatchConfig, Sized, Struct

# ---- Rows in fp8 ----


class QuantiseRowsArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("x", CTensor),
        ("values", CTensor),
        ("scales", CTensor),
        ("amax_floor", c_double),
        ("scale", c_int32),
        ("padding", c_int32),
        ("stream", c_void_p),
    ]


class DequantiseRowsArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("values", CTensor),
        ("scales", CTensor),
        ("out", CTensor),
        ("stream", c_void_p),
    ]


# ---- Experts ----


class ExpertsConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_local_experts", c_int64),
        ("width", c_int64),
        ("inner", c_int64),
        ("limit", c_double),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("interleaved", c_int32),
        ("weights_in", c_int32),
        ("recompute", c_int32),
        ("transposed", c_int32),
    ]


class CExpertWeights(ctypes.Structure):
    _fields_ = [("w1", CTensor), ("w2", CTensor), ("b1", CTensor), ("b2", CTensor)]


class Segments(Struct):
    _fields_ = [("starts", c_void_p), ("counts", c_void_p), ("num_segments", c_int64)]


class ExpertsForwardArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("weights", CExpertWeights),
        ("segments", Segments),
        ("rows", CTensor),
        ("row_weights", CTensor),
        ("y", CTensor),
        ("stream", c_void_p),
    ]


class ExpertsBackwardArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("weights", CExpertWeights),
        ("segments", Segments),
        ("rows", CTensor),
        ("row_weights", CTensor),
        ("grad_y", CTensor),
        ("grad_rows", CTensor),
        ("grad_row_weights", CTensor),
        ("grads", CExpertWeights),
        ("accumulate", c_int32),
        ("padding", c_int32),
        ("stream", c_void_p),
    ]


# ---- Layers ----


class RouterConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("width", c_int64),
        ("num_groups", c_int64),
        ("group_top_k", c_int64),
        ("scaling", c_double),
        ("aux_loss_coeff", c_double),
        ("z_loss_coeff", c_double),
        ("jitter", c_double),
        ("score", c_int32),
        ("group_score", c_int32),
        ("normalise", c_int32),
        ("aux_loss_scope", c_int32),
        ("force_balance", c_int32),
        ("padding", c_int32),
        ("aux_batch_coeff", c_double),
        ("aux_sequence_coeff", c_double),
        ("aux_global_batch_coeff", c_double),
    ]


class LayerConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("router", POINTER(RouterConfig)),
        ("experts", POINTER(ExpertsConfig)),
        ("dispatch", POINTER(DispatchConfig)),
        ("counting_group", c_void_p),
        ("shared_inner", c_int64),
        ("overlap_chunks", c_int64),
        ("serial_shared", c_int32),
        ("padding", c_int32),
        ("etp", c_int64),
        ("sequence_group", c_void_p),
        ("replicated_over", c_void_p),
        ("allow_equal_tokens", c_int32),
        ("padding2", c_int32),
    ]


class CLayerWeights(ctypes.Structure):
    _fields_ = [
        ("gate", CTensor),
        ("gate_bias", CTensor),
        ("expert_bias", CTensor),
        ("experts", CExpertWeights),
        ("shared", CExpertWeights),
    ]


class CLayerGradients(ctypes.Structure):
    _fields_ = [
        ("gate", CTensor),
        ("gate_bias", CTensor),
        ("experts", CExpertWeights),
        ("shared", CExpertWeights),
    ]


class LayerForwardArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("weights", CLayerWeights),
        ("x", CTensor),
        ("mask", CTensor),
        ("sequence_ids", CTensor),
        ("forced_ids", CTensor),
        ("token_ids", CTensor),
        ("num_sequences", c_int64),
        ("total_sequences", c_int64),
        ("jitter_seed", c_uint64),
        ("decision", c_void_p),
        ("earlier", c_void_p),
    ]


class LayerForwardResult(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("out", COutput),
        ("aux_loss", c_double),
        ("z_loss", c_double),
        ("aux_batch_loss", c_double),
        ("aux_sequence_loss", c_double),
        ("aux_global_batch_loss", c_double),
        ("device_losses", CTensor),
    ]


class LayerReport(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("expert_ids", CTensor),
        ("weights", CTensor),
        ("kept_weights", CTensor),
        ("load", CTensor),
        ("rows_per_expert", CTensor),
    ]


class LayerBackwardArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("weights", CLayerWeights),
        ("x", CTensor),
        ("grad_out", CTensor),
        ("grads", CLayerGradients),
        ("grad_losses", POINTER(c_double)),
        ("accumulate", c_int32),
        ("delay_dw", c_int32),
    ]


# ---- Planner ----


class Job(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("model", c_char_p),
        ("width", c_int64),
        ("inner", c_int64),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("tokens", c_int64),
        ("sequence", c_int64),
        ("micro_batch", c_int64),
        ("nodes", c_int64),
        ("ranks_per_node", c_int64),
        ("tp", c_int64),
        ("cp", c_int64),
        ("pp", c_int64),
        ("ep", c_int64),
        ("alignment", c_int64),
        ("capacity_factor", c_double),
        ("zipf", c_double),
        ("fabric", c_char_p),
        ("dtype", c_int32),
        ("partial_sums", c_int32),
    ]


class JobSummary(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("strategy", c_char_p),
        ("reason", c_char_p),
        ("num_strategies", c_int64),
        ("tokens", c_int64),
        ("num_ranks", c_int64),
        ("group_ranks", c_int64),
        ("group_nodes", c_int64),
        ("capacity_rows", c_int64),
        ("expert_weight_bytes", c_int64),
        ("ranks_per_token", c_double),
        ("nodes_per_token", c_double),
        ("rows_per_rank", c_double),
        ("most_rows", c_double),
        ("dropped_share", c_double),
    ]


class OperationCost(ctypes.Structure):
    _fields_ = [
        ("bytes_within_node", c_double),
        ("bytes_between_nodes", c_double),
        ("lower_bound_s", c_double),
        ("serial_s", c_double),
    ]


class StrategyCost(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("dispatch", OperationCost),
        ("combine", OperationCost),
        ("expected_bytes", c_double),
        ("worst_bytes", c_double),
        ("step_lower_bound_s", c_double),
        ("step_serial_s", c_double),
    ]
