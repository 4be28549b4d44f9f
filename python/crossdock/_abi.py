"""The structs and functions of crossdock.h. tests/python/abi_test.py compares this file with the headers."""
import ctypes
import functools
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p

# ---- Integers ----
#
# ctypes keeps the low bits of an integer that is too large, so everything that fills structs and arrays checks it first.


def _range_of(kind):
    lowest = -(1 << 8 * ctypes.sizeof(kind) - 1) if kind(-1).value == -1 else 0
    return lowest, lowest + (1 << 8 * ctypes.sizeof(kind)) - 1


_RANGES = {kind: _range_of(kind) for kind in (c_int32, c_int64, c_size_t, c_uint64, c_void_p)}


def check_range(name, value, kind):
    """Returns `value`. If it is an integer that `kind` cannot hold, raises an error about the argument `name`."""
    if isinstance(value, int) and kind in _RANGES:
        lowest, highest = _RANGES[kind]
        if not lowest <= value <= highest:
            raise ValueError(f"{name} must be in [{lowest}, {highest}], got {value}")
    return value


def int_array(name, values, kind):
    """An array for the library; never empty, because an empty array has no address."""
    checked = (check_range(f"{name}[{index}]", value, kind) for index, value in enumerate(values))
    return (kind * max(len(values), 1))(*checked)


class Struct(ctypes.Structure):
    """Refuses integers that do not fit in a field, also in its constructor. Errors name the field."""

    def __setattr__(self, name, value):
        if isinstance(value, int):
            check_range(name, value, _fields_of(type(self)).get(name))
        try:
            super().__setattr__(name, value)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None


@functools.lru_cache(maxsize=None)
def _fields_of(kind):
    return {name: declared for name, declared in kind._fields_}


# ---- Tensors ----

# Handles and strings that are only passed through are c_void_p; strings that Python provides or reads are c_char_p.


class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("shape", c_int64 * 4),
        ("num_dims", c_int32),
        ("dtype", c_int32),
        ("device_kind", c_int32),
        ("device_index", c_int32),
    ]


class COutput(ctypes.Structure):
    _fields_ = [("tensor", CTensor), ("owner", c_void_p)]


class Sized(Struct):
    """A struct that begins with struct_size, which is set here."""

    def __init__(self, **fields):
        super().__init__(ctypes.sizeof(self), **fields)


def maker(kind):
    """Returns a function that makes structs of this kind with all defaults, faster than kind()."""
    return functools.partial(kind.from_buffer_copy, bytes(kind()))


class ErrorInfo(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("status", c_int32),
        ("culprit", c_int32),
        ("sequence", c_uint64),
        ("operation", c_char_p),
    ]


# ---- Groups ----


class WaitNotice(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("awaited", POINTER(c_int32)),
        ("num_awaited", c_int32),
        ("padding", c_int32),
        ("sequence", c_uint64),
        ("operation", c_char_p),
        ("waited_s", c_double),
        ("left_s", c_double),
        ("text", c_char_p),
    ]


class GroupConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("arrival_deadline_s", c_double),
        ("progress_deadline_s", c_double),
        ("setup_deadline_s", c_double),
        ("recorded_events", c_int64),
        ("staging_bytes", c_int64),
        ("report_file", c_char_p),
        ("num_threads", c_int32),
        ("ranks_per_node", c_int32),
        ("on_wait", c_void_p),
        ("on_wait_context", c_void_p),
        ("notice_after_s", c_double),
        ("setup_notice_after_s", c_double),
        ("on_log", c_void_p),
        ("on_log_context", c_void_p),
        ("log_level", c_int32),
        ("log_padding", c_int32),
    ]


class BootstrapConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("address", c_char_p),
        ("setup_deadline_s", c_double),
        ("interrupt", c_void_p),
        ("interrupt_context", c_void_p),
        ("ranks_per_node", c_int32),
        ("padding", c_int32),
        ("on_wait", c_void_p),
        ("on_wait_context", c_void_p),
        ("notice_after_s", c_double),
    ]


class JoinArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("bytes", c_char_p),
        ("offsets", POINTER(c_int64)),
        ("rank", c_int32),
        ("size", c_int32),
    ]


class GroupInfo(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("num_nodes", c_int32),
        ("node", c_int32),
        ("is_poisoned", c_int32),
        ("padding", c_int32),
        ("pool_bytes", c_int64),
        ("window_bytes", c_int64),
        ("communicator", c_char_p),
        ("note", c_char_p),
    ]


# ---- Dispatchers ----


class DispatchConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("width", c_int64),
        ("alignment", c_int64),
        ("max_rows", c_int64),
        ("placement", POINTER(c_int32)),
        ("strategy", c_char_p),
        ("capacity_factor", c_double),
        ("capacity_tokens", c_int64),
        ("pad_to_capacity", c_int32),
        ("drop_policy", c_int32),
        ("nonfinite", c_int32),
        ("partial_sums", c_int32),
        ("keep_empty_segments", c_int32),
        ("copies", c_int32),
        ("max_routes_per_token", c_int64),
    ]


class DeviceOptions(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("stream", c_void_p),
        ("nccl_comm", c_void_p),
        ("max_sms", c_int32),
        ("max_begun_sms", c_int32),
    ]


class Routing(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("expert_ids", CTensor),
        ("map", CTensor),
        ("weights", CTensor),
        ("mask", CTensor),
    ]


class PlanInfo(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("id", c_uint64),
        ("num_tokens", c_int64),
        ("capacity_rows", c_int64),
        ("num_local_experts", c_int64),
        ("segment_starts", c_void_p),
        ("segment_counts", c_void_p),
        ("weights", CTensor),
        ("device_kind", c_int32),
        ("device_index", c_int32),
    ]


class DispatchResult(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", COutput),
        ("row_scales", COutput),
        ("row_weights", COutput),
    ]


class Chunk(ctypes.Structure):
    pass


ChunkCallback = ctypes.CFUNCTYPE(None, POINTER(Chunk))
Chunk._fields_ = [
    ("callback", ChunkCallback),
    ("result", POINTER(DispatchResult)),
    ("first_expert", c_int64),
    ("last_expert", c_int64),
    ("status", c_int32),
    ("padding", c_int32),
]


class DispatchArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("x", CTensor),
        ("scales", CTensor),
        ("with_row_weights", c_int32),
        ("num_chunks", c_int32),
        ("on_chunk", c_void_p),
        ("on_chunk_context", c_void_p),
    ]


class CombineBackwardArgs(Sized):
    _fields_ = [("struct_size", c_size_t), ("grad_out", CTensor), ("y", CTensor)]


class CombineBackwardResult(Sized):
    _fields_ = [("struct_size", c_size_t), ("grad_rows", COutput), ("grad_weights", COutput)]


# ---- Functions ----

# Result (None: void) and arguments: p any pointer, s a string, i int32, l int64, d double.
FUNCTIONS = {
    "last_error": "s",
    "last_error_info": "i p",
    "status_name": "s i",
    "version": "s",
    "output_release": "i p p",
    "output_to_dlpack": "i p p p",
    "tensor_from_dlpack": "i p p",
    "destroy_dlpack_capsule": "v p",
    "group_from_threads": "i i p p",
    "group_from_mpi": "i p p p",
    "bootstrap_open": "i p p",
    "bootstrap_blob": "i p p p",
    "bootstrap_destroy": "v p",
    "group_join": "i p p p p",
    "group_from_environment": "i p p p",
    "set_callback_error": "v s",
    "end_calls": "i d",
    "refuse_next_call": "v s",
    "group_describe": "i p p",
    "group_check": "i p",
    "group_subgroup": "i p p i p",
    "group_leave": "v p s",
    "group_all_reduce": "i p p l",
    "group_reduce_scatter": "i p p p",
    "group_destroy": "v p",
    "dispatcher_create": "i p p p",
    "dispatcher_destroy": "v p",
    "dispatcher_strategy": "i p p",
    "set_device_options": "i p p",
    "dispatcher_check": "i p",
    "plan_create": "i p p p",
    "plan_destroy": "v p",
    "plan_describe": "i p p",
    "plan_create_described": "i p p p p p",
    "plan_num_rows": "i p p",
    "plan_dropped": "i p p",
    "dispatch": "i p p p p",
    "pass_chunk": "i p p l l",
    "dispatch_backward": "i p p p p",
    "combine": "i p p p p",
    "combine_unweighted": "i p p p p",
    "combine_backward": "i p p p p",
    "collect_routes": "i p p p p",
    "allocate_rows": "i p p i p",
    "begin_dispatch": "i p p p p p",
    "next_chunk": "i p p p p p",
    "finish_dispatch": "i p p p",
    "begin_combine": "i p p p p p",
    "finish_combine": "i p p p",
    "pending_destroy": "v p",
    "quantise_rows": "i p",
    "dequantise_rows": "i p",
    "experts_create": "i p p",
    "experts_destroy": "v p",
    "experts_forward": "i p p p",
    "experts_backward_dx": "i p p p",
    "experts_backward_dw": "i p p p",
    "experts_saved_destroy": "v p",
    "layer_create": "i p p p",
    "layer_destroy": "v p",
    "layer_num_local_experts": "i p p",
    "layer_set_device_options": "i p p",
    "layer_forward": "i p p p p",
    "layer_backward": "i p p p p",
    "layer_backward_dw": "i p p p",
    "layer_saved_losses": "i p p",
    "layer_saved_load": "i p p",
    "layer_saved_dropped": "i p p",
    "layer_saved_report": "i p p",
    "layer_saved_destroy": "v p",
    "update_expert_bias": "i p p d i",
    "job_plan_create": "i p p",
    "job_plan_destroy": "v p",
    "job_plan_describe": "i p p",
    "job_plan_strategy": "i p l p",
}
_TYPES = {"v": None, "p": c_void_p, "s": c_char_p, "i": c_int32, "l": c_int64, "d": c_double}


def declare(library):
    """The functions of a loaded library, by their names without "crossdock_". They release the GIL."""
    functions = {}
    for name, signature in FUNCTIONS.items():
        function = getattr(library, "crossdock_" + name)
        result, *arguments = (_TYPES[letter] for letter in signature.split())
        function.restype = result
        function.argtypes = arguments
        functions[name] = function
    return functions
