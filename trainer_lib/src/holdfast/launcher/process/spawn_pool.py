"""Starts rank processes quickly: from standby processes, else as a fork of the zygote, else as a new interpreter.

For `python script.py …` and `python -m module …`, a zygote loads torch and the script's imports once, in the
background. Its forks are prepared in advance and become a rank within milliseconds. If an import makes forking
unsafe, new interpreters are on standby instead. Any failure here only costs time: a new interpreter always works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from holdfast.core.environment import ENV_PROCESS_MARK
from holdfast.core.errors import SpawnError
from holdfast.launcher.process.child import Child, ChildProcess, Origin, ProcessExit, adopt_orphans
from holdfast.launcher.process.preload import ORDER, READY
from holdfast.launcher.process.script_imports import Script, of_place, parse
from holdfast.launcher.process.zygote import BOOT, FORK, FORK_WARM, IS_READY, IS_UNSAFE, WARM, ZYGOTE

_log = logging.getLogger("holdfast.launcher.pool")
# A fork takes milliseconds. After this time, the zygote is stopped or has no CPU.
_FORK_SECONDS = 1.0
_MAX_FAILURES = 3
_MESSAGE_BYTES = 1 << 16


@dataclass(kw_only=True, eq=False)
class _Zygote:
    """The process that forks, and this side of its socket."""

    child: ChildProcess
    line: socket.socket
    ready: bool = False


@dataclass(frozen=True, kw_only=True)
class _Order:
    """The environment of a process that becomes a rank, and the prefix of its output."""

    environ: Mapping[str, str]
    prefix: str


@dataclass(kw_only=True, eq=False)
class _Standing:
    """A process without an order, or that cannot receive it yet. A forked process sends its own process ID."""

    line: socket.socket
    child: Child | None = None
    ready: bool = False
    order: _Order | None = None


class Pool:
    """Creates rank processes. Runs in the launcher's event loop.

    `warm` is the number of standby processes: 0 for a zygote only, None for nothing.
    """

    def __init__(self, *, argv: Sequence[str], warm: int | None) -> None:
        self._argv = tuple(argv)
        self._script = None if warm is None else parse(argv)
        self._warm = warm or 0
        self._environ: Mapping[str, str] | None = None  # the variables that all ranks share
        self._zygote: _Zygote | None = None
        self._standing: list[_Standing] = []
        self._forks = True
        self._failures = 0

    @property
    def ready(self) -> int:
        """The number of standby processes."""
        return sum(standing.ready for standing in self._standing)

    @property
    def can_fork(self) -> bool:
        """Whether the zygote has loaded everything."""
        return self._zygote is not None and self._zygote.ready

    def spawn(self, *, environ: Mapping[str, str], prefix: str, on_exit: Callable[[ProcessExit], None]) -> Child:
        """Start a rank in the fastest way. Raises `SpawnError`. A forked rank gets its `pid` a moment later."""
        self._learn(environ)
        order = _Order(environ=environ, prefix=prefix)
        for standing in [standing for standing in self._standing if standing.ready]:
            self._forget(standing)
            if standing.child is not None and standing.child.alive and _send(standing, standing.child, order):
                standing.child.on_exit, standing.child.origin = on_exit, Origin.WARM
                _log.info("a warm process starts as a rank", extra=_fields(standing.child))
                return standing.child
        if self.can_fork:
            with contextlib.suppress(OSError):
                return self._fork_for(order, on_exit)
        return ChildProcess(argv=self._argv, environ=environ, prefix=prefix, on_exit=on_exit)

    def refill(self) -> None:
        """Start the zygote and missing standby processes. Returns at once."""
        if self._script is None or self._environ is None:
            return
        try:
            if self._forks and self._zygote is None:
                self._start_zygote(self._script)
            for _ in range(self._warm - sum(standing.order is None for standing in self._standing)):
                if self.can_fork:
                    self._stand(_Standing(line=self._fork(FORK_WARM)))
                elif not self._forks:
                    self._start_warm(self._script)
        except (OSError, SpawnError) as error:
            _log.warning("cannot start a warm standby process: %s", error)

    def close(self) -> None:
        """End all processes without an order, and create no more."""
        self._script = None
        self._drop()
        adopt_orphans(False)

    def _learn(self, environ: Mapping[str, str]) -> None:
        """Discard all processes if the environment changed: libraries read it when they are loaded."""
        common = {name: value for name, value in environ.items() if not of_place(name)}
        if self._environ is not None and self._environ != common:
            self._drop()
        self._environ = common

    def _start_zygote(self, script: Script) -> None:
        adopt_orphans(True)
        line, child = self._interpreter(script, ZYGOTE, self._zygote_ended)
        zygote = self._zygote = _Zygote(child=child, line=line)
        self._read(line, lambda message: self._introduced(zygote, message))

    def _start_warm(self, script: Script) -> None:
        line, child = self._interpreter(script, WARM, self._standing_ended)
        self._stand(_Standing(line=line, child=child))

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

    def _fork(self, request: bytes) -> socket.socket:
        """Request a process. Return its socket."""
        if self._zygote is None:
            raise ConnectionError("there is no zygote")
        ours, theirs = _line()
        with theirs:
            try:
                socket.send_fds(self._zygote.line, [request], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def _fork_for(self, order: _Order, on_exit: Callable[[ProcessExit], None]) -> Child:
        child = Child(on_exit)
        child.origin = Origin.ZYGOTE
        standing = _Standing(line=self._fork(FORK), child=child, order=order)
        self._stand(standing)
        asyncio.get_running_loop().call_later(_FORK_SECONDS, self._late, standing)
        return child

    def _late(self, standing: _Standing) -> None:
        if standing in self._standing:
            _log.warning("the zygote did not fork within %.1f s; the rank starts as a new interpreter", _FORK_SECONDS)
            self._drop_zygote()
            self._gone(standing)

    def _stand(self, standing: _Standing) -> None:
        self._standing.append(standing)
        self._read(standing.line, lambda message: self._hear(standing, message))

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
            _log.info("a warm standby process is ready", extra=_fields(standing.child))
        elif message:
            with contextlib.suppress(OSError):  # it has ended, and its socket will close
                self._there(standing, *message.decode().split())
        else:
            self._gone(standing)

    def _there(self, standing: _Standing, pid: str, mark: str) -> None:
        if standing.child is None:
            standing.child = Child(self._standing_ended)
        standing.child.adopt(int(pid), mark)
        if standing.order is not None:
            self._forget(standing)
            _send(standing, standing.child, standing.order)
            _log.info("a fork of the zygote starts as a rank", extra=_fields(standing.child))

    def _gone(self, standing: _Standing) -> None:
        """The socket is closed. If the process is known, its end is reported separately."""
        child, order = standing.child, standing.order
        if child is not None and child.pid:
            asyncio.get_running_loop().remove_reader(standing.line)
            return
        self._forget(standing)
        standing.line.close()
        if child is not None and order is not None:
            try:
                child.launch(argv=self._argv, environ=order.environ, prefix=order.prefix)
            except SpawnError as error:
                child.give_up(str(error))

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
            _log.warning("%s: forking is not safe, so warm standby processes are new interpreters", said["why"])
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
            self._forget(standing)
            standing.line.close()
            if not standing.ready:
                self._failed(ended)

    def _failed(self, ended: ProcessExit) -> None:
        """A preparation failed. The next refill retries, up to a limit."""
        self._failures += 1
        tail = ended.stderr_tail[-1] if ended.stderr_tail else ""
        _log.warning("a warm standby process ended with %d before it was ready: %s", ended.exit_code, tail)
        if self._failures >= _MAX_FAILURES:
            _log.warning("warm standby is off from now on: ranks start as new interpreters")
            self.close()

    def _forget(self, standing: _Standing) -> None:
        asyncio.get_running_loop().remove_reader(standing.line)
        if standing in self._standing:
            self._standing.remove(standing)

    def _drop(self) -> None:
        self._drop_zygote()
        for standing in list(self._standing):
            if standing.order is None:
                self._forget(standing)
                standing.line.close()  # a process that has not sent its ID ends by this
                if standing.child is not None:
                    standing.child.dismiss()

    def _drop_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            asyncio.get_running_loop().remove_reader(zygote.line)
            zygote.line.close()
            zygote.child.dismiss()


def _fields(child: Child | None) -> dict[str, dict[str, int]]:
    return {"fields": {"pid": 0 if child is None else child.pid}}


def _line() -> tuple[socket.socket, socket.socket]:
    """Return this side's and the child's end of a socket pair. A message arrives completely or not at all."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _send(standing: _Standing, child: Child, order: _Order) -> bool:
    """Send its order to a process. Kill the process if it does not receive the order."""
    with standing.line, contextlib.ExitStack() as kept:
        errors, their_errors = _pipe(kept)
        output, their_output = _pipe(kept) if order.prefix else (None, 1)
        child.pump(errors, 2, order.prefix, keep=True)
        child.pump(output, 1, order.prefix)
        try:
            environ = {**order.environ, ENV_PROCESS_MARK: child.mark}
            _send_order(standing.line, environ, their_output, their_errors)
        except OSError:
            child.kill()
            return False
    return True


def _pipe(kept: contextlib.ExitStack) -> tuple[IO[bytes], int]:
    """Return a pipe whose write end closes with `kept`. The reader owns the read end."""
    source, target = os.pipe()
    kept.callback(os.close, target)
    return os.fdopen(source, "rb"), target


def _send_order(line: socket.socket, environ: Mapping[str, str], stdout: int, stderr: int) -> None:
    """Send the environment as a file in memory: it may be larger than a message."""
    with os.fdopen(os.memfd_create("order"), "wb") as file:
        file.write(json.dumps({"environ": dict(environ), "folder": os.getcwd()}).encode())  # noqa: PTH109
        file.flush()
        socket.send_fds(line, [ORDER], [file.fileno(), stdout, stderr])
