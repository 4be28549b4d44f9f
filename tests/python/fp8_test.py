"""Rows in fp8: their bits, and where outputs are."""
import math
import struct

import numpy
import pytest

import crossdock

T, D = 5, 200


def rows_of(dtype="float32"):
    return (numpy.arange(T * D, dtype="float32").reshape(T, D) * 0.37 - 61).astype(dtype)


def bytes_of(array):
    if isinstance(array, crossdock.Array):
        array = array.numpy()
    return numpy.frombuffer(array.tobytes(), "uint8").reshape(array.shape[0], -1)


def decode(byte):
    sign, exponent, fraction = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


VALUES = numpy.array([decode(byte) for byte in range(256)])


def nearest(values):
    """e4m3, ties to even. For numbers of at most 448."""
    codes = numpy.arange(127)
    distance = abs(abs(values)[..., None] - VALUES[:127])
    best = numpy.where(distance == distance.min(axis=-1, keepdims=True), codes, -1)
    even = numpy.where(best % 2 == 0, best, -1).max(axis=-1)
    return numpy.where(even >= 0, even, best.max(axis=-1)) + 128 * numpy.signbit(values)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_values_and_scales_follow_the_formulas(dtype):
    x = rows_of(dtype)
    values, scales = crossdock.quantise_rows(x)
    assert scales.dtype == "float32" and scales.shape == (T, 2)
    for t in range(T):
        for group, part in enumerate((slice(0, 128), slice(128, D))):
            amax = abs(x[t, part].astype("float64")).max()
            scale = 2.0 ** math.ceil(math.log2(amax / 448))
            assert scales[t, group] == scale
            assert (bytes_of(values)[t, part] == nearest(x[t, part].astype("float64") / scale)).all()


def test_exact_scales_are_those_of_deepep():
    x = rows_of()
    values, scales = crossdock.quantise_rows(x, scale="exact", amax_floor=1e-4)
    padded = numpy.pad(x, ((0, 0), (0, 256 - D))).reshape(T, 2, 128)
    amax = numpy.maximum(abs(padded).max(axis=2), numpy.float32(1e-4))
    assert (scales == amax / numpy.float32(448)).all()
    factor = (numpy.float32(1) / amax) * numpy.float32(448)
    assert (bytes_of(values) == nearest(padded * factor[:, :, None]).reshape(T, 256)[:, :D]).all()


def test_groups_of_32_have_exponents():
    values, scales = crossdock.quantise_rows(numpy.full((1, 33), 448, "float32"), group=32)
    assert bytes_of(scales).tolist() == [[127, 127]] and (bytes_of(values) == 0x7E).all()
    _, scales = crossdock.quantise_rows(numpy.array([[0.0], [numpy.nan], [1.0]], "float32"), group=32)
    assert bytes_of(scales).tolist() == [[127], [255], [119]]


@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_come_back(group, dtype):
    x = rows_of()
    rows = crossdock.quantise_rows(x, group=group)
    out = crossdock.dequantise_rows(*rows, dtype)
    if dtype == "bf16":
        bits = bytes_of(out).reshape(T, D, 2).astype("uint32")
        out = numpy.array([struct.unpack("<f", struct.pack("<I", low << 16 | high << 24))[0] for low, high in bits.reshape(-1, 2)])
        out = out.reshape(T, D)
    assert out.shape == (T, D)
    assert (abs(out - x) <= abs(x) / 16 + 1e-3).all() and (out != x).any()


def test_outputs_may_be_given():
    x, values, scales = rows_of(), numpy.empty((T, D), "uint8"), numpy.empty((T, 2), "float32")
    given = crossdock.Tensor(values.ctypes.data, crossdock.DType.F8E4M3, (T, D))
    rows = crossdock.quantise_rows(x, values=given, scales=scales)
    assert rows.values is given and rows.scales is scales
    assert (values == bytes_of(crossdock.quantise_rows(x).values)).all()


def test_quantised_rows_can_be_dispatched():
    group = crossdock.Group.from_threads(1)[0]
    dispatcher = crossdock.Dispatcher(group, num_experts=2, top_k=1, width=D)
    plan = dispatcher.plan(numpy.array([[1], [0], [1], [0], [0]]), numpy.ones((T, 1), "float32"))
    x = rows_of()
    sent = dispatcher.dispatch(plan, *crossdock.quantise_rows(x))
    back = crossdock.dequantise_rows(sent.rows, sent.row_scales, "fp32")
    assert (back == crossdock.dequantise_rows(*crossdock.quantise_rows(x), "fp32")[[1, 3, 4, 0, 2]]).all()
    group.close()


def test_there_may_be_no_rows():
    values, scales = crossdock.quantise_rows(numpy.empty((0, D), "float32"))
    assert values.shape == (0, D) and scales.shape == (0, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"group": 64}, "group must be 128"),
        ({"scale": "floor"}, "scale must be one of pow2, exact"),
        ({"group": 32, "scale": "exact"}, 'scale must be "pow2"'),
        ({"amax_floor": -1.0}, "amax_floor must be finite and not negative"),
        ({"scales": numpy.empty((T, 3), "float32")}, r"scales must be \[5, 2\] fp32"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, crossdock.Error), match=message):
        crossdock.quantise_rows(rows_of(), **arguments)
    with pytest.raises((TypeError, crossdock.Error), match="x must be fp32, bf16 or fp16"):
        crossdock.quantise_rows(rows_of("float64"))
