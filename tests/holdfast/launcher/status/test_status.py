"""The status and the termination log."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from holdfast.core.attempt import AttemptId
from holdfast.core.protocol import Cause
from holdfast.launcher.host import termination_log
from holdfast.launcher.host.termination_log import Ending
from holdfast.launcher.membership.messages import Failure, Incident, Priority, Remedy
from holdfast.launcher.membership.state import State
from holdfast.launcher.ranks.progress import Progress
from holdfast.launcher.status import status_document
from holdfast.launcher.status.status_file import StatusFile


def test_the_termination_log_keeps_no_secret_and_its_size(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    lines = tuple(f"line {n} " + "x" * 1000 for n in range(50))
    message = "cannot reach https://me:hunter2@store: token=abc123 Authorization: Bearer s3cret"
    termination_log.write(log, Ending(code=1, cause="Application", message=message, traceback=lines, final=True))
    text = log.read_text()
    assert len(text) <= 4096
    assert json.loads(text)["traceback"][-1].startswith("line 49")
    assert [secret for secret in ("hunter2", "abc123", "s3cret") if secret in text] == []


def test_the_status_keeps_no_secret_and_its_size() -> None:
    text = "cannot pull https://t0ken@hub/x, https://me:hunter2@store: token=abc123 " + "x" * 5000
    failure = Failure(cause=Cause.APPLICATION, reason="Exception", message=text, priority=Priority.EXCEPTION)
    incident = Incident(attempt_id=AttemptId(1, 1), failure=failure, action=Remedy.WAIT, detected=1.0)
    shown = status_document.status(
        identity=status_document.Identity(pod_uid="a", pod="w0", node="n"),
        state=State(me="a", message=text, incidents=(incident,)),
        ranks=(),
        progress=Progress(),
        control_port=1,
        store_port=2,
        notices=(),
        ending=None,
    )
    assert [secret for secret in ("t0ken", "hunter2", "abc123") if secret in json.dumps(shown)] == []
    for message in (shown["message"], shown["incidents"][0]["message"]):
        assert message.startswith("cannot pull https://***@hub/x, https://***@store: token=*** x")
        assert len(message) == 1000


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Basic s3cret",
        "{'authorization': 'Basic s3cret'}",
        "sent Bearer s3cret",
        "the claim eyJhbGciOiJSUzI1NiJ9.s3cret.c2ln",
        "id AKIA" + "IOSFODNN7EXAMPLE",
    ],
)
def test_credentials_are_redacted_whatever_their_scheme(text: str) -> None:
    shown = termination_log.redact(text)
    assert "***" in shown
    assert "s3cret" not in shown
    assert "IOSFODNN7EXAMPLE" not in shown


def test_without_an_operator_the_oldest_incidents_come_first() -> None:
    failure = Failure(cause=Cause.APPLICATION, reason="Exception", message="", priority=Priority.EXCEPTION)
    attempt_ids = [AttemptId(1, number) for number in range(1, 100)]
    incidents = tuple(
        Incident(attempt_id=attempt_id, failure=failure, action=Remedy.WAIT, detected=1.0)
        for attempt_id in attempt_ids
    )
    shown = status_document.status(
        identity=status_document.Identity(pod_uid="a", pod="w0", node="n"),
        state=State(me="a", incidents=incidents[::-1]),
        ranks=(),
        progress=Progress(),
        control_port=1,
        store_port=2,
        notices=(),
        ending=None,
    )
    assert [told["attempt"] for told in shown["incidents"]] == list(range(1, 33))


def test_without_a_termination_log_nothing_happens(tmp_path: Path) -> None:
    termination_log.write(tmp_path / "none" / "termination-log", Ending(code=0))
    assert list(tmp_path.iterdir()) == []


def test_the_status_is_written_only_when_it_changed(tmp_path: Path) -> None:
    async def play() -> None:
        document = {"version": 1, "step": 1}
        status = StatusFile(tmp_path, lambda: dict(document))
        status.flush()
        first = (tmp_path / "status.json").stat()
        status.flush()
        assert (tmp_path / "status.json").stat().st_ino == first.st_ino
        document["step"] = 2
        status.flush()
        assert json.loads((tmp_path / "status.json").read_text())["step"] == 2
        os.utime(tmp_path / "status.json", (0, 0))
        status.alive()
        assert (tmp_path / "status.json").stat().st_mtime > 0

    asyncio.run(play())
