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
from holdfast.launcher.process.script_imports import Script, is_rank_variable, parse
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
class _Standby:
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
        self._standbys: list[_Standby] = []
        self._forks = True
        self._failures = 0

    @property
    def ready(self) -> int:
        """The number of standby processes."""
        return sum(standby.ready for standby in self._standbys)

    @property
    def can_fork(self) -> bool:
        """Whether the zygote has loaded everything."""
        return self._zygote is not None and self._zygote.ready

    def spawn(self, *, environ: Mapping[str, str], prefix: str, on_exit: Callable[[ProcessExit], None]) -> Child:
        """Start a rank in the fastest way. Raises `SpawnError`. A forked rank gets its `pid` a moment later."""
        self._set_environ(environ)
        order = _Order(environ=environ, prefix=prefix)
        for standby in [standby for standby in self._standbys if standby.ready]:
            self._remove(standby)
            if standby.child is not None and standby.child.alive and _send(standby, standby.child, order):
                standby.child.on_exit, standby.child.origin = on_exit, Origin.WARM
                _log.info("a warm process starts as a rank", extra=_fields(standby.child))
                return standby.child
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
            for _ in range(self._warm - sum(standby.order is None for standby in self._standbys)):
                if self.can_fork:
                    self._add_standby(_Standby(line=self._fork(FORK_WARM)))
                elif not self._forks:
                    self._start_warm(self._script)
        except (OSError, SpawnError) as error:
            _log.warning("cannot start a warm standby process: %s", error)

    def close(self) -> None:
        """End all processes without an order, and create no more."""
        self._script = None
        self._drop()
        adopt_orphans(False)

    def _set_environ(self, environ: Mapping[str, str]) -> None:
        """Discard all processes if the environment changed: libraries read it when they are loaded."""
        common = {name: value for name, value in environ.items() if not is_rank_variable(name)}
        if self._environ is not None and self._environ != common:
            self._drop()
        self._environ = common

    def _start_zygote(self, script: Script) -> None:
        adopt_orphans(True)
        line, child = self._interpreter(script, ZYGOTE, self._zygote_ended)
        zygote = self._zygote = _Zygote(child=child, line=line)
        self._read(line, lambda message: self._on_zygote_message(zygote, message))

    def _start_warm(self, script: Script) -> None:
        line, child = self._interpreter(script, WARM, self._standby_ended)
        self._add_standby(_Standby(line=line, child=child))

    def _interpreter(
        self, script: Script, role: str, on_exit: Callable[[ProcessExit], None]
    ) -> tuple[socket.socket, ChildProcess]:
        own_end, child_end = _socket_pair()
        with child_end:
            argv = [script.interpreter, *script.options, "-c", BOOT, role, str(child_end.fileno()), *script.words]
            try:
                child = ChildProcess(
                    argv=argv,
                    environ=self._environ or {},
                    on_exit=on_exit,
                    pass_fds=(child_end.fileno(),),
                    quiet=True,
                )
            except SpawnError:
                own_end.close()
                raise
        return own_end, child

    def _fork(self, request: bytes) -> socket.socket:
        """Request a process. Return its socket."""
        if self._zygote is None:
            raise ConnectionError("there is no zygote")
        own_end, child_end = _socket_pair()
        with child_end:
            try:
                socket.send_fds(self._zygote.line, [request], [child_end.fileno()])
            except OSError:
                own_end.close()
                raise
        return own_end

    def _fork_for(self, order: _Order, on_exit: Callable[[ProcessExit], None]) -> Child:
        child = Child(on_exit)
        child.origin = Origin.ZYGOTE
        standby = _Standby(line=self._fork(FORK), child=child, order=order)
        self._add_standby(standby)
        asyncio.get_running_loop().call_later(_FORK_SECONDS, self._fork_timed_out, standby)
        return child

    def _fork_timed_out(self, standby: _Standby) -> None:
        if standby in self._standbys:
            _log.warning("the zygote did not fork within %.1f s; the rank starts as a new interpreter", _FORK_SECONDS)
            self._drop_zygote()
            self._on_closed(standby)

    def _add_standby(self, standby: _Standby) -> None:
        self._standbys.append(standby)
        self._read(standby.line, lambda message: self._on_message(standby, message))

    def _read(self, line: socket.socket, on_message: Callable[[bytes], None]) -> None:
        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                try:
                    message = line.recv(_MESSAGE_BYTES)
                except ConnectionError:
                    message = b""
                on_message(message)

        asyncio.get_running_loop().add_reader(line, readable)

    def _on_message(self, standby: _Standby, message: bytes) -> None:
        if message == READY:
            standby.ready = True
            _log.info("a warm standby process is ready", extra=_fields(standby.child))
        elif message:
            with contextlib.suppress(OSError):  # it has ended, and its socket will close
                self._on_process_id(standby, *message.decode().split())
        else:
            self._on_closed(standby)

    def _on_process_id(self, standby: _Standby, pid: str, mark: str) -> None:
        if standby.child is None:
            standby.child = Child(self._standby_ended)
        standby.child.adopt(int(pid), mark)
        if standby.order is not None:
            self._remove(standby)
            _send(standby, standby.child, standby.order)
            _log.info("a fork of the zygote starts as a rank", extra=_fields(standby.child))

    def _on_closed(self, standby: _Standby) -> None:
        """The socket is closed. If the process is known, its end is reported separately."""
        child, order = standby.child, standby.order
        if child is not None and child.pid:
            asyncio.get_running_loop().remove_reader(standby.line)
            return
        self._remove(standby)
        standby.line.close()
        if child is not None and order is not None:
            try:
                child.launch(argv=self._argv, environ=order.environ, prefix=order.prefix)
            except SpawnError as error:
                child.give_up(str(error))

    def _on_zygote_message(self, zygote: _Zygote, message: bytes) -> None:
        if not message:
            asyncio.get_running_loop().remove_reader(zygote.line)
            return
        message_fields = json.loads(message)
        for module, why in message_fields["skipped"]:
            _log.info("%s is not loaded ahead of time: %s", module, why)
        zygote.ready = message_fields["state"] == IS_READY
        self._failures = 0
        if message_fields["state"] == IS_UNSAFE:
            _log.warning(
                "%s: forking is not safe, so warm standby processes are new interpreters", message_fields["why"]
            )
            self._forks = False
        elif not zygote.ready:
            self._script = None
        self.refill()

    def _zygote_ended(self, ended: ProcessExit) -> None:
        was_ready = self._zygote is not None and self._zygote.ready
        self._drop_zygote()
        if ended.returncode != 0 and not was_ready:
            self._failed(ended)

    def _standby_ended(self, ended: ProcessExit) -> None:
        for standby in [s for s in self._standbys if s.child is not None and s.child.pid == ended.pid]:
            self._remove(standby)
            standby.line.close()
            if not standby.ready:
                self._failed(ended)

    def _failed(self, ended: ProcessExit) -> None:
        """A preparation failed. The next refill retries, up to a limit."""
        self._failures += 1
        tail = ended.stderr_tail[-1] if ended.stderr_tail else ""
        _log.warning("a warm standby process ended with %d before it was ready: %s", ended.exit_code, tail)
        if self._failures >= _MAX_FAILURES:
            _log.warning("warm standby is off from now on: ranks start as new interpreters")
            self.close()

    def _remove(self, standby: _Standby) -> None:
        asyncio.get_running_loop().remove_reader(standby.line)
        if standby in self._standbys:
            self._standbys.remove(standby)

    def _drop(self) -> None:
        self._drop_zygote()
        for standby in list(self._standbys):
            if standby.order is None:
                self._remove(standby)
                standby.line.close()  # a process that has not sent its ID ends by this
                if standby.child is not None:
                    standby.child.dismiss()

    def _drop_zygote(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            asyncio.get_running_loop().remove_reader(zygote.line)
            zygote.line.close()
            zygote.child.dismiss()


def _fields(child: Child | None) -> dict[str, dict[str, int]]:
    return {"fields": {"pid": 0 if child is None else child.pid}}


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return this side's and the child's end of a socket pair. A message arrives completely or not at all."""
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own_end.setblocking(False)
    return own_end, child_end


def _send(standby: _Standby, child: Child, order: _Order) -> bool:
    """Send its order to a process. Kill the process if it does not receive the order."""
    with standby.line, contextlib.ExitStack() as kept:
        errors, their_errors = _pipe(kept)
        output, their_output = _pipe(kept) if order.prefix else (None, 1)
        child.pump(errors, 2, order.prefix, keep=True)
        child.pump(output, 1, order.prefix)
        try:
            environ = {**order.environ, ENV_PROCESS_MARK: child.mark}
            _send_order(standby.line, environ, their_output, their_errors)
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
