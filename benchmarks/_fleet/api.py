"""A small asyncio client of the API server with plain JSON, because building and watching a fleet must be cheap."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import aiohttp

from holdfast_testbed.cluster.cluster import Cluster

JSON = "application/json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
JOBS = "/apis/holdfast.dev/v1alpha1/namespaces/{namespace}/faulttolerantjobs"
LINE_BYTES = 2**20
AT_ONCE = 32


class Refused(Exception):  # noqa: N818 - reads as what it is
    """The API server rejected a request."""


class Api:
    """A client with the administrator's rights. An async context manager."""

    def __init__(self, cluster: Cluster) -> None:
        pki = cluster.state.pki
        self._server = cluster.state.server
        self._context = ssl.create_default_context(cafile=str(pki.certificate_file))
        self._context.load_cert_chain(pki.folder / "admin.crt", pki.folder / "admin.key")
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Api:
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def call(self, method: str, path: str, body: Any = None, kind: str = JSON, **query: str) -> dict[str, Any]:
        """Send one request. Raises ``Refused``."""
        data = None if body is None else json.dumps(body).encode()
        async with (
            self._slots,
            self._http.request(
                method, f"{self._server}{path}", data=data, params=query, headers={"Content-Type": kind}
            ) as answer,
        ):
            raw = await answer.read()
            if answer.status >= 300:
                raise Refused(f"{method} {path}: {answer.status} {raw[:500].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(raw)
        return found

    async def watch(self, path: str, **query: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield all present objects and then each change, until the iteration ends."""
        listed = await self.call("GET", path, **query)
        for item in listed["items"]:
            yield "ADDED", item
        newest = listed["metadata"]["resourceVersion"]
        while True:
            asked = {**query, "watch": "true", "resourceVersion": newest, "timeoutSeconds": "3600"}
            async with self._http.get(f"{self._server}{path}", params=asked) as answer:
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise Refused(f"the watch of {path} ended: {event['object']}")
                    newest = event["object"]["metadata"]["resourceVersion"]
                    yield event["type"], event["object"]
