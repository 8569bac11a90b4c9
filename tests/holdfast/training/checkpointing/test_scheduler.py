"""Asynchronous saves: calls that need no disk do not wait for it, and nothing counts as durable before it is."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from holdfast.checkpoint import manager as engines
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving import writer
from holdfast.checkpoint.saving.background import Saving
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import Staged, stage
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.core.attempt import AttemptId
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import store_client
from holdfast.training.distributed.store_exchange import StoreClient, StoreExchange
from holdfast.training.launcher_client.connection import Requests
from holdfast.training.step.train_state import TrainState

Make = Callable[..., Any]
PATIENCE = 240.0


class Gate:
    """A disk that blocks writes until it is opened, and reports which writers wait for it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def commit(self, *arguments: Any, check: Callable[[], None], **more: Any) -> SaveResult:
        self.reached.set()
        assert self.opened.wait(PATIENCE)
        return writer.commit(*arguments, check=check, **more)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(engines, "commit", gate.commit)
    yield gate
    gate.opened.set()


class Steps:
    """A job whose steps a test runs one by one."""

    def __init__(self, job: Any, width: int = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, width)
        self.job = job
        job.manage(model=self.model, optimizer=torch.optim.AdamW(self.model.parameters()))

    def make(self, count: int = 1) -> None:
        for _ in range(count):
            self.job.step(self.model(torch.ones(2)).square().mean())


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def told(run: Any) -> list[tuple[int, str, tuple[str, ...]]]:
    return [(body["step"], body["result"], tuple(body["ids"])) for body in run.launcher.of("checkpoint")]


def test_steps_continue_while_the_disk_writes(solo: Make, disk: Gate, tmp_path: Path) -> None:
    """The request is answered when the checkpoint is durable."""
    run = solo(tmp_path)
    steps = Steps(run.job)
    run.launcher.wanted = Requests(checkpoint=("touch",))
    steps.make(4)
    assert disk.reached.wait(PATIENCE)
    assert (run.job.committed_step, told(run), run.job.durable_step) == (4, [], 0)
    disk.opened.set()
    until(lambda: bool(told(run)))
    assert told(run) == [(1, "Committed", ("touch",))]
    run.settle()
    steps.make()
    assert run.job.durable_step == 1
    assert run.launcher.wanted.checkpoint == ()
    steps.make(2)
    run.settle()
    assert told(run) == [(1, "Committed", ("touch",))], "one request, one commit"


def test_requested_checkpoint_lifts_the_limit_of_the_running_one(solo: Make, tmp_path: Path) -> None:
    """The running checkpoint is limited to a bandwidth."""
    run = solo(tmp_path, interval="1", bytes_per_second=1)
    steps = Steps(run.job, width=1 << 20)  # several parts, of which the first may pass at once
    steps.make()
    time.sleep(1)  # longer than the save takes without a limit
    assert run.saving
    run.launcher.wanted = Requests(checkpoint=("touch",))
    steps.make()  # due as well: it waits for the first one, which is no longer limited
    until(lambda: len(told(run)) == 2)
    assert told(run) == [(1, "Committed", ("interval",)), (2, "Committed", ("interval", "touch"))]


@pytest.mark.parametrize("how", ["interval", "save"])
def test_leaving_rank_is_answered_by_the_last_step_only(
    solo: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """No earlier checkpoint answers its request."""
    run = solo(tmp_path, interval="2" if how == "interval" else "1000")
    steps, stepped = Steps(run.job), TrainState.stepped

    def notice_comes(state: TrainState, attempt_id: AttemptId) -> None:
        """Send the notice with the vote on the step, so that another step follows."""
        stepped(state, attempt_id)
        run.launcher.wanted = Requests(quiesce=("aws-1",))

    steps.make()
    monkeypatch.setattr(TrainState, "stepped", notice_comes)
    steps.make()
    if how == "save":
        assert run.job.save()
    until(lambda: len(told(run)) == 1)
    with pytest.raises(BaseException) as ended:  # noqa: PT011  (the recorder's own)
        steps.make()
    assert type(ended.value).__name__ == "TheEnd"
    assert told(run) == [(2, "Committed", (how,) if how == "interval" else ()), (3, "Committed", ("aws-1",))]


def test_leaving_rank_is_answered_without_a_step_after_its_save(solo: Make, tmp_path: Path) -> None:
    run = solo(tmp_path)
    Steps(run.job).make()
    run.launcher.wanted = Requests(quiesce=("aws-1",))
    assert run.job.save()
    run.job.close()
    assert told(run) == [(1, "Committed", ()), (1, "Committed", ("aws-1",))]


def test_what_is_written_is_the_state_of_its_step(solo: Make, disk: Gate, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="2")
    steps = Steps(run.job)
    steps.make(2)
    saved = {name: tensor.clone() for name, tensor in steps.model.state_dict().items()}
    steps.make(1)
    disk.opened.set()
    run.job.close()
    found = restore(tmp_path, SingleRank(), job_uid="me", step=2).loaded
    assert found is not None
    for name, tensor in saved.items():
        assert bytes(found.tensors[f"model/{name}"]) == tensor.numpy().tobytes()


def test_second_save_waits_for_the_first_and_counts_as_a_stall(solo: Make, disk: Gate, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="1")
    steps = Steps(run.job)
    steps.make()
    waits = threading.Thread(target=steps.make)
    waits.start()
    until(lambda: run.launcher.of("phase")[-1]["phase"] == "checkpoint")
    assert (run.job.committed_step, told(run)) == (2, [])
    disk.opened.set()
    waits.join(PATIENCE)
    run.job.close()
    assert [step for step, _, _ in told(run)] == [1, 2]


@pytest.mark.parametrize("how", ["save", "close"])
def test_requested_save_and_job_end_wait_until_it_is_durable(
    solo: Make, disk: Gate, tmp_path: Path, how: str
) -> None:
    run = solo(tmp_path)
    steps = Steps(run.job)
    steps.make()
    answers: list[Any] = []
    waits = threading.Thread(target=lambda: answers.append(getattr(run.job, how)()))
    waits.start()
    assert disk.reached.wait(PATIENCE)
    assert (answers, told(run), run.launcher.of("done")) == ([], [], [])
    disk.opened.set()
    waits.join(PATIENCE)
    assert answers == [True if how == "save" else None]
    assert (tmp_path / "step-1.g1.a1" / "MANIFEST.json").exists()


def test_failing_script_leaves_when_its_running_save_is_durable(solo: Make, disk: Gate, tmp_path: Path) -> None:
    run = solo(tmp_path, interval="2")
    Steps(run.job).make(3)
    leaves = threading.Thread(target=lambda: run.job.close(failed=lambda: True))
    leaves.start()
    assert disk.reached.wait(PATIENCE)
    disk.opened.set()
    leaves.join(PATIENCE)
    assert told(run) == [(2, "Committed", ("interval",)), (3, "Committed", ())]
    assert run.launcher.of("done") == []


def test_failing_script_does_not_wait_for_a_stale_save(solo: Make, disk: Gate, tmp_path: Path) -> None:
    """The attempt of the save is over."""
    run = solo(tmp_path, interval="2")
    Steps(run.job).make(3)
    run.launcher.cancel.set("a peer is lost")
    run.job.close(failed=lambda: True)
    assert told(run) == []


def test_failed_save_is_reported_with_its_file(solo: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next save succeeds."""
    run = solo(tmp_path)
    steps = Steps(run.job)
    steps.make()
    assert run.job.save()

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        steps.make()
        assert not run.job.save()
    (_, failed) = run.launcher.of("checkpoint")
    assert "No space left on device" in failed["message"]
    assert "/rank-0." in failed["message"]
    assert run.job.save()
    assert [result for _, result, _ in told(run)] == ["Committed", "Failed", "Committed"]


def test_save_running_at_the_attempt_end_is_requested_again(solo: Make, disk: Gate, tmp_path: Path) -> None:
    """The interrupted save changes nothing."""
    run = solo(tmp_path, interval="1000")
    run.launcher.moves_on = True
    steps = Steps(run.job)
    run.launcher.wanted = Requests(checkpoint=("touch",))
    steps.make()
    assert run.saving
    run.launcher.cancel.set("a peer is lost")
    steps.make()  # enters the next attempt, and completes another step there
    assert (run.job.attempt, run.job.committed_step, run.job.durable_step) == (2, 1, 0)
    assert run.launcher.wanted.checkpoint == ("touch",)
    disk.opened.set()
    steps.make()
    run.settle()
    assert told(run) == [(2, "Committed", ("touch",))]
    steps.make()
    assert (run.job.durable_step, run.launcher.wanted.checkpoint) == (2, ())


# Through the store of the attempt


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def client_of(store: TCPStore, cancel: CancelToken) -> StoreClient:
    return StoreClient(lambda: store_client("127.0.0.1", store.port, "saves", 60), cancel)


def staged(rank: int, step: int, data: bytes, size: int = 2) -> Staged:
    snapshot = Snapshot(
        name=CheckpointName(step=step, attempt_id=AttemptId(1, 1)),
        specs=[TensorSpec(name=f"w{n}", dtype="U8", shape=(len(data),)) for n in range(3)],
        read=lambda piece: data,
        state={},
        data=None,
        per_rank={"rank": rank},
        numerics={},
    )
    return stage(snapshot, Arena(), Planner(), rank=rank, size=size)


def test_ranks_save_through_the_store_and_clean_up_after_saves(store: TCPStore, tmp_path: Path) -> None:
    def rank(number: int) -> list[SaveResult]:
        client = client_of(store, CancelToken())
        made = []
        for step in (1, 2, 3):
            exchange = StoreExchange(client, rank=number, size=2, number=step)
            made.append(writer.commit(FolderStore(tmp_path), staged(number, step, b"x" * 100), exchange))
        return made

    results: dict[int, list[SaveResult]] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: rank(n)})) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [result.committed for result in (*results[0], *results[1])] == [True] * 6
    assert restore(tmp_path, SingleRank(), step=3).step == 3
    assert not any(store.check([f"saves/{number}/1/0"]) for number in (1, 2))


def test_peer_lost_during_a_save_leaves_nothing_half_done(store: TCPStore, tmp_path: Path) -> None:
    cancel = CancelToken()
    exchange = StoreExchange(client_of(store, cancel), rank=0, size=2, number=1)
    saving = Saving(
        lambda: writer.commit(FolderStore(tmp_path), staged(0, 1, b"x" * 100), exchange, check=cancel.check)
    )
    until(lambda: any(path.name.startswith("step-1.") for path in tmp_path.iterdir()))
    cancel.set("rank 1 is gone")
    saving.settle(lambda: None)
    assert "rank 1 is gone" in saving.lost
    assert [path.name for path in tmp_path.iterdir()] == []
    assert writer.commit(FolderStore(tmp_path), staged(0, 1, b"x" * 100, size=1), SingleRank()).committed
