"""Requests that the sidecar or a script writes to the touch file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.launcher.drain.touch_file import TouchFile


def test_a_touch_file_fires_once(tmp_path: Path) -> None:
    touch = TouchFile(tmp_path)
    assert touch.take() is None
    (tmp_path / "emergency_checkpoint").touch()
    first = touch.take()
    assert first is not None
    assert not first.drain
    assert touch.take() is None


@pytest.mark.parametrize(
    ("deadline", "ends_at"),
    [
        ("2026-01-31T12:00:00.000000Z", 1769860800.0),
        ("2026-01-31T13:00:00+01:00", 1769860800.0),
        ("2026-01-31T12:00:00", 1769860800.0),
        ("soon", None),
        (7, None),
        (None, None),
    ],
)
def test_a_touch_file_says_when_the_machine_goes(tmp_path: Path, deadline: object, ends_at: float | None) -> None:
    request = {"version": 1, "id": "aws-1", "source": "AWS", "drain": True, "deadline": deadline}
    (tmp_path / "emergency_checkpoint").write_text(json.dumps(request))
    taken = TouchFile(tmp_path).take()
    assert taken is not None
    assert (taken.node_leaves, taken.ends_at()) == (True, ends_at)


def test_only_a_sidecars_drain_is_for_the_whole_node(tmp_path: Path) -> None:
    for request in ({"drain": True}, {"source": "AWS"}):
        (tmp_path / "emergency_checkpoint").write_text(json.dumps({"version": 1, **request}))
        taken = TouchFile(tmp_path).take()
        assert taken is not None
        assert not taken.node_leaves


def test_a_touch_file_that_cannot_be_read_still_asks(tmp_path: Path) -> None:
    touch = TouchFile(tmp_path)
    (tmp_path / "emergency_checkpoint").write_text("please!")
    request = touch.take()
    assert request is not None
    assert "not JSON" in request.reason
