"""Groups, errors and the requirements of importing the package."""
import copy
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import pytest
from conftest import run_threads

import crossdock


def test_threads_are_ranks():
    groups = crossdock.Group.from_threads(3)
    assert [group.rank for group in groups] == [0, 1, 2] and {group.size for group in groups} == {3}
    assert groups[0].communicator == "threads" and not groups[0].is_poisoned and not groups[0].closed
    groups[0].check()
    for group in groups:
        group.close()
        group.close()
        assert group.closed
    with pytest.raises(crossdock.Error, match="^the group has been closed$"):
        groups[0].check()
    with pytest.raises(crossdock.Error, match="^the group has been closed$"):
        crossdock.Dispatcher(groups[0], num_experts=1, top_k=1, width=1)


def test_simulated_nodes():
    groups = crossdock.Group.from_threads(4, ranks_per_node=2)
    assert [group.node for group in groups] == [0, 0, 1, 1] and groups[0].num_nodes == 2


def test_a_rank_that_leaves_is_named():
    def body(group):
        if group.rank == 1:
            group.leave("it had enough")
            return
        dispatcher = crossdock.Dispatcher(group, num_experts=2, top_k=1, width=4)
        with pytest.raises(crossdock.Error, match="it had enough") as raised:
            dispatcher.plan()
        assert raised.value.code == crossdock.ErrorCode.PEER_FAILED and raised.value.culprit == 1
        assert group.is_poisoned
        with pytest.raises(crossdock.Error, match="it had enough"):
            group.check()

    run_threads(2, body)


def test_sums_over_the_ranks():
    numpy = pytest.importorskip("numpy")

    def body(group):
        a = numpy.arange(5, dtype=numpy.float32) + group.rank
        b = numpy.full((2, 3), 10.0**group.rank)
        group.all_reduce(a, b)
        assert a.tolist() == [3, 6, 9, 12, 15] and (b == 111).all()
        part = numpy.zeros(group.rank + 1, numpy.int64)  # 1, 2 and 3 of the 6 elements
        group.reduce_scatter(numpy.arange(6) * (group.rank + 1), part)
        assert part.tolist() == [[0], [6, 12], [18, 24, 30]][group.rank]
        with pytest.raises(crossdock.Error) as raised:
            group.all_reduce(numpy.zeros(2 + group.rank % 2))
        assert not group.is_poisoned and raised.value.code == crossdock.ErrorCode.MISMATCH

    run_threads(3, body)


def test_a_group_of_the_environment_needs_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(crossdock.Error, match="set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT") as raised:
        crossdock.Group.from_environment()
    assert raised.value.code == crossdock.ErrorCode.UNSUPPORTED and raised.value.culprit is None


def test_a_group_of_one_process_by_blobs():
    with crossdock.Group.from_all_gather(lambda blob: [blob], 0) as group:
        assert (group.rank, group.size, group.communicator) == (0, 1, "sockets")


def test_a_bootstrap_joins_once():
    bootstrap = crossdock.Bootstrap("127.0.0.1")
    blob = bootstrap.blob
    bootstrap.join([blob], 0).close()
    with pytest.raises(crossdock.Error, match="^the bootstrap has been closed$"):
        bootstrap.join([blob], 0)
    bootstrap.close()


def test_unknown_options_are_refused():
    with pytest.raises(TypeError):
        crossdock.Group.from_threads(1, deadline=3)


def test_integers_that_a_field_cannot_hold_are_refused():
    with pytest.raises(ValueError, match=r"size must be in \[-2147483648, 2147483647\], got 4294967297"):
        crossdock.Group.from_threads(2**32 + 1)
    with pytest.raises(ValueError, match="num_threads must be in .*, got 4294967297"):
        crossdock.Group.from_threads(1, num_threads=2**32 + 1)
    (group,) = crossdock.Group.from_threads(1)
    with pytest.raises(ValueError, match=r"members\[0\] must be in .*, got 4294967296"):
        group.subgroup([2**32])


def test_a_group_is_shared_by_copies_and_stays_in_its_process():
    (group,) = crossdock.Group.from_threads(1)
    dispatcher = crossdock.Dispatcher(group, num_experts=1, top_k=1, width=1)
    for shared in (group, dispatcher):
        assert copy.copy(shared) is copy.deepcopy([shared])[0] is shared
        with pytest.raises(TypeError, match="belongs to its process and cannot be copied or pickled"):
            pickle.dumps(shared)


def test_errors_can_be_sent_between_processes():
    error = crossdock.Error("rank 3 left", crossdock.ErrorCode.PEER_FAILED, 3, "dispatch", 7)
    sent = pickle.loads(pickle.dumps(error))
    assert (str(sent), sent.code, sent.culprit, sent.operation, sent.sequence) == ("rank 3 left", 5, 3, "dispatch", 7)
    assert crossdock.ErrorCode.CUDA_FAILURE.text.startswith("cuda")


def test_importing_needs_neither_numpy_nor_torch():
    script = (
        "import sys; sys.modules.update(numpy=None, torch=None); import crossdock, ctypes;"
        "group = crossdock.Group.from_threads(1)[0];"
        "d = crossdock.Dispatcher(group, num_experts=1, top_k=1, width=1);"
        "ids, weights, x = (ctypes.c_int32 * 1)(0), (ctypes.c_float * 1)(1), (ctypes.c_float * 1)(42);"
        "T = lambda value, dtype: crossdock.Tensor(ctypes.addressof(value), dtype, (1, 1));"
        "plan = d.plan(T(ids, 8), T(weights, 2)); rows = d.dispatch(plan, T(x, 2)).rows;"
        "print(ctypes.c_float.from_address(rows.ptr).value, plan.tokens_per_expert(), plan.segment_counts)"
    )
    path = pathlib.Path(crossdock.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("42.0 [1] crossdock.Array(I64, (1,), host)")


def test_the_package_is_typed_and_documented():
    assert (pathlib.Path(crossdock.__file__).parent / "py.typed").exists()
    for name in crossdock.__all__:
        if not name.startswith("_"):
            assert getattr(crossdock, name).__doc__, name


def test_the_command_runs():
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", "--version"],
        cwd=pathlib.Path(crossdock.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "not beside the library" in done.stderr:
        pytest.skip("the command was not built")
    assert done.returncode == 0 and crossdock.__version__ in done.stdout


def test_without_the_command_its_packages_are_named(tmp_path):
    library = shutil.copy(crossdock.find_library(), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", "info"],
        cwd=pathlib.Path(crossdock.__file__).parents[1],
        env={**os.environ, "CROSSDOCK_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "libcli11-dev nlohmann-json3-dev" in done.stderr


def test_the_version_is_that_of_the_headers():
    header = pathlib.Path(__file__).resolve().parents[2] / "include/crossdock/version.h"
    assert f'#define CROSSDOCK_VERSION "{crossdock.__version__}"\n' in header.read_text()


def test_a_library_that_cannot_be_used_says_what_to_do(tmp_path):
    script = "import crossdock"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=pathlib.Path(crossdock.__file__).parents[1],
        env={"CROSSDOCK_LIBRARY": str(tmp_path / "none.so")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ImportError: crossdock: cannot use the library" in done.stderr and "make python" in done.stderr


def test_the_example_runs():
    example = pathlib.Path(__file__).resolve().parents[2] / "examples" / "07_python.py"
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(crossdock.__file__).parents[1])}
    done = subprocess.run([sys.executable, example], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("of 4") == 4, done.stderr
