"""`holdfast resume-check`: run a script with and without a restart, and compare the checkpoints of each step.

Each run has its own folder, with a checkpoint at each step. So the first step that differs is known without another
run. A third run shows whether a difference after the restart also occurs without one.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.cli.checkpoints.access.commit_reader import Content
from holdfast.cli.checkpoints.access.locate import choose, find
from holdfast.cli.checkpoints.access.progress_bar import progress
from holdfast.cli.checkpoints.diff import Difference, compared_bytes, diff
from holdfast.cli.checkpoints.rewind import carry_out, plan
from holdfast.cli.resume_check.options import Plan
from holdfast.cli.resume_check.report import Diagnosis, Finding, differs, equal, of_script
from holdfast.cli.support import child_process
from holdfast.core.environment import PLACE_PREFIXES, PLACE_VARIABLES, variables
from holdfast.core.errors import CheckError, CheckpointError, HoldfastError
from holdfast.launcher.process.child import own_program

EQUAL, DIFFERS, FAILED = 0, 1, 2
_POLL_SECONDS = 0.05
_STOP_SECONDS = 60.0
_LOG_LINES, _LOG_BYTES = 20, 1 << 16
_KEEP_ALL = 1_000_000
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check(todo: Plan, environ: Mapping[str, str]) -> int:
    """Run the script, print what was found, and return the exit code."""
    before = {number: signal.signal(number, _interrupt) for number in _ENDINGS}
    try:
        with child_process.swept_folder("holdfast-check-") as root:
            found = _find(todo, root, environ)
    except HoldfastError as error:
        _print(str(error))
        return FAILED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if isinstance(found, Finding):
        _print(differs(found))
        return DIFFERS
    _print(equal(steps=todo.steps, half=todo.half, tensors=found))
    return EQUAL


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _find(todo: Plan, root: Path, environ: Mapping[str, str]) -> Finding | int:
    """Return the first difference, or how many tensors are equal at the last step."""
    unbroken, restarted, again = (_Run(root / name, todo, environ) for name in ("whole", "restarted", "again"))
    _print(f"run 1: {todo.steps} steps without a restart")
    unbroken.train(todo.steps)
    _print(f"run 2: {todo.half} steps, a restart, and {todo.steps - todo.half} steps")
    restarted.train(todo.half)
    found = _first(unbroken, restarted, range(1, todo.half + 1))
    if found is not None:
        return _finding(Diagnosis.NOT_DETERMINISTIC, found, unbroken, restarted)
    restarted.go_back(todo.half)
    restarted.train(todo.steps)
    found = _first(unbroken, restarted, range(todo.half + 1, todo.steps + 1))
    if found is None:
        return len(unbroken.content(todo.steps).manifest.tensors)
    _print(f"the runs differ at step {found[0]}; run 3: {found[0]} steps without a restart, to find the cause")
    again.train(found[0])
    other = _first(unbroken, again, range(todo.half + 1, found[0] + 1))
    if other is not None:
        return _finding(Diagnosis.NOT_DETERMINISTIC, other, unbroken, again)
    return _finding(Diagnosis.NOT_RESUMED, found, unbroken, restarted)


class _Run:
    """A script that trains under a launcher in a folder of its own."""

    def __init__(self, root: Path, todo: Plan, environ: Mapping[str, str]) -> None:
        self._root = root
        self._folder = root / "checkpoints"
        self._log = root / "log"
        self._todo = todo
        self._environ = {
            name: value
            for name, value in environ.items()
            if name not in PLACE_VARIABLES and not name.startswith(PLACE_PREFIXES)
        }

    def train(self, step: int) -> None:
        """Train until a checkpoint of `step` exists, then stop. Resumes if there are checkpoints."""
        self._folder.mkdir(parents=True, exist_ok=True)
        run_dir = self._root / "run"
        run_dir.mkdir(exist_ok=True)
        own = variables(run_dir=run_dir, checkpoint_dir=self._folder, checkpoint_override="1")
        options = ["--checkpoint-interval", "1", "--checkpoint-keep", str(_KEEP_ALL), "--max-restarts", "0"]
        command = ["run", *options, "--warm-processes", "none", *self._todo.script]
        launcher = child_process.start(own_program("holdfast", *command), environ=self._environ | own, log=self._log)
        try:
            self._wait(launcher, step)
        finally:
            _stop(launcher)

    def _wait(self, launcher: subprocess.Popen[bytes], step: int) -> None:
        moved, last = time.monotonic(), self._newest()
        while self._newest() < step:
            code = launcher.poll()
            if code is not None and self._newest() < step:
                raise CheckError(self._ended(code, step))
            if self._newest() > last:
                moved, last = time.monotonic(), self._newest()
            if time.monotonic() - moved > self._todo.timeout:
                raise CheckError(
                    f"no checkpoint for {self._todo.timeout} s after step {last}; step {step} is needed. Train with "
                    "job.manage() and job.step(), or set a larger --patience" + self._tail()
                )
            time.sleep(_POLL_SECONDS)

    def _ended(self, code: int, step: int) -> str:
        newest = self._newest()
        if code:
            return f"the script failed with exit code {code} after step {newest}" + self._tail()
        if not newest:
            return (
                "the script ended without a checkpoint. Train with holdfast.init(), job.manage() and job.step()"
                + self._tail()
            )
        return (
            f"the script ended after step {newest}, before step {step}. Set a smaller --steps, or make the script "
            "train longer"
        )

    def _tail(self) -> str:
        with self._log.open("rb") as log:  # it may be large
            log.seek(-min(_LOG_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        return "".join(f"\n  | {line}" for line in lines)

    def _newest(self) -> int:
        return max((name.step for name in FolderStore(self._folder).commits()), default=0)

    def go_back(self, step: int) -> None:
        """Make the next start resume from the checkpoint of `step`."""
        store = FolderStore(self._folder)
        carry_out(store, plan(store, step))

    def content(self, step: int) -> Content:
        """Open the checkpoint of a step."""
        place = find(str(self._folder))
        try:
            name = choose(place, step)
        except CheckpointError as error:
            raise CheckError(
                f"the checkpoint of step {step} was not written: {error}. Repair what the log names" + self._tail()
            ) from error
        return Content(place.store, name)


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher and its ranks as a drain does, or kill them after a minute."""
    with contextlib.suppress(ProcessLookupError):
        launcher.terminate()
    try:
        launcher.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _first(one: _Run, other: _Run, steps: Sequence[int]) -> tuple[int, Difference] | None:
    """Return the first of these steps at which two runs differ."""
    for step in steps:
        with _both(one, other, step) as (before, after):
            total = compared_bytes(before.manifest, after.manifest)
            with progress(f"step {step}", total) as shown:
                found = of_script(diff(before, after, shown))
        if found.any:
            return step, found
    return None


def _finding(diagnosis: Diagnosis, found: tuple[int, Difference], one: _Run, other: _Run) -> Finding:
    step, difference = found
    largest = None
    if difference.changed:
        with _both(one, other, step) as (before, after):
            largest = _largest(before, after, difference.changed[0])
    return Finding(diagnosis=diagnosis, step=step, difference=difference, largest=largest)


@contextlib.contextmanager
def _both(one: _Run, other: _Run, step: int) -> Iterator[tuple[Content, Content]]:
    with one.content(step) as before, other.content(step) as after:
        yield before, after


def _largest(before: Content, after: Content, name: str) -> float | None:
    """Return the maximum absolute difference of a tensor; None if a number that is not finite differs."""
    import torch

    from holdfast.checkpoint.state.dtypes import torch_dtype

    dtype = torch_dtype(before.manifest.tensors[name].dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    first, second = (torch.frombuffer(one.tensor(name), dtype=dtype).to(wide) for one in (before, after))
    same = (first == second) | (first.isnan() & second.isnan())
    largest = float((first - second).abs().masked_fill(same, 0.0).max())
    return largest if math.isfinite(largest) else None


def _print(text: str) -> None:
    print(f"resume-check: {text}", flush=True)
