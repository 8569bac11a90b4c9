"""Rank processes without the wait: warm ones that stand by, else a fork of the zygote, else a new interpreter.

For `python script.py …` and `python -m module …` a zygote loads torch and the script's imports once, in the
background. Forks of it are warmed in advance and take over a rank in milliseconds. Where an import makes forking
unsafe, new interpreters stand by instead. Whatever fails here costs time only: the last resort always works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from holdfast.errors import SpawnError
from holdfast.launch.process import Child, ChildProcess, Origin, ProcessExit, adopt_orphans
from holdfast.launch.script import Script, of_place, parse
from holdfast.launch.warm import ORDER, READY
from holdfast.launch.zygote import BOOT, FORK, FORK_WARM, IS_READY, IS_UNSAFE, WARM, ZYGOTE

_log = logging.getLogger("holdfast.launch.pool")
# A fork takes milliseconds; the event loop waits for one no longer than peers can wait for a heartbeat.
_FORK_SECONDS = 0.3
_MAX_FAILURES = 3
_MESSAGE_BYTES = 1 << 16


@dataclass(kw_only=True, eq=False)
class _Zygote:
    """The process that forks, and our end of its line."""

    child: ChildProcess
    line: socket.socket
    ready: bool = False


@dataclass(kw_only=True, eq=False)
class _Standing:
    """A process without an order. Who it is, a forked one says itself."""

    line: socket.socket
    origin: Origin
    child: Child | None = None
    ready: bool = False


class Pool:
    """Where rank processes come from. Lives in the launcher's event loop."""

    def __init__(self, *, argv: Sequence[str], warm: int) -> None:
        self._argv = tuple(argv)
        self._script = parse(argv)
        self._warm = warm
        self._environ: Mapping[str, str] | None = None  # what all ranks have in common
        self._zygote: _Zygote | None = None
        self._standing: list[_Standing] = []
        self._forks = True
        self._failures = 0

    @property
    def ready(self) -> int:
        """How many processes stand by."""
        return sum(standing.ready for standing in self._standing)

    @property
    def can_fork(self) -> bool:
        """Whether the zygote has loaded everything, and owes no process."""
        owes = any(standing.child is None and standing.origin is Origin.ZYGOTE for standing in self._standing)
        return self._zygote is not None and self._zygote.ready and not owes

    def spawn(self, *, environ: Mapping[str, str], prefix: str, on_exit: Callable[[ProcessExit], None]) -> Child:
        """Start a rank, the fastest way there is; raises `SpawnError`."""
        self._learn(environ)
        for standing in self._candidates():
            child = _order(standing, environ, prefix)
            if child is not None:
                child.on_exit = on_exit
                return child
        return ChildProcess(argv=self._argv, environ=environ, prefix=prefix, on_exit=on_exit)

    def refill(self) -> None:
        """See that a zygote and the wanted processes are there, or are being made. Returns at once."""
        if self._script is None or self._environ is None:
            return
        try:
            if self._zygote is not None and self._zygote.ready and not self.can_fork:
                self._drop_zygote()
            if self._forks and self._zygote is None:
                self._start_zygote(self._script)
            for _ in range(self._warm - len(self._standing)):
                if self.can_fork:
                    self._fork(FORK_WARM, Origin.WARM)
                elif not self._forks:
                    self._start_warm(self._script)
        except (OSError, SpawnError) as error:
            _log.warning("no process can stand by: %s", error)

    def close(self) -> None:
        """End everything that has no order, and make nothing again."""
        self._script = None
        self._drop()
        adopt_orphans(False)

    # Whom a rank may come from

    def _learn(self, environ: Mapping[str, str]) -> None:
        """Libraries read the environment as they are loaded: what was loaded under another one is of no use."""
        common = {name: value for name, value in environ.items() if not of_place(name)}
        if self._environ is not None and self._environ != common:
            self._drop()
        self._environ = common

    def _candidates(self) -> Iterator[_Standing]:
        for standing in [standing for standing in self._standing if standing.ready]:
            self._forget(standing)
            yield standing
        if self.can_fork:
            with contextlib.suppress(OSError):
                yield from self._forked_now()

    def _forked_now(self) -> Iterator[_Standing]:
        standing = self._fork(FORK, Origin.ZYGOTE)
        standing.line.settimeout(_FORK_SECONDS)
        try:
            self._hear(standing, standing.line.recv(_MESSAGE_BYTES))
        except TimeoutError:  # it stands by if it comes after all; if not, the next refill replaces the zygote
            standing.line.setblocking(False)
            _log.warning("the zygote did not fork within %.1f s: a new interpreter starts", _FORK_SECONDS)
            return
        self._forget(standing)
        yield standing

    # Making them

    def _start_zygote(self, script: Script) -> None:
        adopt_orphans(True)
        line, child = self._interpreter(script, ZYGOTE, self._zygote_ended)
        zygote = self._zygote = _Zygote(child=child, line=line)
        self._read(line, lambda message: self._introduced(zygote, message))

    def _start_warm(self, script: Script) -> None:
        line, child = self._interpreter(script, WARM, self._standing_ended)
        self._stand(_Standing(line=line, origin=Origin.WARM, child=child))

    def _interpreter(
        self, script: Script, role: str, on_exit: Callable[[ProcessExit], None]
    ) -> tuple[socket.socket, ChildProcess]:
        ours, theirs = _line()
        with theirs:
            argv = [script.interpreter, *script.options, "-c", BOOT, role, str(theirs.fileno()), *script.words]
            try:
                child = ChildProcess(
                    argv=argv,
                    environ=self._environ or {},
                    on_exit=on_exit,
                    pass_fds=(theirs.fileno(),),
                    quiet=True,
                )
            except SpawnError:
                ours.close()
                raise
        return ours, child

    def _fork(self, request: bytes, origin: Origin) -> _Standing:
        if self._zygote is None:
            raise ConnectionError("there is no zygote")
        ours, theirs = _line()
        with theirs:
            try:
                socket.send_fds(self._zygote.line, [request], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return self._stand(_Standing(line=ours, origin=origin))

    def _stand(self, standing: _Standing) -> _Standing:
        self._standing.append(standing)
        self._read(standing.line, lambda message: self._hear(standing, message))
        return standing

    # What they say and how they end

    def _read(self, line: socket.socket, heard: Callable[[bytes], None]) -> None:
        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                try:
                    message = line.recv(_MESSAGE_BYTES)
                except ConnectionError:
                    message = b""
                heard(message)

        asyncio.get_running_loop().add_reader(line, readable)

    def _hear(self, standing: _Standing, message: bytes) -> None:
        if message == READY:
            standing.ready = True
        elif message:
            with contextlib.suppress(OSError):  # it is dead and gone, and its line says so next
                standing.child = Child.adopted(int(message), on_exit=self._standing_ended)
                standing.ready = standing.origin is Origin.ZYGOTE  # it warms nothing
        else:
            self._forget(standing)
            standing.line.close()

    def _introduced(self, zygote: _Zygote, message: bytes) -> None:
        if not message:
            asyncio.get_running_loop().remove_reader(zygote.line)
            return
        said = json.loads(message)
        for module, why in said["skipped"]:
            _log.info("%s is not loaded ahead of time: %s", module, why)
        zygote.ready = said["state"] == IS_READY
        self._failures = 0
        if said["state"] == IS_UNSAFE:
            _log.warning("%s: forking is not safe, so new interpreters stand by", said["why"])
            self._forks = False
        elif not zygote.ready:
            self._script = None
        self.refill()

    def _zygote_ended(self, ended: ProcessExit) -> None:
        was_ready = self._zygote is not None and self._zygote.ready
        self._drop_zygote()
        if ended.returncode != 0 and not was_ready:
            self._failed(ended)

    def _standing_ended(self, ended: ProcessExit) -> None:
        for standing in [s for s in self._standing if s.child is not None and s.child.pid == ended.pid]:
            self._hear(standing, b"")
            if not standing.ready:
                self._failed(ended)

    def _failed(self, ended: ProcessExit) -> None:
        """Preparing failed; the next refill tries again, but not for ever."""
        self._failures += 1
        tail = ended.stderr_tail[-1] if ended.stderr_tail else ""
        _log.warning("a process that was to stand by ended with %d %s", ended.exit_code, tail)
        if self._failures >= _MAX_FAILURES:
            _log.warning("no process stands by from now on: ranks start as new interpreters")
            self.close()

    # Letting go

    def _forget(self, standing: _Standing) -> None:
        asyncio.get_running_loop().remove_reader(standing.line)
        if standing in self._standing:
            self._standing.remove(standing)

    def _drop(self) -> None:
        self._drop_zygote()
        for standing in list(self._standing):
            self._forget(standing)
            standing.line.close()  # one that has not said who it is ends by this
            if standing.child is not None:
                standing.child.dismiss()

    def _drop_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            asyncio.get_running_loop().remove_reader(zygote.line)
            zygote.line.close()
            zygote.child.dismiss()


def _line() -> tuple[socket.socket, socket.socket]:
    """Our end and a child's; a message arrives whole or not at all."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _order(standing: _Standing, environ: Mapping[str, str], prefix: str) -> Child | None:
    """Tell a process what to become; None if it is gone."""
    child = standing.child
    with standing.line, contextlib.ExitStack() as kept:
        if child is None or not child.alive:
            return None
        errors, their_errors = _pipe(kept)
        output, their_output = _pipe(kept) if prefix else (None, 1)
        try:
            _send_order(standing.line, environ, their_output, their_errors)
        except OSError:
            child.dismiss()
            return None
        child.pump(errors, 2, prefix, keep=True)
        child.pump(output, 1, prefix)
    child.origin = standing.origin
    return child


def _pipe(kept: contextlib.ExitStack) -> tuple[IO[bytes], int]:
    """A pipe whose write end closes with `kept`; the read end belongs to whoever reads it."""
    source, target = os.pipe()
    kept.callback(os.close, target)
    return os.fdopen(source, "rb"), target


def _send_order(line: socket.socket, environ: Mapping[str, str], stdout: int, stderr: int) -> None:
    """The environment may be larger than a message, so it travels as a file in memory."""
    with os.fdopen(os.memfd_create("order"), "wb") as file:
        file.write(json.dumps({"environ": dict(environ), "folder": os.getcwd()}).encode())  # noqa: PTH109
        file.flush()
        socket.send_fds(line, [ORDER], [file.fileno(), stdout, stderr])
