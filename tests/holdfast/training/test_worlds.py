"""Real processes over gloo: the same training in any world, and one agreed step for each request."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.protocol import EXIT_PEER_LOST

APART = Path(__file__).parent / "scripts" / "apart.py"


def results(launcher: Any) -> list[dict[str, Any]]:
    assert launcher.finish() == [0] * len(launcher.processes), launcher.output()
    return [launcher.told(slot) for slot in sorted(launcher.processes)]


def alone(solo: Any, script: Any, batch: int) -> tuple[list[float], list[float], str]:
    """Run the same training in this process: losses, weights, audit."""
    job = solo(None).job
    torch.manual_seed(0)
    model = script.Net().to(torch.float64)
    job.manage(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), max_grad_norm=5.0)
    losses = []
    for x, y in job.batches(script.Points(), global_batch_size=batch, micro_batch_size=2, max_steps=12):
        result = job.step((model(x) - y).square().mean())
        if result.committed:
            losses.append(result.loss)
    assert model.never.item() == 1.0  # parameters that no rank uses do not decay either
    return losses, _flat([parameter.tolist() for parameter in model.parameters()]), str(job.audit())


@pytest.mark.parametrize(("world", "batch"), [(2, 7), (3, 2)], ids=["uneven shares", "a rank without samples"])
def test_every_world_trains_alike(  # noqa: PLR0917  (fixtures)
    launcher: Any, tmp_path: Path, solo: Any, script: Any, world: int, batch: int
) -> None:
    launcher.start(world, tmp_path / "tier", "--global-batch", str(batch))
    losses, weights, audit = alone(solo, script, batch)
    runs = results(launcher)
    for what in ("weights", "statistics"):
        assert all(run[what] == runs[0][what] for run in runs)
    assert runs[0]["losses"] == pytest.approx(losses, rel=1e-9, abs=1e-12)
    assert _flat(runs[0]["weights"]) == pytest.approx(weights, rel=1e-7, abs=1e-9)
    assert {run["audit"] for run in runs} == {audit}
    assert audit.startswith(f"exactly once ({12 * batch} samples")
    assert {message["step"] for rank in range(world) for message in launcher.of(rank, "done")} == {12}


@pytest.mark.parametrize("own", [True, False])
def test_state_that_differs_between_ranks_is_told_once_by_name(launcher: Any, tmp_path: Path, own: bool) -> None:
    launcher.interval = "3"
    launcher.start(2, tmp_path / "tier", *(["--own-reader"] if own else []))
    results(launcher)
    assert len({told["step"] for told in launcher.of(0, "checkpoint")}) == 4
    said = [output.count("is managed, but its state on rank") for output in launcher.output()]
    assert said == [int(own), 0]
    assert ("'reader' is managed, but its state on rank 1 differs from rank 0" in launcher.output()[0]) == own


def test_ranks_with_different_models_are_refused_at_the_start(launcher: Any, tmp_path: Path) -> None:
    """Nothing is averaged before the refusal."""
    launcher.start(2, tmp_path / "tier", "--wider-in-slot", "1")
    assert all(launcher.finish()), "torch's own abort would be a signal"
    for slot in (0, 1):
        (told,) = launcher.of(slot, "exception")
        assert told["name"] == "UsageError"
        expected = "rank 0 has model.inner.weight (shape (16, 5), torch.float64), where rank 1 has "
        assert expected + "model.inner.weight (shape (17, 5), torch.float64)" in told["message"]
        assert launcher.of(slot, "step") == []


def _flat(value: Any) -> list[float]:
    return [value] if isinstance(value, float) else [x for item in value for x in _flat(item)]


def test_request_to_one_rank_is_a_checkpoint_of_all_ranks(launcher: Any, tmp_path: Path) -> None:
    """`quiesce` ends the steps."""
    root = tmp_path / "tier"
    launcher.start(3, root, "--steps", "100000", "--pause", "0.002")
    launcher.wait("the first steps", lambda: all(len(launcher.of(rank, "step")) > 2 for rank in range(3)))
    launcher.ask(1, "checkpoint", "touch-1")
    launcher.wait("the commit", lambda: all(launcher.of(rank, "checkpoint") for rank in range(3)))
    commits = [launcher.of(rank, "checkpoint")[0] for rank in range(3)]
    assert {commit["result"] for commit in commits} == {"Committed"}
    assert len({commit["step"] for commit in commits}) == 1
    assert [commit["ids"] for commit in commits] == [[], ["touch-1"], []]
    assert (root / f"step-{commits[0]['step']}.g1.a1" / "MANIFEST.json").exists()

    launcher.ask(2, "quiesce", "drain-1")
    launcher.wait("the last step", lambda: all(launcher.of(rank, "quiesced") for rank in range(3)))
    last = {launcher.of(rank, "quiesced")[0]["step"] for rank in range(3)}
    assert len(last) == 1
    assert {launcher.of(rank, "step")[-1]["step"] for rank in range(3)} == last
    assert launcher.of(2, "checkpoint")[-1]["ids"] == ["drain-1"]
    assert all(process.poll() is None for process in launcher.processes.values())  # they wait for another world

    for process in launcher.processes.values():
        process.kill()
        process.wait()
    launcher.start(2, root, "--steps", str(max(last) + 3), attempt=2)
    assert all(run["audit"].startswith("exactly once") for run in results(launcher))
    restored = launcher.of(0, "restored")[0]
    assert (restored["step"], restored["fromPair"]) == (max(last), {"generation": 1, "attempt": 1})
    assert [claim["claim"]["fromStep"] for claim in launcher.of(0, "claim")] == [max(last)]
    assert launcher.of(1, "claim") == []


def end(launcher: Any, slot: int) -> None:
    launcher.processes[slot].kill()
    launcher.processes[slot].wait()


def test_a_killed_peer_is_told_as_that_and_nobody_is_blamed(launcher: Any, tmp_path: Path) -> None:
    launcher.start(2, tmp_path / "tier", "--kill-at", "3")
    launcher.wait("the survivor to leave", lambda: bool(launcher.of(0, "left")))
    assert launcher.processes[1].wait() == -signal.SIGKILL
    (lost,) = launcher.of(0, "peerLost")
    (left,) = launcher.of(0, "left")
    assert (lost["step"], left["step"], left["keep"]) == (3, 3, True)
    assert launcher.processes[0].poll() is None  # it waits, and keeps its state
    assert launcher.of(0, "exception") == []
    assert launcher.of(0, "done") == []


def test_an_exception_of_the_script_is_told_with_its_last_lines(launcher: Any, tmp_path: Path) -> None:
    launcher.start(2, tmp_path / "tier", "--raise-at", "2")
    assert launcher.processes[1].wait() == 1
    (told,) = launcher.of(1, "exception")
    assert (told["name"], told["message"], told["step"]) == ("ValueError", "loss is negative", 2)
    assert told["traceback"][-1] == "ValueError: loss is negative"
    assert any("train.py" in line for line in told["traceback"])
    assert launcher.of(1, "done") == []
    assert "ValueError: loss is negative" in launcher.output()[1]


def test_peers_lose_an_exiting_rank_only_after_it_has_ended(launcher: Any, tmp_path: Path) -> None:
    launcher.start(2, tmp_path / "tier", "--exit-at", "2")
    launcher.wait("the other one to miss it", lambda: bool(launcher.of(0, "peerLost")))
    missed = time.monotonic()  # one clock for all processes
    assert launcher.processes[1].wait() == 2
    (said,) = (json.loads(line) for line in launcher.output()[1].splitlines() if line.startswith('{"ended"'))
    assert missed > said["ended"], "its connections ended before it did"


def test_a_rank_that_leaves_the_loop_early_is_not_done(launcher: Any, tmp_path: Path) -> None:
    launcher.start(2, tmp_path / "tier", "--leave-at", "2")
    assert launcher.processes[1].wait() == 0
    assert launcher.of(1, "done") == []


@pytest.mark.parametrize(
    ("mode", "apart", "mend"),
    [
        ("ends", "rank 0 ended after step 3", "samples=0"),
        ("saves", "rank 0 calls job.save() after step 3", "on every rank"),
    ],
)
def test_ranks_that_part_say_where_and_what_mends_it(
    launcher: Any, tmp_path: Path, mode: str, apart: str, mend: str
) -> None:
    launcher.script = APART
    launcher.start(2, tmp_path / "tier", mode)
    launcher.wait("one of them to find out", lambda: any(launcher.of(slot, "exception") for slot in (0, 1)))
    told = [message for slot in (0, 1) for message in launcher.of(slot, "exception")]
    assert {message["name"] for message in told} == {"UsageError"}
    for words in (apart, "rank 1 continues to step 4", mend):
        assert words in told[0]["message"]


def test_a_launcher_that_goes_away_takes_its_rank_along(launcher: Any, tmp_path: Path) -> None:
    launcher.start(1, tmp_path / "tier", "--steps", "100000", "--pause", "0.01")
    launcher.wait("the first step", lambda: bool(launcher.of(0, "step")))
    launcher._writers[0].shutdown(2)
    assert launcher.finish() == [EXIT_PEER_LOST]
