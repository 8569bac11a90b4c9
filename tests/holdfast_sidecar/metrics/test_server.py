"""The server of metrics and probes."""

import contextlib
import socket
import threading
import urllib.error
import urllib.request

import pytest

from holdfast_sidecar import constants as c
from holdfast_sidecar.metrics.server import Page, Server, probe_page


class Gate:
    """A server of which one page waits until the gate is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)
        pages = {"/slow": self._slow, "/ok": probe_page(list), "/bad": probe_page(lambda: ["stuck"])}
        self.server = Server("127.0.0.1", 0, pages)
        self.port = self.server.port

    def _slow(self) -> Page:
        self.waiting.release()
        self.open.wait(240)
        return Page(status=200, body=b"late")


@pytest.fixture
def server():
    gate = Gate()
    threading.Thread(target=gate.server.serve_forever, args=(0.02,), daemon=True).start()
    yield gate
    gate.open.set()
    gate.server.shutdown()
    gate.server.server_close()


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=240) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_probe_names_its_problems(server):
    assert get(server.port, "/ok") == (200, b"ok\n")
    assert get(server.port, "/bad") == (503, b"stuck\n")


def test_connections_above_the_limit_are_refused(server, wait):
    """They are served when one is free."""
    with contextlib.ExitStack() as held:
        for _ in range(c.MAX_SCRAPES):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
            assert server.waiting.acquire(timeout=240)
        assert not get_quietly(server.port)
        server.open.set()
        wait(lambda: get_quietly(server.port), "a free place")


def test_a_scraper_that_sends_nothing_is_let_go(server, wait):
    with contextlib.ExitStack() as held:
        for _ in range(c.MAX_SCRAPES):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait(lambda: get_quietly(server.port), "a free place")


@pytest.mark.parametrize(("error", "said"), [(BrokenPipeError(), False), (TimeoutError(), False), (KeyError(), True)])
def test_closed_scrape_is_not_logged(server, caplog, error, said):
    """An error of the server is logged."""
    try:
        raise error
    except (OSError, KeyError):
        server.server.handle_error(None, None)
    assert any(record.name == "holdfast_sidecar.metrics.server" for record in caplog.records) == said


def get_quietly(port: int) -> bool:
    try:
        return get(port, "/ok")[0] == 200
    except (ConnectionError, urllib.error.URLError):
        return False
