"""One tenant against the others: the memberships of another job, and the operator's memory.

`agents`: the time until a job's membership is served while the pods of another job attack. The operator's agents' API
runs over TLS on loopback in a separate process, and so does the tenant: eight pods of one job send the largest and
most expensive reports at the accepted rate, and hold silent connections. Quiet and attacked turns alternate within
one run. On a machine with few cores the tenant's own work slows the server as well, which no limit prevents, so the
figures are upper bounds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _bench as bench
import yaml
from _fleet.process import Operator
from _fleet.standin import NUMBER, StandIn

from holdfast_operator.agents.certificate_authority import Periods, issue, new_authority
from holdfast_operator.agents.limits import Limits
from holdfast_operator.agents.server import AgentServer
from holdfast_operator.cluster.agent_hub import AgentHub, PodIdentity
from holdfast_operator.cluster.trimming import SPEC_BYTES, slim_job

HOSTILE = 8
OTHERS = 20
SILENT = 200
POLL_SECONDS = 0.01
PATIENCE = 60.0
GOLDEN = bench.ROOT / "tests" / "contract"
JOB_BYTES = 1_400_000  # etcd takes 1.5 MiB with what the API server adds
JOB_DEPTH = 9_000  # it takes 10,000 levels with those around
FLAGS = {"--agents": "only the agents' API", "--jobs": "only the memory that jobs take"}
_SPAWN = multiprocessing.get_context("spawn")


def identify(token: str) -> PodIdentity:
    """Return the pod of a token, which is the pod's UID."""
    namespace = token.partition("-")[0]
    return PodIdentity(namespace=namespace, pod=token, pod_uid=token)


def serve(folder: Path, ready: Connection) -> None:
    """Serve the agents' API until the pipe is closed."""
    hub = AgentHub(identify, lambda _job: None, recall=identify)
    for number in range(HOSTILE):
        hub.bind(f"hostile-{number}", "hostile")
    for number in range(OTHERS):
        hub.bind(f"other-{number}", "other")
    hub.publish("other", json.loads((GOLDEN / "membership.json").read_text()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    server = AgentServer(hub, context, host="127.0.0.1", port=0, limits=Limits())
    server.start()
    ready.send(server.port)
    with contextlib.suppress(EOFError):
        ready.recv()
    server.stop()


def report(uid: str) -> bytes:
    """Return the largest accepted report, with texts that are expensive to check."""
    body: dict[str, Any] = json.loads((GOLDEN / "report.json").read_text())
    body["pod"]["uid"] = body["launcher"]["podUID"] = uid
    text = "token-x " * 128
    body["gpu"] = [{"gpu": f"GPU-{n}", "kind": "Xid", "xid": n, "message": text} for n in range(64)]
    body["launcher"]["incidents"] = [
        {"generation": n, "attempt": 0, "message": text, "cause": "Failure"} for n in range(1, 33)
    ]
    room = Limits().body_bytes - len(json.dumps(body)) - 1024
    body["launcher"]["ranks"] = [{} for _ in range(room // 4)]
    return json.dumps(body).encode()


def attack(folder: Path, port: int, begun: Connection) -> None:
    """Run the attack of the tenant's pods until the pipe is closed."""
    over = threading.Event()
    pods = [
        threading.Thread(target=_repeat, args=(over, _sender(folder, port, f"hostile-{n}"))) for n in range(HOSTILE)
    ]
    held: list[ssl.SSLSocket | None] = []
    pods.append(threading.Thread(target=_repeat, args=(over, lambda: _hold(folder, port, held))))
    for thread in pods:
        thread.start()
    time.sleep(1.0)
    begun.send(None)
    with contextlib.suppress(EOFError):
        begun.recv()
    over.set()
    for thread in pods:
        thread.join()


def _repeat(over: threading.Event, once: Callable[[], None]) -> None:
    while not over.wait(0.05):
        with contextlib.suppress(OSError, http.client.HTTPException):
            once()


def _sender(folder: Path, port: int, uid: str) -> Callable[[], None]:
    connection, raw = connect(folder, port), report(uid)

    def send() -> None:
        try:
            connection.request("POST", "/v1/report", body=raw, headers={"Authorization": f"Bearer {uid}"})
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()
            raise

    return send


def _hold(folder: Path, port: int, held: list[ssl.SSLSocket | None]) -> None:
    connection = connect(folder, port)
    connection.connect()
    held.append(connection.sock)
    del held[:-SILENT]


def connect(folder: Path, port: int) -> http.client.HTTPSConnection:
    """Return a connection that trusts the benchmark's own CA."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=context)


@contextlib.contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Start a separate process, and yield its first message."""
    here, there = _SPAWN.Pipe()
    child = _SPAWN.Process(target=target, args=(*arguments, there), daemon=True)
    child.start()
    there.close()
    try:
        if not here.poll(PATIENCE):
            raise SystemExit(f"{target.__name__} never began")
        yield here.recv()
    finally:
        here.close()
        child.join(PATIENCE)
        child.kill()


def polls(folder: Path, port: int, count: int) -> list[float]:
    """Return the seconds of each membership request, one after the other, for many pods of another job."""
    pods = [connect(folder, port) for _ in range(OTHERS)]
    took = []
    for number in range(count):
        time.sleep(POLL_SECONDS)
        uid = number % OTHERS
        started = time.monotonic()
        pods[uid].request("GET", "/v1/membership?after=0", headers={"Authorization": f"Bearer other-{uid}"})
        answer = pods[uid].getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"a membership was answered with {answer.status}")
        if number >= OTHERS:  # the first poll of each pod includes the handshake
            took.append(time.monotonic() - started)
    for connection in pods:
        connection.close()
    return took


def certificates(folder: Path) -> None:
    """Write `ca.crt` and `server.pem` for loopback."""
    now = datetime.now(UTC)
    authority = new_authority(now, Periods())
    pair = issue(authority, ["127.0.0.1"], now, timedelta(days=1))
    (folder / "ca.crt").write_bytes(authority.certificate)
    (folder / "server.pem").write_bytes(pair.key + pair.certificate)


def texts(count: int) -> str:
    """Return texts that are all different, within a job and among jobs."""
    return json.dumps([f"{NUMBER.decode()}{n:05d}" for n in range(count)])


def as_many_as_are_read() -> str:
    """Return the largest spec that is kept."""
    least, most = 1, SPEC_BYTES // 32
    while most - least > 1:
        middle = (least + most) // 2
        body = {"metadata": {"name": "j"}, "spec": json.loads(spec(texts(middle)))}
        least, most = (middle, most) if "spec" in slim_job(body) else (least, middle)
    return texts(least)


# Arguments of the container.
SHAPES: dict[str, Callable[[], str]] = {
    "as many texts as are read": as_many_as_are_read,
    "one text": lambda: json.dumps(["x" * JOB_BYTES]),
    "short texts": lambda: texts(JOB_BYTES // 12),
    # The content that takes the most memory for its length.
    "empty objects": lambda: json.dumps([{}] * (JOB_BYTES // 4)),
    "nested lists": lambda: "[" * JOB_DEPTH + "]" * JOB_DEPTH,
}


def spec(arguments: str) -> bytes:
    """Return the spec of a suspended job."""
    trainer = {"name": "trainer", "image": "train:1", "command": ["holdfast", "run"], "args": "ARGUMENTS"}
    workers = {"replicas": 1, "template": {"spec": {"containers": [trainer]}}}
    return json.dumps({"suspend": True, "workers": workers}).replace('"ARGUMENTS"', arguments).encode()


def hold(shape: str, count: int, ready: Connection) -> None:
    """Serve the substitute API server until the pipe is closed."""
    ready.send(StandIn(count, spec(SHAPES[shape]())).serve())
    with contextlib.suppress(EOFError):
        ready.recv()


def kubeconfig(folder: Path, port: int) -> Path:
    """Write a kubeconfig of the substitute API server."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def limit_mib() -> int:
    """Return the operator's memory limit in the chart."""
    values = yaml.safe_load((bench.ROOT / "charts" / "holdfast" / "values.yaml").read_text())
    return int(values["resources"]["limits"]["memory"].removesuffix("Mi"))


def jobs_rows(count: int, settle_seconds: float) -> list[bench.Measurement]:
    """Return the rows of the operator's memory, for each shape of jobs."""
    bench.OUT.mkdir(parents=True, exist_ok=True)
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name, process(hold, shape, count) as port:
            operator = Operator(kubeconfig(Path(name), port), bench.OUT, "operator-tenants")
            operator.start()
            try:
                operator.until(lambda: operator.converged(count), f"{count} jobs were gone over")  # noqa: B023
                time.sleep(settle_seconds)
                operator.check()
                what, target = f"{count} jobs of {shape}: the operator's memory", f"<= {limit_mib()}"
                peak, now = operator.memory("VmHWM"), operator.memory()
            finally:
                operator.end()
            rows.append(bench.measured("tenants-2", f"{what}, at most", [peak], "MiB", target=target))
            rows.append(bench.measured("tenants-2", f"{what}, at rest", [now], "MiB"))
    return rows


def agents_rows(rounds: int, count: int) -> list[bench.Measurement]:
    """Measure quiet and attacked turns alternately."""
    quiet: list[float] = []
    attacked: list[float] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        certificates(folder)
        with process(serve, folder) as port:
            for _ in range(rounds):
                quiet.append(bench.quantile(polls(folder, port, count), 0.99))
                with process(attack, folder, port):
                    attacked.append(bench.quantile(polls(folder, port, count), 0.99))
    return [
        bench.measured("tenants-1", "another job's membership, p99, quiet", quiet, "s"),
        bench.measured(
            "tenants-1",
            "another job's membership, p99, attacked",
            attacked,
            "s",
            target="<= 0.1",
            limit=bench.median(quiet),
        ),
        bench.measured("tenants-1", "p99 attacked over p99 quiet", bench.ratios(attacked, quiet), "x", limit=1.0),
    ]


def main() -> int:
    """Run both parts, or the requested one."""
    effort = bench.arguments("One tenant against all", FLAGS)
    both = not FLAGS.keys() & effort.flags
    rows: list[bench.Measurement] = []
    if both or "--agents" in effort.flags:
        count = effort.pick(quick=100, default=500, full=1000) + OTHERS
        rows += agents_rows(effort.pick(quick=1, default=5, full=50), count)
    if both or "--jobs" in effort.flags:
        rows += jobs_rows(effort.pick(quick=100, default=1000, full=1000), effort.pick(quick=2, default=70, full=200))
    return bench.finish("tenants", rows, effort)


if __name__ == "__main__":
    sys.exit(main())
