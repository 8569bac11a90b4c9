"""One operator process: its threads and servers, and the order in which they start and stop.

One of several replicas leads, by a Lease. The others are on standby with full caches and serve probes and metrics. A
leader that loses the Lease ends at once, in whatever state its threads are. The program is then executed again in the
same process, and is on standby. The container keeps running, so the kubelet's back-off never delays a new leader.

While the API server is away, a process waits for it, both at its start and in its watches. A watch that fails for
another reason ends the process, and the kubelet restarts it. Until then, separate threads serve agents, probes and
metrics.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from holdfast_operator import __version__
from holdfast_operator.agents.certificate_authority import BuiltInAuthority
from holdfast_operator.agents.job_key import ensure_operator_key, job_key
from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.mounted_certificate import MountedCertificate
from holdfast_operator.agents.routes import ServerMetrics
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.agents.tls import CertificateSource, TlsKeeper
from holdfast_operator.agents.token_review import TokenReviews, reviewer
from holdfast_operator.api.job import key_of
from holdfast_operator.api.timings import DEFAULT_TIMINGS, Timings
from holdfast_operator.cluster.agent_hub import AgentHub
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.cluster.client import AT_LEISURE, Cluster
from holdfast_operator.cluster.informer import Feed
from holdfast_operator.cluster.secrets import ClusterSecrets, SecretStore
from holdfast_operator.errors import (
    ClusterError,
    ConflictError,
    OperatorError,
    RejectedError,
    RotationError,
    SettingsError,
)
from holdfast_operator.leadership.elector import Callbacks, ClusterLease, Elector, LeaseStore
from holdfast_operator.leadership.lease import LeaseTimings
from holdfast_operator.manifests.installation import Installation
from holdfast_operator.reconcile.act import Actor
from holdfast_operator.reconcile.event_writer import EventWriter
from holdfast_operator.reconcile.observe import JobObserver
from holdfast_operator.reconcile.reconciler import Outcome, Reconciler
from holdfast_operator.remediation.controller import Controller, make_keeper
from holdfast_operator.runtime import logs
from holdfast_operator.runtime.clock import SteadyClock
from holdfast_operator.runtime.health import HealthServer
from holdfast_operator.runtime.metrics import Metrics
from holdfast_operator.runtime.workqueue import KeyedQueue
from holdfast_operator.settings import Settings, from_environment

logger = logging.getLogger(__name__)

POOL = 32
_ASK_AGAIN_SECONDS = 1.0
# Responses that show that the API server is unavailable. Other errors are no reason to wait.
_AWAY = frozenset({429, 500, 502, 503, 504})


def api_client(*, retries: bool | None = None) -> client.ApiClient:
    """Return a client from inside a cluster, or else from KUBECONFIG. ``retries=False``: each call is tried once."""
    configuration = client.Configuration()
    configuration.retries = retries
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = POOL
    return client.ApiClient(configuration)


@dataclass(frozen=True, kw_only=True)
class Components:
    """The parts of one process."""

    settings: Settings
    cluster: Cluster
    feed: Feed
    queue: KeyedQueue
    hub: AgentHub
    observer: JobObserver
    reconciler: Reconciler
    metrics: Metrics
    tls: TlsKeeper
    agents: AgentServer
    nodes: Controller
    event_writer: EventWriter
    lease: LeaseStore
    now: Callable[[], datetime]


def assemble(settings: Settings, api: client.ApiClient, lease: LeaseStore, now: Callable[[], datetime]) -> Components:
    """Connect the parts. This reads the operator's own Secrets and starts nothing."""
    store = ClusterSecrets(client.CoreV1Api(api), settings.namespace)
    metrics, cache, cluster = Metrics(version=__version__), Cache(), Cluster(api)
    queue = KeyedQueue(waited=metrics.queue_waited)
    feed = Feed(cache, queue)
    operator_key, ids = ensure_operator_key(store), random.Random()  # noqa: S311 - of publications, no secret
    tls = TlsKeeper(_certificates(settings, store), on_bundle=lambda: _wake_all(cache, queue))
    tls.refresh()
    metrics.ca_expires(tls.credentials.authority_expires.timestamp())
    hub = _hub(api, feed, metrics, now)
    observer = JobObserver(
        cluster=cluster,
        cache=cache,
        hub=hub,
        platform=lambda: _platform(settings, tls),
        key_of_job=lambda uid: job_key(operator_key, uid),
        # Each pass needs one, and the system's random source would cost a system call each time.
        nonce=lambda: f"{ids.getrandbits(32):08x}",
        started_at=now(),
        timings=settings.timings,
    )
    actor = Actor(cluster=cluster, hub=hub, identity=settings.identity, left_out=metrics.events_dropped)
    reconciler = Reconciler(observer=observer, actor=actor, cache=cache, hub=hub, metrics=metrics, clock=now)
    nodes = make_keeper(
        settings.remediation,
        settings.timings,
        api=api,
        cache=cache,
        metrics=metrics,
        namespace=settings.namespace,
        identity=settings.identity,
        clock=now,
    )
    return Components(
        settings=settings,
        cluster=cluster,
        feed=feed,
        queue=queue,
        hub=hub,
        observer=observer,
        reconciler=reconciler,
        metrics=metrics,
        tls=tls,
        agents=_agents(settings, hub, tls, nodes, metrics),
        nodes=nodes,
        event_writer=EventWriter(),
        lease=lease,
        now=now,
    )


def _certificates(settings: Settings, store: SecretStore) -> CertificateSource:
    if settings.tls_folder is not None:
        return MountedCertificate(settings.tls_folder, settings.agents_host)
    return BuiltInAuthority(store, settings.agents_names)


def _hub(api: client.ApiClient, feed: Feed, metrics: Metrics, now: Callable[[], datetime]) -> AgentHub:
    """Return a hub that rejects reports until this process leads."""
    tokens = TokenReviews(reviewer(client.AuthenticationV1Api(api)))
    hub = AgentHub(
        tokens,
        feed.report,
        recall=tokens.recall,
        due=tokens.due,
        clock=now,
        on_repeat=metrics.report_duplicate,
        on_check=metrics.preflight_checked,
        on_unheard=metrics.report_entries_dropped,
    )
    hub.stand_by()
    return hub


def _agents(settings: Settings, hub: AgentHub, tls: TlsKeeper, nodes: Controller, metrics: Metrics) -> AgentServer:
    return AgentServer(
        hub,
        tls.context,
        host=settings.host or None,
        port=settings.agents_port,
        limits=Limits.within(settings.memory_bytes),
        observer=ServerMetrics(answered=metrics.agent_request, polls=metrics.long_polls),
        alerts=nodes.inbox,
    )


def _platform(settings: Settings, tls: TlsKeeper) -> Installation:
    return Installation(
        sidecar_image=settings.sidecar_image,
        agents_url=settings.agents_url,
        ca_bundle=tls.credentials.bundle,
        sidecar_pull_policy=settings.sidecar_pull_policy,
        sidecar_user=settings.sidecar_user,
        sidecar_resources=settings.sidecar_resources,
        metadata_url=settings.metadata_url,
        dcgm_url=settings.dcgm_url,
        image_pull_secrets=settings.image_pull_secrets,
        network_policies=settings.network_policies,
        disruption_budgets=settings.disruption_budgets,
    )


def _wake_all(cache: Cache, queue: KeyedQueue) -> None:
    for body in cache.jobs():
        queue.add(key_of(body))


class Process:
    """Starts and stops the parts. ``stop`` may be called at any time and more than once.

    ``lost`` receives the reason why the Lease is lost, and ends the process. ``ended`` is set if the process is to
    end before it serves.
    """

    def __init__(self, parts: Components, lost: Callable[[str], None], ended: threading.Event) -> None:
        self._parts = parts
        self._ended = ended
        self._elector = Elector(
            parts.lease,
            Callbacks(elected=self._lead, ended=lost, follows=parts.hub.stand_by),
            me=parts.settings.identity,
            url=parts.settings.own_url,
            terms=LeaseTimings(lease_seconds=parts.settings.lease_seconds),
            now=parts.now,
        )
        self._stop = threading.Event()
        self._synced = threading.Event()
        self._threads: list[threading.Thread] = []
        live = {
            "agents-api": parts.agents.alive,
            "election": self._elector.alive,
            "workers": self._workers_live,
            "nodes": parts.nodes.alive,
            "events": parts.event_writer.alive,
        }
        ready = {"synced": self._synced.is_set, "agents-api": parts.agents.alive}
        settings = parts.settings
        self.health = HealthServer(
            parts.metrics.render, live=live, ready=ready, host=settings.host, port=settings.http_port
        )

    def start(self) -> bool:
        """Serve probes, read a full list, and request the Lease. Return False if the process is to end."""
        parts = self._parts
        parts.agents.start()
        self.health.start()
        parts.tls.start()
        self._elector.look()
        while not self._listed():
            if self._ended.wait(_ASK_AGAIN_SECONDS):
                return False
        self._synced.set()
        self._thread(self._keep_fresh, "relist")
        self._elector.start()
        return True

    def _listed(self) -> bool:
        try:
            self._parts.feed.relist(self._parts.cluster, self._parts.settings.watch_namespaces)
        except RejectedError:
            raise
        except ClusterError as error:
            logger.warning("the first full list failed, it is tried again: %s", error)
            return False
        self._parts.metrics.listed(self._parts.now().timestamp())
        return True

    def _lead(self) -> None:
        """Accept agents' reports and start passes. Since the full list, every job is in the queue."""
        parts = self._parts
        parts.observer.begin(parts.now())
        parts.hub.take_over()
        parts.metrics.leads()
        # Not earlier: on standby, all jobs wait in the queue, and none of them is late.
        parts.metrics.queue_depth(parts.queue.depth)
        for number in range(parts.settings.workers):
            self._thread(self._work, f"worker-{number}")
        parts.nodes.start()
        parts.event_writer.start()

    def stop(self) -> None:
        """Wait for the passes in progress, then stop the servers."""
        self._stop.set()
        self._parts.queue.close()
        self._parts.nodes.stop()
        for thread in self._threads:
            thread.join(15.0)
        self._parts.hub.stand_by()
        idle = not any(thread.is_alive() for thread in self._threads)
        self._elector.stop(give_back=idle)
        self._parts.event_writer.stop()
        self._parts.agents.stop()
        self._parts.tls.stop()
        self.health.stop()

    def _thread(self, target: object, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _workers_live(self) -> bool:
        return not self._synced.is_set() or all(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        queue = self._parts.queue
        while (key := queue.get()) is not None:
            if not self._elector.leads():
                # The process was suspended past the end of its Lease: the elector is about to end it.
                queue.done(key, failed=True)
                continue
            with logs.about(key):
                self._pass(key)

    def _pass(self, key: str) -> None:
        started, queue, metrics = time.monotonic(), self._parts.queue, self._parts.metrics
        result, outcome = "error", Outcome()
        try:
            outcome = self._parts.reconciler.run(key)
            result = "error" if outcome.failure is not None else "ok"
        except ConflictError:
            result = "conflict"
        except ClusterError as error:
            logger.warning("the pass failed, it is tried again: %s", error)
        except Exception:
            # An unexpected error of one job must not stop the others. The job is tried again after a pause.
            logger.exception("the pass failed unexpectedly, it is tried again")
        finally:
            queue.done(key, failed=result != "ok", requeue_after=outcome.requeue_after)
            metrics.reconciled(result, time.monotonic() - started)
        if outcome.tell is not None:
            self._parts.event_writer.add(outcome.tell)

    def _keep_fresh(self) -> None:
        parts = self._parts
        while not self._stop.wait(parts.settings.relist_seconds):
            try:
                parts.reconciler.refresh()
                parts.feed.relist(parts.cluster, parts.settings.watch_namespaces, pace=AT_LEISURE)
                parts.metrics.listed(parts.now().timestamp())
                parts.metrics.ca_expires(parts.tls.credentials.authority_expires.timestamp())
            except OperatorError as error:
                logger.warning("the full list failed, what is known stays: %s", error)


def _begin_anew(why: str) -> None:
    """Execute the program again at once, because the next leader must not act alongside the threads of this one."""
    logger.error("the operator starts over: %s", why)
    try:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - no shell is wanted
    except OSError:
        os._exit(1)


def _assembled(settings: Settings, lease: LeaseStore, ended: threading.Event) -> Components | None:
    """Return the parts when the API server answers; None if the process is to end before. Liveness probes succeed."""
    waiting = HealthServer(
        lambda: b"", live={}, ready={"api-server": lambda: False}, host=settings.host, port=settings.http_port
    )
    waiting.start()
    try:
        while not ended.is_set():
            try:
                lease.read()  # first, because it is tried once and returns within seconds
                return assemble(settings, api_client(), lease, SteadyClock())
            except (ClusterError, ApiException, HTTPError) as error:
                if _refused(error):
                    raise
                logger.warning("the API server does not answer, it is asked again: %s", error)
                ended.wait(_ASK_AGAIN_SECONDS)
        return None
    finally:
        waiting.stop()


def _refused(error: Exception) -> bool:
    """Return whether the API server rejected the request, so that waiting does not help."""
    return isinstance(error, RejectedError) or (isinstance(error, ApiException) and error.status not in _AWAY)


# The API server accepts values that are nested 10,000 deep. A job that cannot be decoded would end every list and
# watch. A level takes less than 200 bytes of a thread's stack.
_JSON_DEPTH = 12_000
_MOST_NESTED = 10_000


def _decodes_deep() -> bool:
    """Return whether this Python decodes what the API server accepts; 3.12 is limited to about 5,000 levels."""
    try:
        json.loads("[" * _MOST_NESTED + "]" * _MOST_NESTED)
    except RecursionError:
        return False
    return True


def main(timings: Timings = DEFAULT_TIMINGS) -> int:
    """Run until a signal (exit code 0) or a failed watch (1). Wrong settings or Secrets end it at once (78)."""
    sys.setrecursionlimit(_JSON_DEPTH)
    try:
        settings = replace(from_environment(), timings=timings)
    except SettingsError as error:
        logs.set_up("INFO")
        logger.critical("%s", error)
        return os.EX_CONFIG
    logs.set_up(settings.log_level)
    # Its INFO level logs a line for each event that a handler processed.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    logger.info("holdfast operator %s starts", __version__)
    if not _decodes_deep():
        logger.warning("one job that is nested deep ends all watches under this Python: use 3.11, or 3.13 and later")
    terms = LeaseTimings(lease_seconds=settings.lease_seconds)
    lease = ClusterLease(Cluster(api_client(retries=False), seconds=terms.call_seconds), settings.namespace)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        parts = _assembled(settings, lease, ended)
    except RotationError as error:
        logger.critical("%s", error)
        return os.EX_CONFIG
    if parts is None:
        logger.info("the operator exits as requested")
        return 0
    return _serve(parts, ended)


def _serve(parts: Components, ended: threading.Event) -> int:
    from holdfast_operator.cluster import watches

    process = Process(parts, _begin_anew, ended)
    try:
        if process.start() and not ended.is_set():
            watches.serve(parts.feed, parts.settings.watch_namespaces, ended)
    except Exception:
        logger.exception("the operator ends: it cannot watch the cluster")
        return 1
    finally:
        process.stop()
    logger.info("the operator exits as requested")
    return 0
