"""Requests of the touch file as events and as notices of the status."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

from holdfast.launcher.drain.requests import Requests
from holdfast.launcher.drain.touch_file import TouchFile


def test_the_status_keeps_the_newest_requests(tmp_path: Path) -> None:
    pump, touch = Mock(now=Mock(return_value=0.0)), TouchFile(tmp_path)
    requests = Requests(pump, touch, Mock(), "node-0")
    for number in range(40):
        (tmp_path / "emergency_checkpoint").write_text(json.dumps({"version": 1, "id": f"request-{number}"}))
        request = touch.take()
        assert request is not None
        requests._requested(request)
    assert pump.feed.call_count == 40
    assert [one["id"] for one in requests.notices] == [f"request-{number}" for number in range(8, 40)]
