"""A substitute for an API server with many large jobs, for which a real one would need many times their size.

It lists, watches and patches jobs as a real one does, and keeps other objects that the operator writes. There are no
pods and no nodes.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast_operator.api import names as c

_GROUP = f"/apis/{c.GROUP}/{c.API_VERSION}"
_VERBS = ["get", "list", "watch"]
_VERSION = {"groupVersion": f"{c.GROUP}/{c.API_VERSION}", "version": c.API_VERSION}
_NAMESPACE = "tenant"
NUMBER = b"@@@"


def _kind(plural: str, name: str, *, namespaced: bool) -> dict[str, Any]:
    return {"name": plural, "kind": name, "singularName": name.lower(), "namespaced": namespaced, "verbs": _VERBS}


_DISCOVERY: Mapping[str, Any] = {
    "/version": {"major": "1"},
    "/api": {"versions": ["v1"]},
    "/apis": {"groups": [{"name": c.GROUP, "versions": [_VERSION], "preferredVersion": _VERSION}]},
    "/api/v1": {"resources": [_kind("pods", "Pod", namespaced=True), _kind("nodes", "Node", namespaced=False)]},
    _GROUP: {"resources": [_kind(c.PLURAL, c.KIND, namespaced=True)]},
}


@dataclass(kw_only=True)
class _Job:
    number: int
    version: int
    status: dict[str, Any] = field(default_factory=dict)


class StandIn:
    """Jobs with this spec as JSON, with the job's number in place of ``NUMBER``. ``serve`` returns the port."""

    def __init__(self, count: int, spec: bytes) -> None:
        self._spec = spec
        self._jobs = [_Job(number=number, version=number + 1) for number in range(count)]
        self._version = count
        self._objects: dict[str, Any] = {}
        self._watches: list[queue.Queue[bytes]] = []
        self._lock = threading.Lock()

    def serve(self) -> int:
        """Listen on loopback while this process runs."""
        standin = self

        class Handler(_Handler):
            api = standin

        server = _Server(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_port

    def get(self, path: str, query: Mapping[str, str]) -> bytes | None:
        """Return an object or a page of a list; None if it does not exist."""
        if path in _DISCOVERY:
            return json.dumps(_DISCOVERY[path]).encode()
        if path == f"{_GROUP}/{c.PLURAL}":
            return self._page(int(query.get("limit") or len(self._jobs)), int(query.get("continue") or 0))
        if path.startswith(f"{_GROUP}/namespaces/{_NAMESPACE}/{c.PLURAL}/"):
            return self._body(self._job(path))
        if path in ("/api/v1/pods", "/api/v1/nodes") or path.endswith("/pods"):
            return json.dumps({"metadata": {"resourceVersion": str(self._version)}, "items": []}).encode()
        found = self._objects.get(path)
        return None if found is None else json.dumps(found).encode()

    def put(self, path: str, body: dict[str, Any]) -> bytes:
        """Create or change an object; of a job, its status."""
        with self._lock:
            self._version += 1
            version = self._version
        if f"/{c.PLURAL}/" in path:
            job = self._job(path.removesuffix("/status"))
            job.status, job.version = _merged(job.status, body.get("status") or {}), version
            raw = self._body(job)
            for watch in self._watches:
                watch.put(b'{"type":"MODIFIED","object":' + raw + b"}\n")
            return raw
        meta = {"uid": path, **(body.get("metadata") or {}), "resourceVersion": str(version)}
        kept = {**self._objects.get(path, {}), **body, "metadata": meta}
        if "/events" not in path:
            self._objects[path] = kept
        return json.dumps(kept).encode()

    def watch(self) -> queue.Queue[bytes]:
        """Return a queue of all later changes of jobs, one per line."""
        watch: queue.Queue[bytes] = queue.Queue()
        self._watches.append(watch)
        return watch

    def _job(self, path: str) -> _Job:
        return self._jobs[int(path.rpartition("-")[2])]

    def _page(self, limit: int, first: int) -> bytes:
        bodies = [self._body(job) for job in self._jobs[first : first + limit]]
        last = first + limit
        rest = str(last) if last < len(self._jobs) else ""
        meta = json.dumps({"resourceVersion": str(self._version), "continue": rest}).encode()
        return b'{"metadata":' + meta + b',"items":[' + b",".join(bodies) + b"]}"

    def _body(self, job: _Job) -> bytes:
        meta = {
            "name": f"job-{job.number}",
            "namespace": _NAMESPACE,
            "uid": f"uid-{job.number}",
            "generation": 1,
            "resourceVersion": str(job.version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        head = {"apiVersion": f"{c.GROUP}/{c.API_VERSION}", "kind": c.KIND, "metadata": meta, "status": job.status}
        return json.dumps(head).encode()[:-1] + b',"spec":' + self._spec.replace(NUMBER, b"%03d" % job.number) + b"}"


def _merged(before: Any, patch: Any) -> Any:
    """Return the merge by RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    kept = {**before} if isinstance(before, dict) else {}
    for key, value in patch.items():
        kept[key] = _merged(kept.get(key), value)
    return {key: value for key, value in kept.items() if value is not None}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Log nothing: an operator that ends closes its connections."""


class _Handler(BaseHTTPRequestHandler):
    api: StandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a list, a watch or an object."""
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if query.get("watch") in ("true", "1"):
            return self._stream(url.path.endswith(f"/{c.PLURAL}"))
        found = self.api.get(url.path, query)
        return self._answer(404, b'{"message":"not found"}') if found is None else self._answer(200, found)

    def _stream(self, jobs: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        changes = self.api.watch() if jobs else queue.Queue[bytes]()
        while True:
            line = changes.get()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))

    def _write(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = urlsplit(self.path).path
        if self.command == "POST":
            path = f"{path}/{(body.get('metadata') or {}).get('name', '')}"
        self._answer(200, self.api.put(path, body))

    def do_POST(self) -> None:
        self._write()

    def do_PUT(self) -> None:
        self._write()

    def do_PATCH(self) -> None:
        self._write()

    def _answer(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""
