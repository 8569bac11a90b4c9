"""The child of the launcher that serves the rendezvous stores.

It runs as `python -m holdfast.launcher.network.tcp_store_server FD`. It receives listening sockets over FD, one per
attempt. It keeps the newest store, and the one that the order names as still in use. It ends with its launcher.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from datetime import timedelta
from typing import Any

_TIMEOUT = timedelta(seconds=300)


def main() -> int:
    """Serve until the launcher closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C on a terminal
    connection = socket.socket(fileno=int(sys.argv[1]))
    import torch.distributed  # noqa: F401  (before the first order, so that no rank waits for it)

    stores: dict[str, object] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 65536, 16)
        if not data:
            return 0
        for text, descriptor in zip(data.splitlines(), descriptors, strict=True):
            order = json.loads(text)
            stores = {
                attempt_id: store for attempt_id, store in stores.items() if attempt_id == order["beside"]
            }  # closes the others
            stores[order["pair"]] = _open(connection, order, descriptor)


def _open(connection: socket.socket, order: dict[str, Any], descriptor: int) -> object:
    from torch._C._distributed_c10d import TCPStore

    try:
        store = TCPStore(
            order["host"],
            order["port"],
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        os.close(descriptor)
        connection.sendall(json.dumps({"pair": order["pair"], "error": str(error)}).encode() + b"\n")
        return None
    connection.sendall(json.dumps({"pair": order["pair"]}).encode() + b"\n")
    return store


if __name__ == "__main__":
    sys.exit(main())
