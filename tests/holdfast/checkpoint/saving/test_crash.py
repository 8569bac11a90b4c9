"""A real process is killed at every system call that changes the disk or waits for it.

Between two such calls the disk does not change, so these kills cover a kill at any moment. After each kill the next
attempt must find a complete checkpoint (the newer one if it was announced), claim, save, and leave nothing
unfinished.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from traces import STRACE, Call, calls_in, kill_points

from holdfast.checkpoint.folder.claims import list_claims
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import Restored, restore
from holdfast.core.attempt import AttemptId

SCRIPT = Path(__file__).parents[1] / "scripts" / "one_attempt.py"
_spec = importlib.util.spec_from_file_location("one_attempt", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
one_attempt = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(one_attempt)

pytestmark = pytest.mark.skipif(STRACE is None, reason="there is no strace, and no Debian to bring it")


def attempt(root: Path, number: int, *steps: int, strace: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Use a separate bytecode folder: bytecode of other tests would reduce the number of opened files."""
    command = [sys.executable, str(SCRIPT), str(root), str(number), *map(str, steps)]
    prefix = [str(STRACE), "-f", *strace] if strace else []
    bytecode = {"PYTHONPYCACHEPREFIX": str(root.parent / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    environ = {**os.environ, **bytecode, "PYTHONHASHSEED": "0"}
    return subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=300, env=environ)


def traced(root: Path, trace: Path) -> tuple[list[Call], Counter[str]]:
    """Return the calls of attempt 2 between its marks, and the number of earlier calls of each kind."""
    ended = attempt(root, 2, 20, strace=("-o", str(trace)))
    assert ended.stdout == "committed 20\n"
    calls = list(calls_in(trace.read_text()))
    begin, end = (
        next(n for n, call in enumerate(calls) if f'"{root}/{mark}"' in call.text) for mark in ("begin", "end")
    )
    assert not [call for call in calls[begin:end] if ".pyc" in call.text], "imports belong before the beginning"
    return calls[begin + 1 : end], Counter(call.name for call in calls[:begin])


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The result of attempt 1: checkpoints of steps 5 and 10. Attempt 2 will delete one of them."""
    root = tmp_path / "earlier"
    ended = attempt(root, 1, 5, 10)
    assert ended.stdout == "committed 5\ncommitted 10\n", ended.stderr
    return root


def fresh(earlier: Path, number: int) -> Path:
    """Copy to a path of the same length, so that the calls are equal."""
    root = earlier.with_name(f"trial{number:010d}")
    shutil.rmtree(root, ignore_errors=True)
    return Path(shutil.copytree(earlier, root))


def newest(root: Path) -> Restored:
    return restore(root, SingleRank(), claims=list_claims(root), job_uid="job-1")


def test_a_kill_at_any_system_call_leaves_a_whole_commit(earlier: Path, tmp_path: Path) -> None:
    calls, before = traced(fresh(earlier, 0), tmp_path / "trace")
    points = kill_points(calls, before)
    assert len(points) > 50
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        steps = set(pool.map(lambda point: killed_at(earlier, *point), points))
    assert steps == {10, 20}


def killed_at(earlier: Path, name: str, number: int) -> int:
    """Return the step of the checkpoint that attempt 2 leaves when it is killed at this call."""
    root = fresh(earlier, 1 + threading.get_native_id())
    inject = f"inject={name}:signal=KILL:when={number}"
    ended = attempt(root, 2, 20, strace=("-o", "/dev/null", "-e", f"trace={name}", "-e", inject))
    where = f"killed at {name} {number}"
    assert ended.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), (where, ended)
    found = newest(root)
    assert found.quarantined == (), where
    assert found.step in (10, 20), where
    assert found.step == 20 or "committed 20" not in ended.stdout, where
    goes_on(root, where)
    return found.step


def goes_on(root: Path, where: str) -> None:
    """The next attempt claims, saves, and removes the remains of the killed one."""
    one_attempt.run(root, AttemptId(1, 3), [30])
    assert newest(root).step == 30, where
    left = [p.name for p in root.rglob("*") if ".tmp-" in p.name or p.name.endswith(".deleted")]
    assert left == [], where
    assert not (root / "quarantine").exists(), where


def position(calls: list[Call], name: str, pattern: str) -> int:
    """Return the position of the only matching call."""
    found = [i for i, call in enumerate(calls) if call.name == name and re.search(pattern, call.text)]
    assert len(found) == 1, (name, pattern, found)
    return found[0]


def synced(calls: list[Call], opened: int, *, before: int) -> int:
    """Return the position at which the file or folder opened by this call is fsynced, before it is closed."""
    names = [call.name for call in calls[opened:before]]
    assert "fsync" in names
    at = names.index("fsync")
    assert "close" not in names[:at]
    return opened + at


def test_a_call_that_strace_tells_in_two_lines_is_one_call() -> None:
    text = "1  fsync(3 <unfinished ...>\n2  close(9) = 0\n1  <... fsync resumed>) = 0\n1  close(3)  = 0\n"
    calls = list(calls_in(text))
    assert [(call.thread, call.name, call.text.strip()) for call in calls] == [
        ("2", "close", "9"),
        ("1", "fsync", "3"),
        ("1", "close", "3"),
    ]
    assert [(call.begun, call.ended) for call in calls] == [(1, 1), (0, 2), (3, 3)]


def test_writes_fsyncs_and_renames_are_in_crash_safe_order(earlier: Path, tmp_path: Path) -> None:
    calls, _ = traced(fresh(earlier, 0), tmp_path / "trace")
    staging = r"step-20\.g1\.a2\.tmp-[0-9a-f]{32}"
    named = position(calls, "rename", staging + r'", "[^"]*/step-20\.g1\.a2"')
    sealed = position(calls, "rename", staging + r"/MANIFEST\.json\.tmp")
    manifest = position(calls, "openat", staging + r"/MANIFEST\.json\.tmp")
    shards = [
        synced(calls, position(calls, "openat", staging + file + ".*O_EXCL"), before=manifest)
        for file in (r"/rank-0\.json", r"/rank-0\.safetensors")
    ]
    claimed = position(calls, "link", r'claims/1\.2\.json\.tmp-[0-9a-f]{32}", "[^"]*claims/1\.2\.json"')
    claim = synced(calls, position(calls, "openat", r"claims/1\.2\.json\.tmp"), before=claimed)
    begun = position(calls, "mkdir", staging)
    written = synced(calls, manifest, before=sealed)
    parent = next(
        i for i, call in enumerate(calls) if i > named and call.name == "openat" and "O_DIRECTORY" in call.text
    )
    announced = position(calls, "write", r'"committed 20')
    order = [claim, claimed, begun, *shards, manifest, written, sealed, named, parent, announced]
    assert order == sorted(order)
    folder_synced = [call for call in calls[sealed:named] if call.name in ("openat", "fsync")]
    assert len(folder_synced) == 2  # the folder that now contains the manifest
    assert synced(calls, parent, before=announced) < announced


def test_retention_takes_the_manifest_first(earlier: Path, tmp_path: Path) -> None:
    root = fresh(earlier, 0)
    assert attempt(root, 2, 12, 14).returncode == 0
    trace = tmp_path / "trace"
    attempt(root, 3, 20, 21, strace=("-o", str(trace), "-e", "trace=rename,unlink,unlinkat,rmdir"))
    gone = [line for line in trace.read_text().splitlines() if "step-12.g1.a2" in line]
    assert "MANIFEST.json.deleted" in gone[0]
    assert "rename" in gone[0]
    assert re.search(r'rename\(".*step-12\.g1\.a2", ".*step-12\.g1\.a2\.tmp-', gone[1])
    assert not any(path.name.startswith("step-12.") for path in root.iterdir())
