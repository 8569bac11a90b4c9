"""The watches end when they are told to, whenever that is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kopf
import pytest
import yaml

from holdfast_operator.cluster import watches

# As ``process`` does: told to end before kopf hears signals itself.
TOLD_EARLY = """
import signal, threading
from holdfast_operator.cluster import watches as handlers
from holdfast_operator.cluster.cache import Cache
from holdfast_operator.cluster.informer import Feed
from holdfast_operator.runtime.workqueue import KeyedQueue

ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
signal.raise_signal(signal.SIGTERM)
handlers.serve(Feed(Cache(), KeyedQueue()), (), ended)
print("ended")
"""


# Three pages of pods; what is asked of it, and how many came and were copied, is told when all have come.
LISTED = """
import copy, json, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from holdfast_operator.api import names as c
from holdfast_operator.cluster import watches as handlers
from holdfast_operator.cluster.client import JOBS_PAGE, PAGE

PODS, ended, asked, came, told = 2 * PAGE + 1, threading.Event(), [], set(), []
VERBS = ["get", "list", "watch"]
VERSION = {"version": c.API_VERSION}

def kind(plural, name, namespaced):
    return {"name": plural, "kind": name, "singularName": name.lower(), "namespaced": namespaced, "verbs": VERBS}

PAGES = {
    "/version": {"major": "1"},
    "/api": {"versions": ["v1"]},
    "/apis": {"groups": [{"name": c.GROUP, "versions": [VERSION], "preferredVersion": VERSION}]},
    "/api/v1": {
        "resources": [kind("pods", "Pod", True), kind("nodes", "Node", False), kind("namespaces", "Namespace", False)]
    },
    f"/apis/{c.GROUP}/{c.API_VERSION}": {"resources": [kind(c.PLURAL, c.KIND, True)]},
}

def pod(number):
    labels = {c.LABEL_APP_MANAGED_BY: c.MANAGED_BY}
    meta = {"name": f"w{number}", "namespace": "ml", "uid": f"uid-{number}", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {}}

class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if query.get("watch"):
            ended.wait()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(PAGES.get(url.path) or self.listed(url.path, query)).encode())

    def listed(self, path, query):
        asked.append((path.rpartition("/")[2], int(query.get("limit", 0))))
        if not path.endswith("/pods"):
            return {"metadata": {"resourceVersion": "1"}, "items": []}
        first = int(query.get("continue", 0))
        while first == 2 * PAGE and len(asked) < 5:  # the last pod ends all, also lists that are not asked for yet
            time.sleep(0.01)
        last = min(PODS, first + (asked[-1][1] or PODS))
        items = [pod(number) for number in range(first, last)]
        return {"metadata": {"resourceVersion": "1", "continue": str(last) if last < PODS else ""}, "items": items}

    def log_message(self, *_):
        pass

class Feed:
    def pod(self, _kind, body):
        came.add(body["metadata"]["uid"])
        if len(came) == PODS:
            ended.set()
            signal.raise_signal(signal.SIGTERM)
            told.append(time.monotonic())

copies, deepcopy = [], copy.deepcopy

def counted(value, memo=None):
    if isinstance(value, dict) and value.get("kind") == "Pod":
        copies.append(value)
    return deepcopy(value, memo)

copy.deepcopy = counted

import os, signal
from pathlib import Path
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
config = Path(os.environ["KUBECONFIG"])
config.write_text(config.read_text().replace("127.0.0.1:1", f"127.0.0.1:{server.server_port}"))
handlers.serve(Feed(), (), ended)
wanted = [(c.PLURAL, JOBS_PAGE), ("nodes", PAGE), *[("pods", PAGE)] * 3]
print(len(came) == PODS, sorted(asked) == wanted, len(copies), time.monotonic() - told[0] < 5)
"""


# The watch of pods is cancelled, as no fault of the API server does it.
CANCELLED = (
    LISTED.replace("PODS, ended", "handlers._WATCH_CHECK_SECONDS = 0.1\nPODS, ended")
    .replace(
        """            ended.set()
            signal.raise_signal(signal.SIGTERM)
            told.append(time.monotonic())
""",
        """            for task in asyncio.all_tasks():
                if task.get_name().startswith("watcher for pods"):
                    asyncio.get_running_loop().call_later(0.5, task.cancel)
""",
    )
    .replace("import copy, json", "import asyncio, copy, json")
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process whose API server is away."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    return {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}


def test_a_signal_that_came_before_the_watches_began_ends_them(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOLD_EARLY], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-2000:]


def test_large_cluster_is_listed_in_pages_until_a_signal(environment: dict[str, str]) -> None:
    """Pages of jobs are small, kopf copies no object, and after the signal it waits for no task that hangs."""
    done = subprocess.run(
        [sys.executable, "-c", LISTED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True True 0 True\n"), done.stderr[-2000:]


def test_a_watch_that_ends_for_good_ends_the_operator(environment: dict[str, str]) -> None:
    """Else it would learn of a lost worker only by the next full list."""
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "WatchEndedError: the watcher for pods.v1" in done.stderr


def test_what_came_is_let_go_soon_after_it_was_taken() -> None:
    settings = kopf.OperatorSettings()
    before = settings.queueing.idle_timeout
    watches.configure(settings)
    assert 0 < settings.queueing.idle_timeout <= before / 10


def test_peering_of_another_kopf_operator_is_ignored() -> None:
    settings = kopf.OperatorSettings()
    watches.configure(settings)
    assert settings.peering.standalone
