"""A model sharded over replicas: a lost shard comes from another replica's memory, and every bit is equal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.core.errors import UsageError
from holdfast.telemetry.activity import Activity, Meter
from holdfast.training.distributed.fsdp import Sharding, whole_norms

SCRIPT = Path(__file__).parents[1] / "scripts" / "sharded.py"
STEPS = 14
ORPHANED_AT = 4


@pytest.fixture
def sharded(launcher: Any) -> Any:
    """A launcher of the sharded script."""
    launcher.script = SCRIPT
    return launcher


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the model and data of the script, for a world of one in this process without shards."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("sharded_script", SCRIPT)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{SCRIPT} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules.pop("train", None)
    return module


def ended(launcher: Any, *slots: int) -> dict[int, Any]:
    """Return the final weights by shard, equal on all ranks that hold the shard."""
    for slot in slots:
        assert launcher.processes[slot].wait() == 0, launcher.output()
    told = [launcher.told(slot) for slot in slots]
    weights = {one["shard"]: one["weights"] for one in told}
    assert sorted(one["shard"] for one in told) == sorted([0, 1] * (len(slots) // 2))
    assert all(one["weights"] == weights[one["shard"]] for one in told)
    assert all(one["audit"].startswith("exactly once") for one in told)
    return weights


def lost(launcher: Any, attempt: int, dead: list[int], *others: int) -> None:
    """Wait until ranks die of their faults, and the others leave the attempt."""
    for slot in dead:
        launcher.processes.pop(slot).wait()
    assert [slot for slot in others if launcher.processes[slot].poll() is not None] == [], launcher.output()
    launcher.leave(attempt, *others)
    launcher.wait("all to leave", lambda: all(launcher.has_left(slot, attempt) for slot in others))


@pytest.fixture
def planned(sharded: Any, tmp_path: Path) -> dict[int, Any]:
    """Run three replicas to the step of the loss in the other run, then two, with a checkpoint in between."""
    sharded.start(6, tmp_path / "planned", "--steps", str(ORPHANED_AT))
    ended(sharded, *range(6))
    sharded.start(4, tmp_path / "planned", "--steps", str(STEPS), attempt=2)
    return ended(sharded, 0, 1, 2, 3)


@pytest.mark.thorough
def test_kills_at_every_point_of_a_step_keep_planned_results(
    sharded: Any, tmp_path: Path, planned: dict[int, Any]
) -> None:
    faults = f"forward:1:{ORPHANED_AT},forward:2:{ORPHANED_AT},backward:5:6,vote:4:8,optimizer:3:11"
    sharded.start(6, tmp_path / "tier", "--steps", str(STEPS), "--faults", faults)
    lost(sharded, 1, [1, 2], 0, 3, 4, 5)
    sharded.form(2, [5, 0, 4, 3])  # remaining ranks of two replicas, in any order
    lost(sharded, 2, [5], 0, 4, 3)
    sharded.form(3, [6, 0, 4, 3])
    lost(sharded, 3, [4], 6, 0, 3)
    sharded.form(4, [6, 0, 7, 3])
    lost(sharded, 4, [3], 6, 0, 7)
    sharded.form(5, [6, 0, 7, 8])
    assert ended(sharded, 0, 6, 7, 8) == planned
    restored = {slot: sharded.of(slot, "restored") for slot in (0, 6, 7, 8)}
    assert {message["source"] for said in restored.values() for message in said[-1:]} == {"memory"}
    assert [restored[slot][0]["step"] for slot in (6, 8)] == [6, 12]
    assert restored[7][0]["step"] in (8, 9), "in doubt, it is applied if all were prepared and else made again"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "faults"),
    [(4, "forward:3:3"), (6, "backward:3:3,vote:2:5,optimizer:5:8")],
    ids=["2 x 2", "3 x 2"],
)
def test_replaced_rank_gives_bits_of_an_undisturbed_run(
    sharded: Any, tmp_path: Path, ranks: int, faults: str
) -> None:
    """The remaining phases, with either number of replicas. The world keeps its size."""
    sharded.start(ranks, tmp_path / "undisturbed", "--steps", str(STEPS))
    expected = ended(sharded, *range(ranks))
    sharded.start(ranks, tmp_path / "tier", "--steps", str(STEPS), "--faults", faults)
    world = list(range(ranks))
    for attempt, fault in enumerate(faults.split(","), start=1):
        dead, newcomer = int(fault.split(":")[1]), ranks + attempt - 1
        lost(sharded, attempt, [dead], *(slot for slot in world if slot != dead))
        world[world.index(dead)] = newcomer
        sharded.form(attempt + 1, world)
    assert ended(sharded, *world) == expected
    assert {message["source"] for slot in world for message in sharded.of(slot, "restored")[-1:]} == {"memory"}


def test_rank_out_of_memory_in_backward_costs_no_process_and_no_bit(sharded: Any, tmp_path: Path) -> None:
    """The other ranks wait in collectives of backward. All repeat the step with their shards in memory."""
    sharded.start(4, tmp_path / "undisturbed", "--steps", str(STEPS))
    expected = ended(sharded, *range(4))
    sharded.start(4, tmp_path / "tier", "--steps", str(STEPS), "--faults", "memory:3:3")
    sharded.wait("the end of the attempt", lambda: sharded.has_left(3, 1))
    sharded.leave(1, 0, 1, 2)
    sharded.wait("all to leave", lambda: all(sharded.has_left(slot, 1) for slot in range(4)))
    sharded.form(2, list(range(4)))
    assert ended(sharded, *range(4)) == expected
    assert [sharded.of(slot, "restored")[-1]["source"] for slot in range(4)] == ["memory"] * 4


def test_non_finite_shard_ends_all_ranks_and_is_not_saved(sharded: Any, tmp_path: Path) -> None:
    sharded.start(2, tmp_path / "tier", "--steps", str(STEPS), "--faults", "poison:0:3")
    assert sharded.finish() == [1, 1], sharded.output()
    said = {slot: sharded.of(slot, "exception")[0] for slot in (0, 1)}
    assert [(one["name"], one["step"]) for one in said.values()] == [("NonFiniteError", 5)] * 2
    assert said[0]["message"].startswith("model.0.weight holds values that are not finite")
    assert said[1]["message"].startswith("a weight of another shard holds")
    assert list((tmp_path / "tier").glob("step-*")) == []


def roll_back(launcher: Any, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Train until the weights of rank 0 are not finite after step 7, and to the end. Return the last restores."""
    launcher.interval = "2"
    words = ("--steps", str(STEPS), "--faults", "poison:0:6", "--max-roll-backs", "1")
    launcher.start(ranks, folder, *words)
    launcher.end_attempt(1, *range(ranks))
    launcher.form(2, list(range(ranks)))
    ended(launcher, *range(ranks))
    restored = [launcher.of(slot, "restored") for slot in range(ranks)]
    assert {len(of_rank) for of_rank in restored} == {2}
    return [of_rank[-1] for of_rank in restored]


def test_non_finite_shard_rolls_all_ranks_back_to_the_same_checkpoint(sharded: Any, tmp_path: Path) -> None:
    restored = roll_back(sharded, tmp_path / "tier", 2)
    assert restored[0]["step"] == restored[1]["step"] in (6, 4), "the save of step 6 may be running"
    assert {told["source"] for told in restored} == {"checkpoint"}
    assert [told["step"] for slot in (0, 1) for told in sharded.of(slot, "rolledBack")] == [8, 8]
    assert sharded.told(0)["audit"] == sharded.told(1)["audit"]
    assert sharded.told(0)["audit"].endswith("11 skipped)")


def test_non_finite_shard_is_replaced_by_that_of_another_replica(sharded: Any, tmp_path: Path) -> None:
    restored = roll_back(sharded, tmp_path / "tier", 4)
    assert [(told["step"], told["source"]) for told in restored] == [(8, "memory")] * 4
    assert [len(sharded.of(slot, "rolledBack")) for slot in range(4)] == [1, 1, 0, 0]


def test_replica_trains_like_a_full_model_and_loads_into_one(
    sharded: Any, tmp_path: Path, solo: Any, net: Any
) -> None:
    sharded.start(2, tmp_path / "tier", "--steps", str(STEPS))
    weights = ended(sharded, 0, 1)
    for _, norm, groups in sharded.told(0)["losses"]:
        assert groups == {"0": pytest.approx(norm)}, "the only group has all parameters"
    assert sharded.told(0)["losses"] == sharded.told(1)["losses"]
    exported = net.Net().to(torch.float64)
    optimizer = torch.optim.AdamW(exported.parameters())
    assert checkpoint.load(tmp_path / "tier", model=exported, optimizer=optimizer) is not None
    parts = [[torch.tensor(rows, dtype=torch.float64) for rows in weights[shard]] for shard in (0, 1)]
    assert all(
        torch.equal(parameter, torch.cat([first, second.view(-1, *first.shape[1:])]))
        for parameter, first, second in zip(exported.parameters(), *parts, strict=True)
    )
    torch.manual_seed(0)
    whole = net.Net().to(torch.float64)
    job = solo(None).job
    job.manage(model=whole, optimizer=torch.optim.AdamW(whole.parameters(), lr=0.05), max_grad_norm=0.5)
    for x, y in job.batches(net.Points(), global_batch_size=11, micro_batch_size=2, max_steps=STEPS):
        job.step((whole(x) - y).square().mean())
    assert all(torch.allclose(*both) for both in zip(whole.parameters(), exported.parameters(), strict=True))


def test_a_shard_that_is_in_no_memory_comes_from_the_checkpoint(sharded: Any, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    sharded.interval = "4"
    sharded.start(2, root, "--steps", str(STEPS), "--hold-at", "6")
    sharded.wait("a commit", lambda: bool(list(root.glob("step-*/MANIFEST.json"))))
    sharded.processes[1].kill()
    lost(sharded, 1, [1], 0)
    sharded.go(6)
    sharded.form(2, [0, 2])
    ended(sharded, 0, 2)
    restored = [sharded.of(slot, "restored")[-1] for slot in (0, 2)]
    assert {message["source"] for message in restored} == {"checkpoint"}
    assert {message["step"] > 0 for message in restored} == {True}


def test_norms_of_shards_are_added_for_each_group() -> None:
    seen: list[list[float]] = []

    class ShardGroup:
        """The other rank, whose shards have the norms 4, 2, 1 and 0."""

        rank, size = 0, 2

        def agree_(self, squares: torch.Tensor) -> None:
            seen.extend(squares.tolist())
            squares[:, 1] = torch.tensor([16.0, 4.0, 1.0, 0.0])

    own = [3.0, 0.0, torch.nan, 1.0]
    assert whole_norms(own, ShardGroup()) == [5.0, 2.0, torch.inf, 1.0]  # type: ignore[arg-type]
    assert seen == [[9.0, -1.0], [0.0, -1.0], [torch.inf, -1.0], [1.0, -1.0]], "any value of the other rank is higher"


def test_waiting_in_compute_counts_as_waiting_for_hang_detection() -> None:
    """The rank waits for the other ranks of its shard group."""
    meter = Meter()
    sharding = Sharding(2, torch.device("cpu"), meter)
    seen = []

    class Mates:
        def launch_gather(self, *_: object) -> Any:
            return self

        launch_scatter = launch_gather

        def wait(self) -> None:
            seen.append(meter.activity)

    sharding.attach(Mates())  # type: ignore[arg-type]
    for activity in (Activity.COMPUTE, Activity.EVALUATION):
        meter.enter(activity)
        for collective in (sharding.gather, sharding.scatter):
            collective(torch.zeros(2), torch.zeros(1))
            assert meter.activity is activity
    assert seen == [Activity.AVERAGE] * 2 + [Activity.EVALUATION] * 2


# Refusals


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_world_that_is_not_made_of_whole_replicas_is_refused(solo: Any) -> None:
    job, model = solo(None).job, layers()
    job.fully_shard(model, size=2)
    with pytest.raises(
        UsageError, match=r"a world of 1 ranks cannot be divided into replicas of 2: .*--replica-step"
    ):
        job.manage(model=model, optimizer=sgd(model))


def test_a_model_of_which_only_a_part_is_sharded_is_refused(solo: Any) -> None:
    job, model = solo(None).job, layers()
    job.fully_shard(model[0], size=2)
    with pytest.raises(UsageError, match="on the complete model last"):
        job.manage(model=model, optimizer=sgd(model))


def test_a_grad_scaler_is_refused_beside_a_sharded_model(solo: Any) -> None:
    job, model = solo(None).job, layers()
    job.fully_shard(model, size=2)
    with pytest.raises(UsageError, match="mp_policy"):
        job.manage(model=model, optimizer=sgd(model), scaler=torch.amp.GradScaler("cpu"))


def test_two_sizes_in_one_script_are_refused(solo: Any) -> None:
    job, model = solo(None).job, layers()
    job.fully_shard(model[0], size=2)
    with pytest.raises(UsageError, match="size 2 and now with 4"):
        job.fully_shard(model, size=4)


def test_a_model_without_real_weights_is_refused(solo: Any) -> None:
    with pytest.raises(UsageError, match="meta device"):
        solo(None).job.fully_shard(layers().to("meta"), size=2)


def test_sharded_model_used_too_early_names_the_call_to_make(solo: Any) -> None:
    job, model = solo(None).job, layers()
    job.fully_shard(model, size=2)
    with pytest.raises(UsageError, match=r"call job\.manage"):
        model(torch.zeros(1, 5))
