"""A real TLS handshake with what a ``TlsKeeper`` serves."""

from __future__ import annotations

import socket
import ssl
import threading

from holdfast_operator.agents.tls import TlsKeeper


def shakes_hands(server: TlsKeeper, bundle: str, name: str = "127.0.0.1") -> str:
    """One handshake of a client that trusts the bundle: 'ok', or why the client refused."""
    trust = ssl.create_default_context(cadata=bundle)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        theirs.settimeout(60)
        thread = threading.Thread(target=_accept, args=(server.context, ours))
        thread.start()
        try:
            with trust.wrap_socket(theirs, server_hostname=name):
                return "ok"
        except ssl.SSLError as error:
            return str(error)
        finally:
            theirs.close()
            thread.join(60)


def _accept(context: ssl.SSLContext, connection: socket.socket) -> None:
    try:
        context.wrap_socket(connection, server_side=True).close()
    except OSError:
        return
