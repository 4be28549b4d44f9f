"""The planner's answer as a dict."""
import json
import pathlib
import subprocess
import sys

import pytest

import crossdock

JOB = {"tokens": 4096, "nodes": 4, "ranks_per_node": 8}


def test_the_answer_is_a_dict():
    answer = crossdock.plan("deepseek-v3", **JOB)
    assert answer["num_ranks"] == 32 and answer["tokens"] == 4096
    assert answer["strategy"] in answer["strategies"] and answer["reason"]
    direct = answer["strategies"]["direct"]
    assert direct["dispatch"]["bytes_between_nodes"] > 0 and direct["step_serial_s"] >= direct["step_lower_bound_s"]
    json.dumps(answer)


def test_sizes_take_the_place_of_those_of_the_model():
    half = crossdock.plan("deepseek-v3", width=3584, **JOB)["strategies"]["direct"]
    full = crossdock.plan("deepseek-v3", **JOB)["strategies"]["direct"]
    assert half["dispatch"]["bytes_within_node"] < full["dispatch"]["bytes_within_node"]


def test_partial_sums_have_a_type():
    def back(partial_sums):
        answer = crossdock.plan("deepseek-v3", partial_sums=partial_sums, **JOB)
        return answer["strategies"]["hierarchical"]["combine"]["bytes_between_nodes"]

    assert back(True) == back("fp32") == 2 * back("rows")
    assert back(False) > back("fp32")
    with pytest.raises(ValueError, match="partial_sums must be"):
        back("bf16")


def test_an_impossible_job_is_an_error():
    with pytest.raises(crossdock.Error, match="top_k") as raised:
        crossdock.plan(width=8, num_experts=4, top_k=5, tokens=16)
    assert raised.value.code == crossdock.ErrorCode.INVALID_ARGUMENT
    with pytest.raises(crossdock.Error, match="deepseek-v3"):
        crossdock.plan("nonesuch", tokens=1)


def test_the_command_says_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", "plan", "--model", "deepseek-v3", "--tokens", "4096", "--nodes", "4",
         "--ranks-per-node", "8", "--json"],
        cwd=pathlib.Path(crossdock.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "not beside the library" in done.stderr:
        pytest.skip("the command was not built")
    said = json.loads(done.stdout)
    answer = crossdock.plan("deepseek-v3", **JOB)
    assert answer["strategy"] == said["strategy"] and answer["reason"] == said["reason"]
    for strategy in said["strategies"]:
        ours = answer["strategies"][strategy["name"]]
        assert ours["dispatch"]["bytes_within_node"] == pytest.approx(strategy["dispatch"]["bytes"]["within_node"])
        assert ours["step_serial_s"] == pytest.approx(strategy["step_serial_s"])
