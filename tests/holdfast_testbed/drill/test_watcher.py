"""Whoever waits for something that a watcher is to see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes import client

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill.watcher import Watcher


@contextmanager
def api_server(job: dict[str, Any]) -> Iterator[Cluster]:
    """A cluster that has this job and no pods."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"items": []} if "/pods" in self.path else job).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        configuration = client.Configuration(host=url)
        yield cast("Cluster", SimpleNamespace(api_client=lambda: client.ApiClient(configuration)))
        server.shutdown()


def job(counted: dict[str, Any]) -> dict[str, Any]:
    return {"status": {"incidentsByCause": [counted]}}


def test_what_is_waited_for_is_seen() -> None:
    with api_server(job({"cause": "OOM", "count": 1})) as cluster, Watcher(cluster, "ml", "gpt") as watcher:
        watcher.wait("a count", lambda: watcher.view.incidents_by_cause == {"OOM": 1}, timeout=60)


def test_a_watcher_that_has_ended_lets_nobody_wait() -> None:
    with (
        api_server(job({"cause": "OOM"})) as cluster,
        Watcher(cluster, "ml", "gpt") as watcher,
        pytest.raises(RuntimeError, match="receives no more changes") as raised,
    ):
        watcher.wait("a count", lambda: False, timeout=60)
    assert isinstance(raised.value.__cause__, KeyError)
