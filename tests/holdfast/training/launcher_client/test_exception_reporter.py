"""The report of a rank about its end fits a line of the socket for every exception of the script."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch.distributed

from holdfast.core.limits import MAX_LINE_BYTES
from holdfast.core.protocol import EXIT_PEER_LOST
from holdfast.training.guards.out_of_memory import OutOfMemory
from holdfast.training.launcher_client import exception_reporter
from holdfast.training.launcher_client.no_launcher import NoLauncher
from holdfast.training.launcher_client.placement import RankPlacement

HUGE = "\N{GRINNING FACE}" * 1_000_000


class Told(NoLauncher):
    """Receive the reports of a rank."""

    def __init__(self) -> None:
        super().__init__(RankPlacement(rank=0, local_rank=0, world_size=1, local_world_size=1, host="", port=None))
        self.told: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **body: Any) -> None:
        self.told.append((kind, body))


def test_huge_exception_text_is_cut_to_a_line_with_its_beginning() -> None:
    agent = Told()
    reporter = exception_reporter.Reporter(agent, lambda: 7)
    reporter._before = lambda *_: None
    try:
        raise ValueError("bad row: " + "\n".join([HUGE] * 3))
    except ValueError as error:
        reporter(ValueError, error, error.__traceback__)
    ((kind, body),) = agent.told
    assert (kind, body["name"], body["step"]) == ("exception", "ValueError", 7)
    assert body["message"].startswith("bad row: ")
    assert len(json.dumps({"type": kind, **body}).encode()) < MAX_LINE_BYTES


@pytest.mark.parametrize("record", [OutOfMemory(times=2, step=7, micro_batch=4, requested=8), None])
def test_record_of_a_full_gpu_memory_is_left_to_the_next_process(record: OutOfMemory | None) -> None:
    agent = Told()
    reporter = exception_reporter.Reporter(agent, lambda: 7, lambda: record)
    reporter._before = lambda *_: None
    error = torch.OutOfMemoryError("CUDA out of memory")
    reporter(type(error), error, None)
    other = ValueError("loss is negative")
    reporter(ValueError, other, None)
    left = [body.get("outOfMemory") for _, body in agent.told]
    assert left == [None if record is None else record.to_json(), None]


@pytest.mark.parametrize("call", [torch.distributed.barrier, torch.distributed.destroy_process_group])
def test_missing_default_process_group_is_reported_with_the_fix(
    call: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    """The test uses the message of torch, which a release may change."""
    agent = Told()
    reporter = exception_reporter.Reporter(agent, lambda: 7)
    reporter._before = lambda *_: None
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    reporter(raised.type, raised.value, raised.tb)
    (mend,) = [record.getMessage() for record in caplog.records if record.name == "holdfast.job"]
    assert "init_process_group() after job.manage()" in mend
    assert "remove destroy_process_group()" in mend
    assert [kind for kind, _ in agent.told] == ["exception"]


def test_a_peer_lost_in_the_scripts_own_collective_fits_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: str) -> NoReturn:
        raise SystemExit(EXIT_PEER_LOST)

    monkeypatch.setattr(exception_reporter, "exit_peer_lost", end)
    agent = Told()
    error = RuntimeError("[gloo/transport/tcp/pair.cc] closed " + HUGE)
    with pytest.raises(SystemExit):
        exception_reporter.Reporter(agent, lambda: 7)(RuntimeError, error, None)
    ((kind, body),) = agent.told
    assert (kind, body["step"]) == ("peerLost", 7)
    assert "closed" in body["message"]
    assert len(json.dumps({"type": kind, **body}).encode()) < MAX_LINE_BYTES
