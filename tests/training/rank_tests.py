"""Tests on 8 ranks: short forms of the program's check, its faults, and checkpoints."""
import dataclasses
import pathlib
import shutil
import tempfile
import types
from unittest import mock

import check
import faults
import torch
import torch.distributed as dist
from compare import Case, Comparison, judge, train
from mesh import MeshShape, make_groups
from presets import PRESETS
from training import Trainer

comparison = Comparison()


def short(name, settings, steps=4, **options):
    return Case(name, settings, steps=steps, must_fall=False, **options)


def agrees(case):
    verdict = comparison.run(case)
    assert not verdict.problems, f"{case.name}: {verdict.problems}"
    if dist.get_rank() == 0:
        print(f"    {case.name}: {verdict.text}", flush=True)


def meshes_agree_with_one_rank():
    for number, (name, settings) in enumerate(check.MESHES.items()):
        strategy = check.STRATEGIES[number % 4]
        agrees(short(f"{name} {strategy}", check.with_strategy(settings, strategy)))


def strategies_agree_with_one_rank():
    for strategy in check.STRATEGIES:
        agrees(short(f"etp2·ep2 {strategy}", check.with_strategy(check.MESHES["etp2·ep2"], strategy), steps=2))


def simulated_nodes_make_hierarchical_differ_from_direct():
    settings = check.with_strategy(check.MESHES["etp2·ep2"], "hierarchical")
    found = on_mesh(settings, lambda trainer: (trainer.dispatcher.strategy, trainer.dispatcher.group.num_nodes))
    assert found in (None, ("hierarchical", 2)), found


def presets_agree_with_one_rank():
    for preset in ("mixtral", "deepseek-v3", "gpt-oss"):
        agrees(short(preset, dataclasses.replace(check.MESHES["etp2·ep2"], model=PRESETS[preset])))


def ddp_and_sharded_experts_agree_with_one_rank():
    mesh = MeshShape(dp=2, tp=2, ep=2)
    for mode in ("ddp", "fsdp"):
        agrees(short(mode, dataclasses.replace(check.EXACT, mesh=mesh, data_parallel=mode)))
    piped = MeshShape(dp=2, tp=2, pp=2, ep=2)
    agrees(short("fsdp pp2", dataclasses.replace(check.EXACT, mesh=piped, data_parallel="fsdp", micro_batches=4)))


def ranks_without_tokens_and_idle_experts_agree_with_one_rank():
    for case in check.empty_cases():
        agrees(dataclasses.replace(case, steps=4, must_fall=False))


def single_precision_agrees_with_one_rank():
    settings = dataclasses.replace(check.MESHES["tp2·cp2·ep2"], dtype=torch.float32)
    agrees(short("float32", settings, steps=5, first=1e-4, later=1e-4))


def the_loss_falls():
    settings = dataclasses.replace(check.MESHES["tp2·ep2"], rows=2)
    agrees(Case("30 steps", settings, steps=30))


def on_mesh(settings, work):
    """Calls work(trainer) on the ranks of the mesh; the others wait."""
    make_groups(settings.mesh)
    result = None
    if dist.get_rank() < settings.mesh.world:
        trainer = Trainer(settings)
        result = work(trainer)
        trainer.close()
    dist.barrier()
    return result


def several_micro_batches_are_in_flight():
    settings = check.MESHES["tp2·cp2·pp2·ep2"]
    result = train(settings, 1)
    assert result.most_in_flight == (2 if dist.get_rank() < 4 else 1), result.most_in_flight


class PlainDispatcher:
    """All experts on this rank, in plain torch."""

    def dispatch(self, x, expert_ids, weights, row_weights):
        by_expert = expert_ids.flatten().argsort(stable=True)
        tokens = by_expert // expert_ids.shape[1]
        counts = torch.bincount(expert_ids.flatten(), minlength=PRESETS["qwen3"].experts)
        handle = (tokens, weights.flatten()[by_expert], x.shape)
        return types.SimpleNamespace(rows=x[tokens], tokens_per_expert=counts, handle=handle)

    def combine(self, y, handle):
        tokens, weights, shape = handle
        return y.new_zeros(shape).index_add(0, tokens, y * weights[:, None])

    def close(self):
        pass


def one_rank_agrees_with_plain_torch():
    settings = dataclasses.replace(check.EXACT, mesh=MeshShape())
    make_groups(settings.mesh)
    if dist.get_rank() == 0:
        got = train(settings, 5)
        with mock.patch("training.make_dispatcher", lambda *_, **__: PlainDispatcher()):
            want = train(settings, 5)
        verdict = judge(short("one rank", settings), got, want)
        assert not verdict.problems, verdict.problems
    dist.barrier()


def sees(fault, settings, words):
    case = short(fault.__name__, settings, steps=1)
    with fault():
        problems = comparison.run(case).problems
    assert any(words in problem for problem in problems), f"{fault.__name__} was not seen: {problems}"
    agrees(case)


def faults_are_seen():
    sees(faults.naive_placement, check.MESHES["tp2·ep2"], "loss of step 1")
    sees(faults.averaged_gradients, check.MESHES["ep4"], "gradient of embedding.weight")
    sees(faults.replicated_tokens, check.MESHES["tp2·ep2"], "gradient of blocks.0.moe.experts.gate")
    idle = dataclasses.replace(PRESETS["mixtral"], idle_expert=3)
    sees(faults.skipped_empty_expert, dataclasses.replace(check.MESHES["ep4"], model=idle), "have no gradient")


def shared_folder():
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return pathlib.Path(name[0])


def checkpoints_continue_on_the_same_mesh_and_on_others():
    settings = dataclasses.replace(check.MESHES["ep4"], model=PRESETS["deepseek-v3"])
    folder = shared_folder()

    def save_after_three(trainer):
        first = [trainer.train_step() for _ in range(3)]
        trainer.save(folder)
        return first + [trainer.train_step() for _ in range(2)]

    def resume(trainer):
        assert trainer.resume(folder) and trainer.step == 3
        return [trainer.train_step() for _ in range(2)]

    whole = on_mesh(settings, save_after_three)
    for mesh, mode in ((settings.mesh, "sum"), (MeshShape(tp=2, cp=2, ep=2), "fsdp"), (MeshShape(pp=2), "sum")):
        got = on_mesh(dataclasses.replace(settings, mesh=mesh, data_parallel=mode), resume)
        allowed = 0.0 if mesh == settings.mesh else 1e-9
        for a, b in zip(got or [], whole[3:] if got else []):
            assert abs(a.loss - b.loss) <= allowed * b.loss and a.step == b.step, (mesh, a, b)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def dropped_routes_are_counted():
    settings = dataclasses.replace(check.MESHES["ep4"], capacity_factor=0.5)
    metrics = on_mesh(settings, lambda trainer: trainer.train_step())
    assert metrics is None or metrics.dropped > 0, metrics


TESTS = [
    one_rank_agrees_with_plain_torch,
    meshes_agree_with_one_rank,
    strategies_agree_with_one_rank,
    simulated_nodes_make_hierarchical_differ_from_direct,
    presets_agree_with_one_rank,
    ddp_and_sharded_experts_agree_with_one_rank,
    ranks_without_tokens_and_idle_experts_agree_with_one_rank,
    single_precision_agrees_with_one_rank,
    the_loss_falls,
    several_micro_batches_are_in_flight,
    faults_are_seen,
    checkpoints_continue_on_the_same_mesh_and_on_others,
    dropped_routes_are_counted,
]
