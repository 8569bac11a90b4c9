"""The agents' API and Alertmanager's webhook over HTTPS, in a thread with its own event loop.

It is outside of kopf's loop, because a failed watch ends kopf and must not affect training.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

from holdfast_operator.agents.connections import TlsConnection
from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.routes import AgentRoutes, AlertReceiver, ServerMetrics
from holdfast_operator.cluster.agent_hub import AgentHub

logger = logging.getLogger(__name__)


class AgentServer:
    """Serves an ``AgentHub``. ``start`` returns once it listens; ``stop`` once its thread has ended."""

    def __init__(
        self,
        hub: AgentHub,
        context: ssl.SSLContext,
        *,
        host: str | None = None,
        port: int = 8443,
        limits: Limits | None = None,
        observer: ServerMetrics | None = None,
        alerts: AlertReceiver | None = None,
    ) -> None:
        self._hub = hub
        self._alerts = alerts
        self._context = context
        self._host, self._port = host, port
        self._limits = limits or Limits()
        self._observer = observer or ServerMetrics()
        self._thread = threading.Thread(target=self._run, name="agents-api", daemon=True)
        self._listening = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._site: AgentRoutes | None = None
        self.port = port

    @property
    def polls_held(self) -> int:
        return self._site.held if self._site is not None else 0

    @property
    def reviews_waiting(self) -> int:
        """The number of tokens whose review is in progress."""
        return len(self._site.reviews) if self._site is not None else 0

    @property
    def bodies_read(self) -> int:
        """The number of reports whose bodies are being read."""
        return self._site.bodies.total() if self._site is not None else 0

    def start(self, seconds: float = 30.0) -> None:
        """Start to listen. Raises the error that prevents it."""
        self._thread.start()
        if not self._listening.wait(seconds):
            raise TimeoutError("the agents' API did not start to listen in time")
        if self._failure is not None:
            raise self._failure

    def stop(self, seconds: float = 10.0) -> None:
        """Close all connections and end the thread."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)
        self._thread.join(seconds)

    def alive(self) -> bool:
        """Return whether the server's thread still serves."""
        return self._thread.is_alive() and self._failure is None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._failure = error
            logger.exception("the agents' API ended")
        finally:
            self._hub.listen(None)
            self._listening.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        with (
            ThreadPoolExecutor(self._limits.authentications, thread_name_prefix="token-review") as threads,
            ThreadPoolExecutor(1, thread_name_prefix="large-reports") as reader,
        ):
            self._site = site = AgentRoutes(
                self._hub, self._limits, self._observer, threads=threads, reader=reader, alerts=self._alerts
            )
            listener = await self._loop.create_server(
                lambda: TlsConnection(site.guard, self._context, self._limits), self._host, self._port, backlog=1024
            )
            self.port = listener.sockets[0].getsockname()[1]
            self._listening.set()
            await self._stopping.wait()
            listener.close()
            await site.guard.shutdown(1.0)
