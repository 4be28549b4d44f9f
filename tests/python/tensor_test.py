"""Arrays that are not numpy's: DLPack in and out, addresses, bf16."""
import gc

import numpy as np
import pytest
from case import CONFIG, D, Case
from conftest import run_threads

import crossdock
from crossdock import DType


class Foreign:
    """An array of another library, which supports only DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def planned(group):
    case = Case(group.rank)
    dispatcher = crossdock.Dispatcher(group, **CONFIG)
    return case, dispatcher, dispatcher.plan(case.expert_ids, case.weights)


def test_dlpack_in_and_out_without_a_copy():
    def body(group):
        case, dispatcher, expected_plan = planned(group)
        expected = dispatcher.dispatch(expected_plan, case.x).rows
        plan = dispatcher.plan(Foreign(case.expert_ids), Foreign(case.weights))
        sent = dispatcher.dispatch(plan, Foreign(case.x))
        assert isinstance(sent.rows, crossdock.Array)
        assert sent.rows.shape == expected.shape and sent.rows.dtype == DType.F32 and sent.rows.device is None
        rows = np.from_dlpack(sent.rows)
        np.testing.assert_array_equal(rows, expected)
        if rows.size:
            assert rows.__array_interface__["data"][0] == sent.rows.ptr
        out = np.empty_like(case.x)
        foreign = Foreign(out)
        assert dispatcher.combine(plan, Foreign(rows.copy()), out=foreign) is foreign
        np.testing.assert_array_equal(out, dispatcher.combine(expected_plan, expected))

    run_threads(3, body)


def test_an_exported_array_keeps_its_memory():
    def body(group):
        case, dispatcher, plan = planned(group)
        rows = dispatcher.allocate_rows(plan, DType.F32)
        shared = np.from_dlpack(rows)
        also = np.from_dlpack(rows)
        address = rows.ptr
        rows.release()
        rows.release()  # does nothing
        assert repr(rows) == "crossdock.Array(released)"
        del rows, shared
        gc.collect()
        assert dispatcher.allocate_rows(plan, DType.F32).ptr != address
        assert also.shape == (plan.capacity_rows, D)
        del also
        gc.collect()
        taken = [dispatcher.allocate_rows(plan, DType.F32) for _ in range(3)]
        assert address in [array.ptr for array in taken]

    run_threads(1, body)


def test_a_capsule_that_nobody_takes_is_released():
    def body(group):
        _, dispatcher, plan = planned(group)
        held = None
        for _ in range(50):
            dispatcher.allocate_rows(plan, DType.F32).__dlpack__()
            held = held or group.pool_bytes + group.window_bytes
            assert group.pool_bytes + group.window_bytes == held

    run_threads(1, body)


def test_what_cannot_be_exported_is_refused():
    def body(group):
        _, dispatcher, plan = planned(group)
        rows = dispatcher.allocate_rows(plan, DType.F32)
        with pytest.raises(BufferError):
            rows.__dlpack__(copy=True)
        with pytest.raises(BufferError):
            rows.__dlpack__(dl_device=(2, 0))
        assert rows.__dlpack__(max_version=(1, 0), dl_device=(1, 0), copy=False) is not None
        rows.release()
        with pytest.raises(BufferError):
            rows.__dlpack__()

    run_threads(1, body)


def test_foreign_arrays_must_be_contiguous():
    def body(group):
        case, dispatcher, plan = planned(group)
        with pytest.raises(crossdock.Error) as raised:
            dispatcher.dispatch(plan, Foreign(np.asfortranarray(case.x)))
        assert "contiguous" in str(raised.value.__cause__)

    run_threads(1, body)


def test_addresses_without_numpy():
    def body(group):
        case, dispatcher, plan = planned(group)
        expected = dispatcher.dispatch(plan, case.x).rows
        x = crossdock.Tensor(case.x.ctypes.data, DType.F32, case.x.shape)
        rows = np.full_like(expected, -7)
        given = crossdock.Tensor(rows.ctypes.data, DType.F32, rows.shape)
        assert dispatcher.dispatch(plan, x, rows=given).rows is given
        np.testing.assert_array_equal(rows, expected)
        provided = dispatcher.dispatch(plan, x).rows
        assert isinstance(provided, crossdock.Array) and provided.nbytes == rows.nbytes
        np.testing.assert_array_equal(provided.numpy(), expected)

    run_threads(2, body)


def test_bf16_moves_bit_for_bit():
    def body(group):
        case, dispatcher, plan = planned(group)
        bits = (np.arange(case.x.size, dtype=np.uint16) + 0x3F80).reshape(case.x.shape)
        x = crossdock.Tensor(bits.ctypes.data, DType.BF16, bits.shape)
        rows = dispatcher.dispatch(plan, x).rows
        assert rows.dtype == DType.BF16 and rows.numpy().dtype.itemsize == 2
        routes = dispatcher.combine(plan, rows, weighted=False)
        assert routes.dtype == DType.BF16 and routes.shape == (case.T, D)
        expected = np.concatenate([bits[t : t + 1] for t, k in zip(*np.nonzero(case.kept))])
        got = np.sort(np.asarray(rows).view(np.uint16), axis=None)
        np.testing.assert_array_equal(got, np.sort(expected, axis=None))

    run_threads(1, body)


@pytest.mark.parametrize(
    "given, expected",
    [("fp32", 2), ("bf16", 3), ("F16", 4), (np.float64, 1), (np.dtype("int64"), 7), (DType.BOOL, 10), (2, 2)],
)
def test_names_of_dtypes(given, expected):
    from crossdock._dtype import to_dtype

    assert to_dtype(given) == expected


def test_an_unknown_dtype_is_refused():
    from crossdock._dtype import to_dtype

    with pytest.raises(ValueError, match="bf16"):
        to_dtype("int4")


def test_tensors_have_at_most_four_dimensions():
    assert crossdock.Tensor(0, DType.F32, (1, 2, 3, 4)).shape == (1, 2, 3, 4)
    assert repr(crossdock.Tensor(16, 0, [5], 1)) == "crossdock.Tensor(0x10, 0, (5,), cuda:1)"
    with pytest.raises(ValueError):
        crossdock.Tensor(0, DType.F32, (1, 1, 1, 1, 1))
    with pytest.raises(ValueError):
        crossdock.Tensor(0, DType.F32, ())
