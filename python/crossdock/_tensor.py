"""Arrays of the caller as the library sees them, and memory of the library as arrays."""
import ctypes
import struct
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

from . import _dlpack
from ._abi import COutput, CTensor
from ._dtype import BY_NAME, TYPESTRS, DType
from ._errors import Error, ErrorCode, fail, refusal_text
from ._interrupt import caught, raise_caught
from ._library import lib
from ._owner import Owner

# A crossdock_tensor: address, four sizes, num_dims, dtype, device_kind, device_index.
_LAYOUT = struct.Struct("=Qqqqqiiii")
assert _LAYOUT.size == ctypes.sizeof(CTensor)

Fields = Tuple[int, int, int, int, int, int, int, int, int]
_REFUSED: Fields = (0, 0, 0, 0, 0, 1, 0, 0, 0)  # no dtype: the library refuses it on all ranks

Shape = Tuple[int, ...]
_nothing = ctypes.c_double()
_NOWHERE = ctypes.addressof(_nothing)
_DTYPES = {int(member): member for member in DType}
_WITHOUT_NUMPY = {DType.BF16: "bfloat16", DType.F8E4M3: "float8_e4m3fn", DType.E8M0: "float8_e8m0fnu"}


def fields_of(ptr: int, dtype: int, shape: Sequence[int], device: Optional[int]) -> Fields:
    kind, index = (0, 0) if device is None else (1, device)
    num_dims = len(shape)
    if num_dims == 2:
        return (ptr, shape[0], shape[1], 0, 0, 2, dtype, kind, index)
    if num_dims > 4:
        raise ValueError(f"tensors must have at most 4 dimensions, got shape {tuple(shape)}")
    if num_dims == 0:
        raise ValueError("tensors must have 1 to 4 dimensions, got a scalar")
    dims = (*shape, 0, 0, 0)
    return (ptr, dims[0], dims[1], dims[2], dims[3], num_dims, dtype, kind, index)


class Tensor:
    """Contiguous memory of the caller, given by its address. Does not own it: keep it, or `owner`, alive during the calls.

    `device` is the index of the GPU, or None for host memory.
    """

    __slots__ = ("ptr", "dtype", "shape", "device", "owner", "fields")

    def __init__(self, ptr: int, dtype: int, shape: Sequence[int], device: Optional[int] = None, owner: Any = None):
        self.ptr = ptr
        self.dtype = dtype
        self.shape = tuple(shape)
        self.device = device
        self.owner = owner
        self.fields = fields_of(ptr, dtype, self.shape, device)

    def __repr__(self) -> str:
        place = "host" if self.device is None else f"cuda:{self.device}"
        dtype = _DTYPES[self.dtype].name if self.dtype in _DTYPES else self.dtype
        return f"crossdock.Tensor({self.ptr:#x}, {dtype}, {self.shape}, {place})"


class Refused:
    """An argument that cannot be used, and why. A call with it fails on every rank."""

    def __init__(self, error: Exception):
        self.error = error


class Array(Owner):
    """Memory of the library as an array: the result of a call (owned), or part of a plan (a view that keeps the plan alive).

    Other libraries use it without a copy through DLPack (results only), numpy's array interface (host) and the CUDA array
    interface. Results are released when the last reference is gone.
    """

    __slots__ = ("fields", "_stream", "_output", "_keeper", "__weakref__")

    def __init__(self, fields: Fields, output: Optional[COutput] = None, keeper: Any = None, stream: int = 0):
        self.fields = fields
        self._keeper = keeper
        self._output = output
        self.stream = stream

    @property
    def stream(self) -> int:
        """Stream of the last use on a GPU. If you used another one, set it before the release."""
        return self._stream

    @stream.setter
    def stream(self, stream: int) -> None:
        self._stream = stream
        if self._output is not None:
            self._own(lib.output_release, ctypes.byref(self._output), stream)

    @property
    def ptr(self) -> int:
        """Address of the first value."""
        return self.fields[0]

    @property
    def shape(self) -> Shape:
        return self.fields[1 : 1 + self.fields[5]]

    @property
    def dtype(self) -> DType:
        if self.fields[6] == 0:
            raise ValueError("the array has been released")
        return _DTYPES[self.fields[6]]

    @property
    def device(self) -> Optional[int]:
        """Index of the GPU, or None for host memory."""
        return self.fields[8] if self.fields[7] else None

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size

    def release(self, stream: Optional[int] = None) -> None:
        """Returns the memory to the library, after the work queued in `stream`. No array may use it any more."""
        output, self._output = self._output, None
        if output is not None:
            self.fields = (0, *self.fields[1:6], 0, *self.fields[7:])  # calls refuse it
            lib.output_release(ctypes.byref(output), self.stream if stream is None else stream)
            self._disown()  # the release has emptied `output`: a second one does nothing

    def numpy(self) -> Any:
        """A numpy array of this memory, without a copy. bf16 and fp8 have the types of ml_dtypes if it is installed."""
        import numpy

        if self.fields[7]:
            raise TypeError("the array is in the memory of a GPU: use DLPack, e.g. torch.from_dlpack(array)")
        array = numpy.asarray(self)
        if self.fields[6] in _WITHOUT_NUMPY:
            array = array.view(ml_dtype(self.dtype, array.dtype))
        return array

    def __repr__(self) -> str:
        if self.fields[6] == 0:
            return "crossdock.Array(released)"
        place = "host" if self.device is None else f"cuda:{self.device}"
        return f"crossdock.Array({self.dtype.name}, {self.shape}, {place})"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        fields = self.fields
        if fields[7]:
            raise AttributeError("the array is in the memory of a GPU")
        return {
            "version": 3,
            "shape": fields[1 : 1 + fields[5]],
            "typestr": TYPESTRS[fields[6]],
            # numpy 1 does not accept NULL, not even for an empty array.
            "data": (fields[0] or _NOWHERE, self._keeper is not None),
        }

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        if self.device is None:
            raise AttributeError("the array is in host memory")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": TYPESTRS[self.dtype],
            "data": (self.ptr, False),  # torch does not accept read-only memory
            "stream": self.stream or 1,  # 1: the default stream
        }

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (_dlpack.CPU, 0) if self.device is None else (_dlpack.CUDA, self.device)

    def __dlpack__(
        self,
        *,
        stream: Optional[int] = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any:
        """A capsule that shares the memory. On a GPU, `stream` must be the stream of the call that made the array."""
        if self._output is None:
            raise BufferError("only results of calls that have not been released can be exported, not views of a plan")
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("the array can be exported only without a copy, on its own device")
        consumer = 0 if stream in (None, -1, 1) else stream
        if self.device is not None and stream not in (None, -1) and consumer != self.stream:
            raise BufferError(f"the array was made in stream {self.stream}, got {stream}: use it in the stream of its dispatcher")
        managed = ctypes.c_void_p()
        if lib.output_to_dlpack(ctypes.byref(self._output), self.stream, ctypes.byref(managed)):
            fail()
        return _dlpack.capsule_of(managed.value)


#: Array arguments of calls: an array of numpy, anything with __dlpack__, memory of the library, or an address.
ArrayLike = Union[Tensor, Array, Any]

# ---- In ----


def _tensor_in(value: Any, keep: List[Any], stream: int) -> Fields:
    return value.fields


def _array_in(value: Any, keep: List[Any], stream: int) -> Fields:
    if value.fields[6] == 0:
        raise ValueError("the array has been released")
    return value.fields


def _refused_in(value: Any, keep: List[Any], stream: int) -> Fields:
    raise value.error


def _numpy_in(value: Any, keep: List[Any], stream: int) -> Fields:
    if not value.flags.c_contiguous:
        value = sys.modules["numpy"].ascontiguousarray(value)
        keep.append(value)
    return _numpy_fields(value)


# Reads the address of a numpy array from its C struct: the dict of __array_interface__ takes ten times as long.
_array_struct = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_DATA_OFFSET = 40  # in PyArrayInterface, on 64-bit machines
_numpy_codes: Dict[Any, int] = {}  # by numpy.dtype


def _numpy_fields(value: Any) -> Fields:
    code = _numpy_codes.get(value.dtype) or _numpy_code(value.dtype)
    capsule = value.__array_struct__
    ptr = ctypes.c_void_p.from_address(_array_struct(capsule, None) + _DATA_OFFSET).value or 0
    shape = value.shape
    if len(shape) == 2:
        return (ptr, shape[0], shape[1], 0, 0, 2, code, 0, 0)
    return fields_of(ptr, code, shape, None)


def _numpy_code(dtype: Any) -> int:
    code = BY_NAME.get(dtype.name) if dtype.isnative else None
    if code is None:
        raise TypeError(f"dtype {dtype} is not supported, must be one of crossdock.DType in the order of this machine")
    _numpy_codes[dtype] = int(code)
    return code


def _dlpack_in(value: Any, keep: List[Any], stream: int) -> Fields:
    tensor, owner = _dlpack.read(value, stream)
    keep.append(owner)
    return _LAYOUT.unpack_from(tensor)


_Reader = Callable[[Any, List[Any], int], Fields]
_readers: Dict[type, _Reader] = {
    Tensor: _tensor_in,
    Array: _array_in,
    Refused: _refused_in,
}


def is_numpy(value: Any) -> bool:
    return _readers.get(type(value)) is _numpy_in


def _reader_of(kind: type) -> _Reader:
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        reader = _numpy_in
    elif hasattr(kind, "__dlpack__"):
        reader = _dlpack_in
    else:
        raise TypeError(f"must be a numpy array, an object with __dlpack__ or a crossdock.Tensor, got {kind.__name__}")
    _readers[kind] = reader
    return reader


def handle_in(name: str, value: Any, kind: type) -> Optional[int]:
    """The handle of an argument of this type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    return value._handle


class Marshal:
    """Writes the arguments of one call into its structs and keeps them alive.

    A rank must not raise before a collective call: the others would wait for it. So an array that cannot be used, and any
    other error in the block `with Marshal() as marshal:`, which holds everything that the call does with its arguments,
    makes the library refuse `marshal.call(...)`. All ranks raise the same error, which tells the reason; it is its cause
    here.
    """

    __slots__ = ("is_refused", "keep", "name", "refusal", "stream")

    def __init__(self, stream: int = 0):
        self.keep: List[Any] = []
        self.refusal: Optional[Exception] = None
        self.is_refused = False  # True: the call is refused regardless of its arguments
        self.name = ""  # of the argument that caused it
        self.stream = stream

    def __enter__(self) -> "Marshal":
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self.refusal, self.is_refused = error, True
        return True

    def call(self, rank: int, function: Any, *args: Any) -> None:
        """Calls a collective function of the library on this rank. Raises its failure."""
        try:
            if self.is_refused:
                lib.refuse_next_call(self._text())
            status = function(*args)
        finally:
            if self.is_refused:
                lib.refuse_next_call(None)  # still pending if the call was interrupted, or its own handle is invalid
        if status:
            fail(rank, self.refusal)
        if caught:
            raise_caught()

    def call_alone(self, function: Any, *args: Any) -> None:
        """Calls a function of the library that is not collective. Raises its failure."""
        if self.refusal is not None:
            raise Error(self._text().decode(errors="replace"), ErrorCode.INVALID_ARGUMENT) from self.refusal
        if function(*args):
            fail()

    def _text(self) -> bytes:
        return named_refusal(self.name, self.refusal)

    def put(self, struct_: ctypes.Structure, offset: int, value: Any) -> None:
        """Sets the input at this offset; None: no input."""
        if value is None:
            return
        try:
            reader = _readers.get(type(value)) or _reader_of(type(value))
            _LAYOUT.pack_into(struct_, offset, *reader(value, self.keep, self.stream))
        except Exception as error:
            self._refuse(struct_, offset, error)

    def put_output(self, struct_: ctypes.Structure, offset: int, value: Any) -> None:
        """As put, for memory that the call writes to."""
        if value is None:
            return
        try:
            reader = _readers.get(type(value)) or _reader_of(type(value))
            if reader is _numpy_in:
                if not (value.flags.c_contiguous and value.flags.writeable):
                    raise ValueError("an output must be contiguous and writable")
                fields = _numpy_fields(value)
            else:
                fields = reader(value, self.keep, self.stream)
            _LAYOUT.pack_into(struct_, offset, *fields)
        except Exception as error:
            self._refuse(struct_, offset, error)

    def keep_values(self, *values: Any) -> None:
        self.keep.extend(values)

    def _refuse(self, struct_: ctypes.Structure, offset: int, error: Exception) -> None:
        """The array at this offset cannot be used."""
        if not self.is_refused:
            self.refusal, self.is_refused, self.name = error, True, _name_at(type(struct_), offset)
        _LAYOUT.pack_into(struct_, offset, *_REFUSED)


def named_refusal(name: str, error: Optional[Exception]) -> bytes:
    """What all ranks are told of an argument."""
    return (f"{name}: ".encode() if name else b"") + refusal_text(error)


def _name_at(kind: Any, offset: int) -> str:
    """The field of a struct that holds a tensor, such as "weights.experts.w1"; of an array of tensors its index."""
    if not hasattr(kind, "_fields_"):
        return f"array {offset // ctypes.sizeof(CTensor)}"
    for name, inner, *_ in kind._fields_:
        first = getattr(kind, name).offset
        if first <= offset < first + ctypes.sizeof(inner):
            has_more = inner not in (CTensor, COutput) and hasattr(inner, "_fields_")
            return f"{name}.{_name_at(inner, offset - first)}" if has_more else name
    return ""


# ---- Out ----


def result(struct_: ctypes.Structure, offset: int, given: Any, like: Any, stream: int) -> Any:
    """The output at this offset after a call: the one that the caller passed, or an array of the library's memory.

    The latter is a numpy array if `like`, an input of the call, is one. None if the call has no such output.
    """
    if given is not None:
        return given
    fields = _LAYOUT.unpack_from(struct_, offset)
    if fields[5] == 0:
        return None
    array = Array(fields, COutput.from_buffer_copy(struct_, offset), None, stream)
    return array.numpy() if is_numpy(like) else array


def view(fields: Fields, keeper: Any) -> Any:
    """An array of memory that `keeper` owns: numpy's where numpy is in use, else an Array."""
    array = Array(fields, None, keeper)
    return array.numpy() if array.device is None and sys.modules.get("numpy") is not None else array


def view_1d(ptr: Optional[int], dtype: DType, size: int, device: Optional[int], keeper: Any) -> Any:
    return view(fields_of(ptr or 0, dtype, (size,), device), keeper)


def fields_at(struct_: ctypes.Structure, offset: int) -> Fields:
    """The tensor at this offset."""
    return _LAYOUT.unpack_from(struct_, offset)


def ml_dtype(dtype: DType, otherwise: Any) -> Any:
    try:
        import ml_dtypes
    except ImportError:
        return otherwise
    return getattr(ml_dtypes, _WITHOUT_NUMPY[dtype], otherwise)
