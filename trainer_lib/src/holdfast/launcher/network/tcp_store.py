"""The stores behind MASTER_ADDR and MASTER_PORT: a new one for each attempt, served in this pod.

The stores run in a child of the launcher that outlives every rank process. So the launcher itself does not import
torch, and answers heartbeats while the libraries load. The port listens at once: ranks can connect while the child
still imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable
from typing import Final

from holdfast.core.attempt import AttemptId
from holdfast.core.environment import helper_environment
from holdfast.core.errors import StoreError
from holdfast.launcher.membership.messages import Master
from holdfast.launcher.process.child import ChildProcess, ProcessExit, own_program

# Default ports of a launcher in a pod; the membership contains the actual ones.
STORE_PORT: Final = 29400

_log = logging.getLogger("holdfast.launcher.store")
_BACKLOG = 4096
# After this many ends in a row without a served store, no attempt can start on this host.
_MAX_FAILURES = 3


class StoreHost:
    """Opens stores in a child process. `on_lost` receives the attempt ID of a store that ended or could not be
    served.

    `on_broken` is called if the child ends several times in a row without serving a store.
    """

    def __init__(
        self, on_lost: Callable[[AttemptId, str], None], *, on_broken: Callable[[str], None] = lambda _: None
    ) -> None:
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._failures = 0
        self._child: ChildProcess | None = None
        self._socket: socket.socket | None = None
        self._attempt_ids: tuple[AttemptId, ...] = ()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def warm(self) -> socket.socket:
        """Start the child now, so that it has imported torch before a store is needed."""
        if self._socket is not None:
            return self._socket
        own_end, server_end = socket.socketpair()
        own_end.setblocking(False)
        argv = own_program("holdfast.launcher.network.tcp_store_server", str(server_end.fileno()))
        with server_end:
            self._child = ChildProcess(
                argv=argv, environ=helper_environment(), on_exit=self._ended, pass_fds=(server_end.fileno(),)
            )
        self._socket = own_end
        asyncio.get_running_loop().add_reader(own_end, self._on_answer, own_end)
        return own_end

    def open(self, attempt_id: AttemptId, host: str, *, beside: AttemptId | None = None) -> Master:
        """Listen on a free port of `host`, and pass the socket to the child.

        Other stores close, except that of `beside`: its ranks still train.
        """
        try:
            connection = self.warm()
            with socket.create_server((host, 0), family=_family(host), backlog=_BACKLOG) as listener:
                port = int(listener.getsockname()[1])
                order = {"pair": str(attempt_id), "host": host, "port": port, "beside": str(beside)}
                socket.send_fds(connection, [json.dumps(order).encode() + b"\n"], [listener.fileno()])
        except OSError as error:
            raise StoreError(f"cannot open a store on {host}: {error.strerror}") from error
        self._attempt_ids = (*(kept for kept in self._attempt_ids if kept == beside), attempt_id)
        return Master(host=host, port=port)

    def close(self) -> None:
        """End the child, and with it every store."""
        self._attempt_ids = ()
        if self._child is not None:
            self._child.kill()

    def _on_answer(self, connection: socket.socket) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            data = connection.recv(65536)
        if not data:
            asyncio.get_running_loop().remove_reader(connection)
        for answer in data.splitlines():
            self._problem(json.loads(answer))

    def _problem(self, answer: dict[str, object]) -> None:
        self._failures = 0
        for attempt_id in self._attempt_ids:
            if answer.get("pair") == str(attempt_id) and answer.get("error"):
                self._on_lost(attempt_id, str(answer["error"]))

    def _ended(self, ended: ProcessExit) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        self._child = self._socket = None
        attempt_ids, self._attempt_ids = self._attempt_ids, ()
        tail = ended.stderr_tail[-1] if ended.stderr_tail else ""
        what = f"the store's process ended with {ended.exit_code} {tail}".rstrip()
        self._failures += 1
        if self._failures >= _MAX_FAILURES and attempt_ids:
            self._on_broken(f"{what}, {self._failures} times in a row: no attempt can start on this host")
        for attempt_id in attempt_ids:
            self._on_lost(attempt_id, what)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
