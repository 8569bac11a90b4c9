"""A real process is killed during checkpoints of jobs: asynchronous, by one or two ranks, full or as deltas.

After each kill the previous checkpoint or the new one is complete, bit for bit, and no torn one counts as complete.
The next attempt saves and cleans up. The trace shows that all parts of a checkpoint are durable before it is visible.
`test_crash.py` covers claims, and checkpoints that the caller writes itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from traces import STRACE, Call, calls_in, kill_points

from holdfast.checkpoint.folder.claims import list_claims
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.verify import verify

SCRIPT = Path(__file__).parents[1] / "scripts" / "ranks.py"
_spec = importlib.util.spec_from_file_location("ranks", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
CHANGES = ("write", "pwrite64", "writev", "ftruncate")
SEED = 20

pytestmark = pytest.mark.skipif(STRACE is None, reason="there is no strace, and no Debian to bring it")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The kind of checkpoint, the number of ranks, and whether the second rank is killed when the first one ends."""

    kind: str
    ranks: int = 1
    fated: bool = False

    @property
    def steps(self) -> list[int]:
        """Return the steps of attempt 2. The last one is traced. A delta needs one before it."""
        return [15, 20] if self.kind == "deltas" else [20]

    @property
    def before(self) -> int:
        """Return the newest step when the traced one starts."""
        return [10, *self.steps][-2]

    def wanted(self, root: Path, attempt: int, steps: Sequence[int]) -> dict[str, Any]:
        """Return the request to the helper."""
        own = {"kind": self.kind, "ranks": self.ranks, "fated": self.fated}
        return {"root": str(root), "attempt": attempt, "steps": list(steps), **own}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended: the signal or code, and the output of each."""

    statuses: list[int]
    said: list[str]

    @property
    def announced(self) -> bool:
        """Return whether a rank reported the step as durable."""
        return any("committed 20" in said for said in self.said)


class Helper:
    """A process that forks ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, wanted: dict[str, Any], strace: Callable[[list[int]], list[str]] | None = None) -> Ended:
        """Run an attempt and trace its last step."""
        started = self._ask(json.dumps(wanted))
        assert all("ready" in said for said in started["said"]) or strace is None, started
        with traced(strace(started["pids"]) if strace else []):
            ended = self._ask("")
        return Ended(**ended)

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@contextmanager
def traced(options: list[str]) -> Iterator[None]:
    """Trace with strace from the start of the block to the end of the processes."""
    if not options:
        yield
        return
    tracer = subprocess.Popen([str(STRACE), "-f", *options], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    for _ in range(options.count("-p")):
        told = tracer.stderr.readline()
        assert "attached" in told, told
    try:
        yield
    except BaseException:
        tracer.kill()
        raise
    finally:
        tracer.communicate(timeout=60)


def at(pids: Sequence[int]) -> list[str]:
    return [word for pid in pids for word in ("-p", str(pid))]


@pytest.fixture(scope="module")
def helper() -> Iterator[Callable[[], Helper]]:
    """One helper for each thread that requests one."""
    made: dict[int, Helper] = {}
    yield lambda: made.setdefault(threading.get_ident(), Helper())
    for one in made.values():
        one.close()


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The state that an earlier attempt left, the result of the next one without a fault, and its system calls."""

    case: Case
    earlier: Path
    steps: dict[int, Any]
    calls: list[Call]

    def fresh(self, number: int) -> Path:
        """Copy the earlier state. Files of checkpoints are never rewritten, so links suffice."""
        root = self.earlier.with_name(f"trial-{number}")
        shutil.rmtree(root, ignore_errors=True)
        return Path(shutil.copytree(self.earlier, root, copy_function=os.link))


def content(root: Path, step: int | None = None) -> tuple[int, Any]:
    """Return the step and every bit from which an attempt that starts now resumes."""
    found = restore(root, SingleRank(), claims=list_claims(root), job_uid="job-1", step=step)
    assert found.loaded is not None
    assert found.quarantined == ()
    loaded = found.loaded
    return found.step, (loaded.manifest.state, loaded.per_rank, {n: bytes(t) for n, t in loaded.tensors.items()})


def scene_of(case: Case, folder: Path, helper: Helper) -> Scene:
    earlier = folder / "earlier"
    earlier.mkdir()
    assert helper.run(case.wanted(earlier, 1, [5, 10])).announced is False
    scene = Scene(case=case, earlier=earlier, steps={}, calls=[])
    root, trace = scene.fresh(0), folder / "trace"
    ended = helper.run(case.wanted(root, 2, case.steps), lambda pids: ["-y", "-o", str(trace), *at(pids)])
    assert ended.announced, ended
    steps = dict(content(root, step) for step in (case.before, 20))
    return Scene(case=case, earlier=earlier, steps=steps, calls=list(calls_in(trace.read_text())))


LARGE = Case(kind="large")
DELTAS = Case(kind="deltas")
CASES = [LARGE, DELTAS, Case(kind="large", ranks=2), Case(kind="deltas", ranks=2)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.ranks}")
def test_all_of_a_commit_is_durable_before_it_is_seen(
    case: Case, tmp_path: Path, helper: Callable[[], Helper]
) -> None:
    scene = scene_of(case, tmp_path, helper())
    root = tmp_path / "trial-0"
    made = {path.name for path in (root / "step-20.g1.a2").iterdir()}
    slices = {f"rank-{n}.slices" for n in range(case.ranks if case.kind == "large" else 1)}
    assert made == slices | {"MANIFEST.json"} | {
        f"rank-{n}.{kind}" for n in range(case.ranks) for kind in ("json", "safetensors")
    }
    assert unsafe(scene.calls, root, made) == []
    if case.kind == "large":
        chunks = [call for call in scene.calls if call.name == "pwrite64" and ".safetensors" in call.text]
        assert len({call.thread for call in chunks}) > 1, "chunks were written by several threads"


def unsafe(calls: list[Call], root: Path, made: set[str]) -> list[str]:
    """Return what was not durable when it became visible."""
    (named,) = [call for call in calls if call.name == "rename" and call.paths[1:] == (f"{root}/step-20.g1.a2",)]
    folder = named.paths[0]
    (sealed,) = [call for call in calls if call.name == "rename" and call.paths[1:] == (f"{folder}/MANIFEST.json",)]
    announced = [call for call in calls if call.name == "write" and "committed 20" in call.text]
    assert announced
    found = []
    for name in made:
        path = sealed.paths[0] if name == "MANIFEST.json" else f"{folder}/{name}"
        last = max(call.ended for call in calls if call.name in CHANGES and call.paths == (path,))
        if not synced(calls, path, last, sealed.begun):
            found.append(f"{name} was not durable before it was sealed")
        (opened,) = [call for call in calls if call.paths == (path,) and "O_CREAT" in call.text]
        if name != "MANIFEST.json" and not synced(calls, folder, opened.ended, sealed.begun):
            found.append(f"the name of {name} was not durable before it was sealed")
    if not synced(calls, folder, sealed.ended, named.begun):
        found.append("the manifest had not its name before the folder had")
    if not synced(calls, str(root), named.ended, min(call.begun for call in announced)):
        found.append("the folder's name was not durable before it was told")
    late = [call for call in calls if call.begun > sealed.begun and call.name in CHANGES]
    found += [
        f"{call.paths[0]} was written later" for call in late if call.paths[0].startswith((folder, named.paths[1]))
    ]
    return found


def synced(calls: list[Call], path: str, after: int, before: int) -> bool:
    """Return whether an fsync of the file started after the one call and ended before the other."""
    syncs = [call for call in calls if call.name == "fsync" and call.paths == (path,) and call.value == 0]
    return any(call.begun > after and call.ended < before for call in syncs)


def test_trace_checker_finds_a_missing_or_early_fsync(tmp_path: Path, helper: Callable[[], Helper]) -> None:
    scene = scene_of(DELTAS, tmp_path, helper())
    root, made = tmp_path / "trial-0", {path.name for path in (tmp_path / "trial-0" / "step-20.g1.a2").iterdir()}
    syncs = [n for n, call in enumerate(scene.calls) if call.name == "fsync" and str(root) in call.text]
    needed = [n for n in syncs if unsafe([call for m, call in enumerate(scene.calls) if m != n], root, made)]
    assert len(needed) == len(made) + 3  # each file, its folder twice, the root
    for name in CHANGES:
        first = next((call for call in scene.calls if call.name == name and "rank-0.safetensors" in call.text), None)
        if first is not None:
            moved = [Call(**{**vars(call), "ended": 10**9}) if call is first else call for call in scene.calls]
            assert unsafe(moved, root, made)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "victim", "most"),
    [
        (LARGE, 0, 1000),
        (DELTAS, 0, 12),
        (Case(kind="large", ranks=2), 0, 8),
        (Case(kind="large", ranks=2), 1, 8),
        (Case(kind="large", ranks=2, fated=True), 0, 6),
        (Case(kind="deltas", ranks=2), 0, 8),
        (Case(kind="deltas", ranks=2, fated=True), 1, 8),
    ],
    ids=lambda value: f"{value.kind}-{value.ranks}{'-both' * value.fated}" if isinstance(value, Case) else str(value),
)
def test_a_kill_at_a_system_call_leaves_a_whole_commit(
    case: Case, victim: int, most: int, tmp_path: Path, helper: Callable[[], Helper]
) -> None:
    scene = scene_of(case, tmp_path, helper())
    threads = threads_of(scene, victim, tmp_path, helper())
    points = sorted(kill_points(threads))
    chosen = points if len(points) <= most else random.Random(SEED).sample(points, most)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda point: killed_at(scene, victim, point, helper()), chosen))
    assert sum(killed for _, killed in results) > len(chosen) / 2, "else few came so far"
    assert len(chosen) < len(points) or {step for step, _ in results} == {case.before, 20}


def threads_of(scene: Scene, victim: int, folder: Path, helper: Helper) -> list[Call]:
    """Return the system calls of one rank."""
    if scene.case.ranks == 1:
        return scene.calls
    root, trace = scene.fresh(1), folder / "trace-of-one"
    ended = helper.run(
        scene.case.wanted(root, 2, scene.case.steps), lambda pids: ["-y", "-o", str(trace), *at([pids[victim]])]
    )
    assert ended.announced, ended
    return list(calls_in(trace.read_text()))


def killed_at(scene: Scene, victim: int, point: tuple[str, int], helper: Helper) -> tuple[int, bool]:
    """Return the step that is left when a rank is killed at this call, and whether it was killed."""
    (name, number), case = point, scene.case
    root = scene.fresh(2 + threading.get_native_id())
    where = f"rank {victim} of {case} killed at {name} {number}"
    inject = ["-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={number}"]
    ended = helper.run(
        case.wanted(root, 2, case.steps), lambda pids: ["-o", "/dev/null", *inject, *at([pids[victim]])]
    )
    killed = ended.statuses[victim] == signal.SIGKILL
    assert killed or ended.announced, (where, ended)
    store = FolderStore(root)
    assert [str(listed) for listed in store.commits() if not verify(store, listed).verified] == [], where
    step, bits = content(root)
    assert step == 20 or (step == case.before and not ended.announced), (where, step)
    assert bits == scene.steps[step], where
    goes_on(root, case, where)
    return step, killed


def goes_on(root: Path, case: Case, where: str) -> None:
    """The next attempt claims, saves, and removes the remains of the killed one."""
    ranks.run(case.wanted(root, 3, [30]), SingleRank())
    assert content(root)[0] == 30, where
    left = [p.name for p in root.rglob("*") if ".tmp-" in p.name or p.name.endswith(".deleted")]
    assert left == [], where
    assert not (root / "quarantine").exists(), where
