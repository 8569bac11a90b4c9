"""A lost peer costs no step: survivors keep their state, enter a new world, and send their state to joining ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

STEPS = "60"
SLOWLY = ("--steps", STEPS, "--pause", "0.01", "--hold-at", "20", "40")
"""Whoever is slower than the ranks finds them at one of these steps."""


def steps(launcher: Any, slot: int) -> list[int]:
    return [message["step"] for message in launcher.of(slot, "step")]


def trains(launcher: Any, *slots: int, beyond: int) -> None:
    launcher.wait(f"steps beyond {beyond}", lambda: all(steps(launcher, s)[-1:] > [beyond] for s in slots))


def kill(launcher: Any, slot: int, *, held_at: int = 20) -> None:
    """Kill a rank. The others continue, and detect the loss."""
    os.kill(launcher.processes[slot].pid, signal.SIGKILL)
    launcher.processes.pop(slot).wait()
    launcher.go(held_at)


def assert_whole(launcher: Any, *slots: int) -> None:
    """Assert every step once at each survivor, one final state everywhere, and every sample exactly once."""
    for step in (20, 40):
        launcher.go(step)
    for slot in slots:
        assert launcher.processes[slot].wait() == 0, launcher.output()
    told = [launcher.told(slot) for slot in slots]
    for what in ("weights", "statistics", "audit"):
        assert all(one[what] == told[0][what] for one in told)
    assert told[0]["audit"].startswith("exactly once")
    for slot in slots:
        seen = steps(launcher, slot)
        assert seen == list(range(seen[0], int(STEPS) + 1)), f"slot {slot} made {seen}"


def test_two_go_on_where_three_stood_and_no_step_is_lost(launcher: Any, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    launcher.start(3, root, *SLOWLY)
    trains(launcher, 0, 1, 2, beyond=5)
    kill(launcher, 2)
    launcher.end_attempt(1, 0, 1)
    reached = max(steps(launcher, slot)[-1] for slot in (0, 1))
    launcher.form(2, [0, 1])
    assert_whole(launcher, 0, 1)
    restored = [launcher.of(slot, "restored")[-1] for slot in (0, 1)]
    assert {(message["source"], message["step"] >= reached) for message in restored} == {("memory", True)}
    assert not list(root.glob("step-*.g1.a1")), "nothing was read from a checkpoint: there was none"


def test_joining_rank_gets_its_state_from_memory(launcher: Any, tmp_path: Path) -> None:
    """Rank numbers may change."""
    launcher.start(3, tmp_path / "tier", *SLOWLY)
    trains(launcher, 0, 1, 2, beyond=5)
    kill(launcher, 0)
    launcher.end_attempt(1, 1, 2)
    launcher.form(2, [3, 1, 2])  # the joining rank is rank 0, and therefore the coordinator
    assert_whole(launcher, 1, 2, 3)
    assert [message["source"] for message in launcher.of(3, "restored")] == ["memory"]
    assert launcher.of(3, "restored")[0]["step"] == steps(launcher, 3)[0] - 1 > 0
    assert launcher.of(3, "claim") == [], "the attempt goes on under the generation's claim"


def test_joining_rank_with_another_model_is_refused_without_loss(launcher: Any, tmp_path: Path) -> None:
    launcher.start(3, tmp_path / "tier", *SLOWLY, "--wider-in-slot", "3")
    trains(launcher, 0, 1, 2, beyond=5)
    kill(launcher, 0)
    launcher.end_attempt(1, 1, 2)
    launcher.form(2, [3, 1, 2])
    launcher.wait("the newcomer to be refused", lambda: bool(launcher.of(3, "exception")))
    assert "where rank 0 has model.inner.weight (shape (17, 5)" in launcher.of(3, "exception")[0]["message"]
    assert launcher.processes.pop(3).wait() == 1
    launcher.end_attempt(2, 1, 2)
    launcher.form(3, [4, 1, 2])
    assert_whole(launcher, 1, 2, 4)
    assert [message["source"] for message in launcher.of(4, "restored")] == ["memory"]


def test_an_attempt_below_one_that_trained_elsewhere_claims_anew(launcher: Any, tmp_path: Path) -> None:
    launcher.start(3, tmp_path / "tier", *SLOWLY)
    trains(launcher, 0, 1, 2, beyond=5)
    kill(launcher, 0)
    launcher.end_attempt(1, 1, 2)
    launcher.trained = {3: {"generation": 1, "attempt": 2}}  # attempt 2 was without slots 1 and 2, and may have saved
    launcher.form(3, [3, 1, 2])
    assert_whole(launcher, 1, 2, 3)
    (claim,) = launcher.of(3, "claim")
    assert claim["claim"]["fromPair"] == {"generation": 1, "attempt": 1}
    assert claim["claim"]["fromStep"] == launcher.of(3, "restored")[0]["step"]


def test_second_loss_during_a_transfer_keeps_the_survivor_intact(launcher: Any, tmp_path: Path) -> None:
    launcher.start(2, tmp_path / "tier", *SLOWLY)
    trains(launcher, 0, 1, beyond=5)
    kill(launcher, 1)
    launcher.end_attempt(1, 0)
    launcher.form(2, [2, 0])
    launcher.wait("the newcomer to arrive", lambda: bool(launcher.of(2, "hello")))
    kill(launcher, 2, held_at=40)
    launcher.leave(2, 0)  # it may still be connecting to the new rank, and gets no message then
    launcher.end_attempt(2, 0)
    launcher.form(3, [0])
    assert_whole(launcher, 0)


def test_growth_pauses_at_a_step_without_a_commit(launcher: Any, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    launcher.start(2, root, *SLOWLY)
    launcher.stand_by(2)
    trains(launcher, 0, 1, beyond=5)
    launcher.wait("the newcomer to be ready", lambda: bool(launcher.of(2, "ready")))
    assert launcher.of(2, "hello") == []
    for slot in (0, 1):
        launcher.ask(slot, "quiesce", "grow-1", commit=False)
    launcher.go(20)
    launcher.wait("the pause", lambda: all(launcher.of(slot, "quiesced") for slot in (0, 1)))
    at = {launcher.of(slot, "quiesced")[0]["step"] for slot in (0, 1)}
    assert len(at) == 1
    assert not list(root.glob("step-*"))
    launcher.leave(1, 0, 1)
    launcher.form(2, [0, 1, 2], generation=1)
    assert_whole(launcher, 0, 1, 2)
    assert steps(launcher, 2)[0] == at.pop() + 1


def test_joining_rank_dying_while_loading_costs_others_no_step(launcher: Any, tmp_path: Path) -> None:
    """The survivors have sent their state, and wait until the rank has loaded it."""
    launcher.start(2, tmp_path / "tier", *SLOWLY, "--die-loading")
    trains(launcher, 0, 1, beyond=5)
    for slot in (0, 1):
        launcher.ask(slot, "quiesce", "grow-1", commit=False)
    launcher.go(20)
    launcher.wait("the pause", lambda: all(launcher.of(slot, "quiesced") for slot in (0, 1)))
    launcher.leave(1, 0, 1)
    launcher.form(2, [0, 1, 2])
    assert launcher.processes.pop(2).wait() == -signal.SIGKILL
    launcher.end_attempt(2, 0, 1)
    launcher.form(3, [0, 1])
    assert_whole(launcher, 0, 1)


def test_a_new_generation_claims_before_its_first_step(launcher: Any, tmp_path: Path) -> None:
    launcher.start(2, tmp_path / "tier", *SLOWLY)
    trains(launcher, 0, 1, beyond=5)
    launcher.leave(1, 0, 1)
    launcher.end_attempt(1, 0, 1)
    reached = launcher.of(0, "left")[0]["step"]
    launcher.form(1, [1, 0], generation=2)
    assert_whole(launcher, 0, 1)
    (claim,) = launcher.of(1, "claim")
    assert claim["claim"]["fromStep"] in (reached, reached + 1)
    assert claim["claim"]["fromPair"] == {"generation": 1, "attempt": 1}


def test_new_generation_waits_for_storage_and_keeps_the_state(launcher: Any, tmp_path: Path) -> None:
    """The state stays in memory."""
    root, away = tmp_path / "tier", tmp_path / "away"
    launcher.start(2, root, *SLOWLY)
    trains(launcher, 0, 1, beyond=5)
    launcher.leave(1, 0, 1)
    launcher.end_attempt(1, 0, 1)
    root.rename(away)
    root.write_text("a file in its place")
    launcher.form(1, [1, 0], generation=2)
    waiting = "Training waits with its state in memory"
    launcher.wait("a failed try", lambda: any(waiting in text for text in launcher.output()))
    root.unlink()
    away.rename(root)
    assert_whole(launcher, 0, 1)
    (claim,) = launcher.of(1, "claim")
    assert claim["claim"]["fromPair"] == {"generation": 1, "attempt": 1}
    assert (root / "claims" / "2.1.json").exists()


def test_leaving_rank_reports_at_once_while_its_script_sleeps(launcher: Any, tmp_path: Path) -> None:
    launcher.start(2, tmp_path / "tier", "--steps", STEPS, "--hold-at", "2")
    trains(launcher, 0, 1, beyond=1)
    launcher.leave(1, 0, 1)
    launcher.end_attempt(1, 0, 1)
    assert [launcher.of(slot, "peerLost") for slot in (0, 1)] == [[], []]
    for process in launcher.processes.values():
        process.kill()


@pytest.mark.parametrize("stopped", [0, 1])
def test_stopped_peer_does_not_block_others_in_its_collective(launcher: Any, tmp_path: Path, stopped: int) -> None:
    launcher.start(2, tmp_path / "tier", *SLOWLY)
    trains(launcher, 0, 1, beyond=5)
    os.kill(launcher.processes[stopped].pid, signal.SIGSTOP)
    launcher.go(20)
    other = 1 - stopped
    launcher.leave(1, other)
    launcher.end_attempt(1, other)
    kill(launcher, stopped)
    launcher.form(2, [other])
    assert_whole(launcher, other)
