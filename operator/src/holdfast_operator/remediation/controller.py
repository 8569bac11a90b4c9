"""Remediation: an inbox that wakes a queue with one key, and a thread that runs one pass at a time.

All alerts that arrive during a pass lead to one further pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime

from kubernetes.client import ApiClient

from holdfast_operator.api.timings import DEFAULT_TIMINGS, Timings
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.cluster.client import Cluster
from holdfast_operator.errors import ClusterError, ConflictError
from holdfast_operator.remediation.act import Actor
from holdfast_operator.remediation.alerts import Alert
from holdfast_operator.remediation.clouds import Cloud, cloud_of
from holdfast_operator.remediation.decide import remedy
from holdfast_operator.remediation.fleet import FleetSnapshot
from holdfast_operator.remediation.inbox import Inbox, tokens_in
from holdfast_operator.remediation.metrics import RemediationMetrics
from holdfast_operator.remediation.observe import FleetObserver
from holdfast_operator.remediation.plan import Plan
from holdfast_operator.remediation.settings import RemediationSettings
from holdfast_operator.runtime.metrics import Metrics
from holdfast_operator.runtime.workqueue import KeyedQueue

logger = logging.getLogger(__name__)

_KEY = "nodes"


class Controller:
    """One per process. ``inbox`` is None without a token, because no alert can arrive then."""

    def __init__(
        self,
        *,
        rules: RemediationSettings,
        timings: Timings = DEFAULT_TIMINGS,
        cluster: Cluster,
        cache: Cache,
        metrics: RemediationMetrics,
        cloud: Cloud,
        namespace: str,
        identity: str,
        clock: Callable[[], datetime],
    ) -> None:
        self._queue = KeyedQueue()
        self._metrics = metrics
        self._clock = clock
        self._observer = FleetObserver(
            cluster=cluster,
            cache=cache,
            rules=rules,
            timings=timings,
            namespace=namespace,
            listens_since=clock(),
        )
        self._actor = Actor(cluster=cluster, cloud=cloud, metrics=metrics, namespace=namespace, identity=identity)
        self._thread = threading.Thread(target=self._work, name="remediation", daemon=True)
        self.inbox = (
            Inbox(
                rules,
                nodes=cache.nodes,
                exists=lambda name: cache.node(name) is not None,
                tokens=tokens_in(rules.token_file),
                wake=self.wake,
                counted=metrics.alerts,
                clock=clock,
            )
            if rules.token_file
            else None
        )

    def wake(self) -> None:
        """Request a pass. Thread-safe."""
        self._queue.add(_KEY)

    def start(self) -> None:
        """Start with a pass, because nodes may be marked already. The caches are full by now."""
        self._thread.start()
        self.wake()

    def stop(self, seconds: float = 15.0) -> None:
        """Wait until the current pass has ended."""
        self._queue.close()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def alive(self) -> bool:
        """Return whether the thread runs, or has not started."""
        return self._thread.ident is None or self._thread.is_alive()

    def _work(self) -> None:
        while (key := self._queue.get()) is not None:
            after, failed = None, True
            try:
                after, failed = self.run(), False
            except ConflictError:
                logger.info("a node has changed since it was read, it is looked at again")
            except ClusterError as error:
                logger.warning("the pass over nodes failed, it is tried again: %s", error)
            except Exception:
                # Any error is caught, because remediation must not stop the jobs.
                logger.exception("the pass over nodes failed unexpectedly, it is tried again")
            finally:
                self._queue.done(key, failed=failed, requeue_after=after)

    def run(self) -> float | None:
        """Run one pass and return the seconds until the next one."""
        if self.inbox is None:
            return self._pass(())
        word = self.inbox.words()
        after = self._pass(self.inbox.alerts())
        self.inbox.carried_out(word)
        return after

    def _pass(self, alerts: tuple[Alert, ...]) -> float | None:
        now = self._clock()
        sight = self._observer.sight(alerts)
        plan = remedy(sight, now)
        unread = {action.machine.name for action in plan.actions if not action.machine.marked}
        if unread:
            # The API server rejects a write on an old version, and a cache that lags would cause this repeatedly.
            sight = self._observer.anew(sight, unread)
            plan = remedy(sight, now)
        self._carry_out(sight, plan, now)
        return plan.requeue_after

    def _carry_out(self, sight: FleetSnapshot, plan: Plan, now: datetime) -> None:
        self._metrics.seen(sight)
        self._actor.forget_all_but({decision.node for decision in plan.decisions})
        self._actor.carry_out(plan, sight.history, now)


def make_keeper(
    rules: RemediationSettings,
    timings: Timings,
    *,
    api: ApiClient,
    cache: Cache,
    metrics: Metrics,
    namespace: str,
    identity: str,
    clock: Callable[[], datetime],
) -> Controller:
    """Return the controller of a process. Raises ``SettingsError`` if the cloud's library is missing."""
    return Controller(
        rules=rules,
        timings=timings,
        cluster=Cluster(api),
        cache=cache,
        metrics=RemediationMetrics(metrics.registry),
        cloud=cloud_of(rules),
        namespace=namespace,
        identity=identity,
        clock=clock,
    )
