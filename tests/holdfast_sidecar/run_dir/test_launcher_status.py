"""What is known of a launcher that speaks, falls silent or writes nonsense."""

import json
import os
from pathlib import Path

import pytest

from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher


@pytest.fixture
def heartbeat(run_dir: Path, clock) -> LauncherStatusWatcher:
    return LauncherStatusWatcher(run_dir, clock)


def write(run_dir: Path, content: str) -> None:
    (run_dir / ".new").write_text(content)
    (run_dir / ".new").rename(run_dir / "status.json")


def test_launcher_is_silent_from_the_start(heartbeat, clock):
    """It has not written a status yet."""
    clock.forward(7)
    assert not heartbeat.poll()
    assert heartbeat.current().status is None
    assert heartbeat.current().silent_seconds(clock.monotonic()) == 7


def test_silence_is_counted_from_the_last_change(heartbeat, run_dir, clock):
    write(run_dir, '{"version": 1, "phase": "Running"}')
    heartbeat.poll()
    clock.forward(100)
    write(run_dir, '{"version": 1, "phase": "Running", "committedStep": 2}')
    assert heartbeat.poll()
    clock.forward(3)
    assert not heartbeat.poll()
    assert heartbeat.current().silent_seconds(clock.monotonic()) == 3


def test_touched_status_ends_the_silence(heartbeat, run_dir, clock):
    """It is no significant change."""
    write(run_dir, '{"version": 1, "phase": "AwaitingFence"}')
    heartbeat.poll()
    before = heartbeat.current().sequence
    clock.forward(100)
    os.utime(run_dir / "status.json", (5e9, 5e9))
    assert not heartbeat.poll()
    assert heartbeat.current().sequence == before
    assert heartbeat.current().silent_seconds(clock.monotonic()) == 0


def test_a_status_older_than_the_sidecar_counts_with_its_age(heartbeat, run_dir, clock):
    write(run_dir, '{"version": 1}')
    written = clock.now().timestamp() - 40
    os.utime(run_dir / "status.json", (written, written))
    heartbeat.poll()
    assert heartbeat.current().silent_seconds(clock.monotonic()) == pytest.approx(40)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"version": 2}', "status.json has version 2; this sidecar understands 1"),
        ("x" * (2 << 20), "larger than"),
    ],
)
def test_invalid_status_is_logged_once(heartbeat, run_dir, caplog, content, why):
    """Its successor is read."""
    for padding in ("", " ", "  "):
        write(run_dir, content + padding)
        heartbeat.poll()
    assert heartbeat.current().status is None
    assert [why in record.message for record in caplog.records] == [True]
    write(run_dir, '{"version": 1, "ready": true}')
    heartbeat.poll()
    assert heartbeat.current().status == {"version": 1, "ready": True}


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_plain_file_neither_hangs_nor_misleads(heartbeat, run_dir, tmp_path, kind):
    path = run_dir / "status.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere").write_text(json.dumps({"version": 1}))
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    heartbeat.poll()
    assert heartbeat.current().status is None
