"""The operator at scale (bar operator-1): a real etcd, API server, scheduler and controller manager; nodes and pods
are simulated by kwok; the operator is a separate process with the chart's rights.

`growth`: the cost of an increasing number of jobs of three pods, which run without launchers. `fleet`: 1,000 jobs of
ten pods, of which 30 jobs train. Their launchers and sidecars are simulated over the real agents' API, with a report
per second and pod. All deaths are among them, at 1 % of all the fleet's pods per minute.

Event → action is measured by the API server's audit log. It starts with the request that makes a pod Failed and ends
with the operator's request that creates its replacement. A cold start is the time from SIGKILL and a new process
until it has made a pass over every job, including pending work.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import _bench as bench
from _fleet.agents import Stage
from _fleet.api import Api
from _fleet.fleet import PODS_A_NODE, Death, Fleet, Job, add_nodes, answers, jobs_of, kwok, requests, story
from _fleet.process import Cost, Operator

from holdfast_testbed.build import bootstrap
from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.fakes import chart
from holdfast_testbed.waiting import wait_for

CRDS = bench.ROOT / "crds"
TRAINING = "training"
DYING_A_MINUTE = 0.01
SLOWEST = bench.OUT / "fleet-slowest.txt"
SIZES = (100, 300, 1000, 3000)
FLAGS = {
    "--growth": "only what jobs cost as they become more",
    "--fleet": "only the fleet whose pods die",
    "--fifth": "a fifth of the jobs, for a machine that is shared; its bars are not judged",
    "--profile": "sample the operator's threads; the samples are left in out/bench",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of a run."""

    sizes: tuple[int, ...]
    jobs: int
    pods_a_job: int
    training: int
    quiet_seconds: float
    dying_seconds: float
    deaths_a_minute: float
    judged: bool


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A control plane, with an operator that is not started yet."""

    cluster: Cluster
    operator: Operator


@dataclass(frozen=True, kw_only=True)
class Start:
    """The costs of one cold start."""

    seconds: float
    cpu: float
    peak_mib: float


def scale(effort: bench.Effort) -> Scale:
    """Return the sizes for the command line."""
    part = 5 if "--fifth" in effort.flags else 1
    jobs = effort.pick(quick=6, default=1000, full=1000) // part
    pods_a_job = effort.pick(quick=3, default=10, full=10)
    return Scale(
        sizes=(3, 6) if effort.quick else tuple(size // part for size in SIZES[: 4 if effort.full else 3]),
        jobs=jobs,
        pods_a_job=pods_a_job,
        training=effort.pick(quick=2, default=30, full=30),
        quiet_seconds=effort.pick(quick=2, default=30, full=60),
        dying_seconds=effort.pick(quick=6, default=120, full=600),
        deaths_a_minute=40 if effort.quick else jobs * pods_a_job * DYING_A_MINUTE,
        judged=part == 1 and not effort.quick,
    )


@contextmanager
def prepared(name: str, profile: bool) -> Iterator[Bench]:
    """Start the control plane with the CRD, the operator's rights, and kwok."""
    cluster = Cluster.up(name=f"bench-{name}", nodes=0, replace=True)
    operator = None
    try:
        cluster.kubectl("apply", "-f", str(CRDS))
        wait_for(lambda: established(cluster), what="the API server knows the kind", seconds=60)
        file = bench.OUT / f"operator-{name}.profile" if profile else None
        operator = Operator(chart.grant(cluster, chart.rights()), bench.OUT, f"operator-{name}", file)
        with kwok(cluster, bench.OUT / "kwok.log"):
            yield Bench(cluster=cluster, operator=operator)
    finally:
        if operator is not None:
            operator.end()
        cluster.down()


def established(cluster: Cluster) -> bool:
    """Return whether jobs can be applied."""
    path = 'jsonpath={.status.conditions[?(@.type=="Established")].status}'
    return cluster.kubectl("get", "crd", "faulttolerantjobs.holdfast.dev", "-o", path, check=False).strip() == "True"


async def cold_start(operator: Operator, jobs: int) -> Start:
    """Send SIGKILL, and measure until a new process has made a pass over all jobs."""
    operator.end()
    began = time.monotonic()
    operator.start()
    await asyncio.to_thread(operator.until, lambda: operator.converged(jobs), f"{jobs} jobs were gone over")
    return Start(
        seconds=time.monotonic() - began,
        cpu=operator.cpu_seconds(),
        peak_mib=operator.memory("VmHWM"),
    )


# Growth


async def growth(where: Bench, much: Scale) -> list[bench.Measurement]:
    """Return the rows of each size, and of the growth of each cost."""
    starts: dict[int, Start] = {0: await cold_start(where.operator, 0)}
    steady: dict[int, Cost] = {0: await asyncio.to_thread(where.operator.cost, much.quiet_seconds / 3)}
    rows = []
    async with Api(where.cluster) as api:
        await add_nodes(api, 1 + 6 * max(much.sizes) // PODS_A_NODE)
        fleet = Fleet(api=api, check=where.operator.check)
        for size in much.sizes:
            what = f"{size} jobs × 3 pods"
            took = await fleet.grow(jobs_of(len(fleet.jobs), size - len(fleet.jobs), 3))
            rows.append(bench.measured("operator-1", f"{what}: last ones applied → all pods run", [took], "s"))
            await fleet.told("NoLauncherDetected")
            starts[size] = await cold_start(where.operator, size)
            await asyncio.sleep(much.quiet_seconds / 6)
            steady[size] = await asyncio.to_thread(where.operator.cost, much.quiet_seconds / 2)
            rows += of_size(what, starts[size], steady[size])
    return [*rows, *fits(starts, steady)]


def of_size(what: str, start: Start, cost: Cost) -> list[bench.Measurement]:
    """Return the rows of one size."""
    return [
        bench.measured("operator-1", f"{what}: cold start to converged", [start.seconds], "s"),
        bench.measured("operator-1", f"{what}: CPU of the cold start", [start.cpu], "s"),
        bench.measured("operator-1", f"{what}: resident, steady", [cost.rss_mib], "MiB"),
        bench.measured("operator-1", f"{what}: CPU, steady", [cost.cores], "cores"),
    ]


def fits(starts: dict[int, Start], steady: dict[int, Cost]) -> list[bench.Measurement]:
    """Return a linear fit of each cost, and the exponent with which the cost beyond that of no job grows."""
    costs = {
        "CPU of the cold start, s": {size: start.cpu for size, start in starts.items()},
        "resident, steady, MiB": {size: cost.rss_mib for size, cost in steady.items()},
        "CPU, steady, cores": {size: cost.cores for size, cost in steady.items()},
    }
    rows = []
    for what, by_size in costs.items():
        at_none, slope = line(list(by_size), list(by_size.values()))
        told = f"{what} = {bench.number(at_none)} + {bench.number(slope)} × jobs: power of growth"
        rows.append(bench.measured("operator-1", told, [power(by_size)], "", target="<= 1.2"))
    return rows


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares line: value at 0, slope."""
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
    return y - slope * x, slope


def power(by_size: dict[int, float]) -> float:
    """Return the exponent of the growth beyond the cost of no job: 1 is linear, 2 quadratic."""
    points = [(math.log(n), math.log(cost - by_size[0])) for n, cost in by_size.items() if n and cost > by_size[0]]
    return line(*zip(*points, strict=True))[1] if len(points) > 1 else math.nan


# Fleet


async def fleet_rows(where: Bench, much: Scale) -> list[bench.Measurement]:
    """Create a fleet, restart the operator, measure a quiet time, and then let pods die."""
    trained = [Job(namespace=TRAINING, name=f"job-{n}", workers=much.pods_a_job) for n in range(much.training)]
    silent = jobs_of(0, much.jobs - much.training, much.pods_a_job)
    where.operator.start()
    async with Api(where.cluster) as api:
        await add_nodes(api, 1 + 2 * much.jobs * much.pods_a_job // PODS_A_NODE)
        fleet = Fleet(api=api, check=where.operator.check)
        made = await fleet.grow([*trained, *silent])
        size = await fleet.pod_bytes()
        # No pod has a launcher yet. After all jobs have this reason, a start and a quiet time include no further
        # work.
        await fleet.told("NoLauncherDetected")
        start = await cold_start(where.operator, much.jobs)
        stage = Stage(api, where.operator.agents_port, TRAINING)
        async with stage.open(trained):
            await until_all_train(stage)
            return [
                bench.measured("operator-1", f"{many(much)} applied → all pods run", [made], "s"),
                bench.measured("operator-1", "size of a pod", [size / 1024], "KB"),
                *start_rows(start, much),
                *await dying_rows(where, much, fleet, stage),
            ]


def many(much: Scale) -> str:
    """Return a description of the fleet."""
    return f"{much.jobs} jobs, {much.jobs * much.pods_a_job} pods:"


def start_rows(start: Start, much: Scale) -> list[bench.Measurement]:
    """Return the rows of the cold start of a full fleet."""
    return [
        bench.measured(
            "operator-1",
            f"{many(much)} cold start to converged",
            [start.seconds],
            "s",
            target="<= 60" if much.judged else "",
        ),
        bench.measured("operator-1", f"{many(much)} resident, at most in the cold start", [start.peak_mib], "MiB"),
    ]


async def until_all_train(stage: Stage) -> None:
    """Wait until every simulated job trains with all workers."""
    end = time.monotonic() + 120
    while not all(player.whole for player in stage.players.values()):
        if time.monotonic() > end:
            waiting = [name for name, player in stage.players.items() if not player.whole]
            raise SystemExit(f"these jobs do not train: {waiting}")
        await asyncio.sleep(0.2)


async def dying_rows(where: Bench, much: Scale, fleet: Fleet, stage: Stage) -> list[bench.Measurement]:
    """Measure a quiet time, then one in which pods die."""
    quiet_from = time.time()
    quiet = await asyncio.to_thread(where.operator.cost, much.quiet_seconds)
    dying_from = time.time()
    settled = asyncio.Event()
    (busy, deaths), healed = await asyncio.gather(_dying(where, much, fleet, stage, settled), _healed(stage, settled))
    ended = time.time()
    log = where.cluster.control_plane.audit_log
    idle, asked = requests(log, quiet_from, dying_from), requests(log, dying_from, ended)
    answered = answers(deaths, asked)
    found = [answer.seconds for answer in answered]
    slowest = sorted(answered, key=lambda answer: -answer.seconds)[: max(10, len(answered) // 20)]
    SLOWEST.write_text("\n".join(story(answer, asked) for answer in slowest) + "\n")
    rate = len(idle) / (dying_from - quiet_from)
    each = (len(asked) - rate * (ended - dying_from)) / max(1, len(deaths))
    judged = much.judged
    what = f"{many(much)} pod Failed → its replacement requested"
    return [
        bench.measured("operator-1", f"{what}, p50", found, "s", target="<= 0.2" if judged else ""),
        bench.measured("operator-1", f"{what}, p99", found, "s", at=0.99, target="<= 1" if judged else ""),
        bench.measured("operator-1", f"{many(much)} failures without an answer", [len(deaths) - len(found)], ""),
        *late_rows(stage, much),
        bench.measured("operator-1", f"{many(much)} pod Failed → all train again", healed or [math.nan], "s"),
        bench.measured("operator-1", f"{many(much)} API requests of a recovery", [each], "", target=""),
        bench.measured("operator-1", f"{many(much)} API requests a second, quiet", [rate], "1/s"),
        bench.measured("operator-1", f"{many(much)} CPU, quiet", [quiet.cores], "cores"),
        bench.measured(
            "operator-1", f"{many(much)} CPU, pods failing", [busy.cores], "cores", target="<= 1" if judged else ""
        ),
        bench.measured(
            "operator-1",
            f"{many(much)} resident, pods failing",
            [busy.rss_mib],
            "MiB",
            target="<= 400" if judged else "",
        ),
    ]


def late_rows(stage: Stage, much: Scale) -> list[bench.Measurement]:
    """Return the rows of the delay until a new pod runs, which scheduler and kwok cause."""
    what, late = f"{many(much)} new pod → running, the scheduler's and kwok's part", stage.late or [math.nan]
    return [
        bench.measured("operator-1", what, late, "s"),
        bench.measured("operator-1", f"{what}, p99", late, "s", at=0.99),
    ]


async def _dying(
    where: Bench, much: Scale, fleet: Fleet, stage: Stage, settled: asyncio.Event
) -> tuple[Cost, list[Death]]:
    deaths: list[Death] = []
    over = asyncio.Event()

    async def kill_some() -> None:
        rng = random.Random(1)  # noqa: S311 - an order, not a secret
        while not over.is_set():
            player = rng.choice([one for one in stage.players.values() if one.agents])
            uid = rng.choice(sorted(player.agents))
            pod = player.agents[uid].pod
            player.lose(uid)
            deaths.append(await fleet.kill(player.job, pod))
            await asyncio.sleep(60 / much.deaths_a_minute)

    began = time.time()
    killing = asyncio.create_task(kill_some())
    cost = await asyncio.to_thread(where.operator.cost, much.dying_seconds)
    over.set()
    await killing
    await _end_of_what_is_under_way(where, stage, deaths, began)
    settled.set()
    return cost, deaths


async def _end_of_what_is_under_way(where: Bench, stage: Stage, deaths: list[Death], began: float) -> None:
    """Wait for the pending recoveries. On a busy machine this takes longer, and ends at a time limit."""
    log, end = where.cluster.control_plane.audit_log, time.monotonic() + 120

    def answered() -> int:
        return len(answers(deaths, requests(log, began, time.time())))

    await asyncio.sleep(5)
    while time.monotonic() < end:
        whole = all(player.whole for player in stage.players.values())
        if whole and await asyncio.to_thread(answered) == len(deaths):
            return
        await asyncio.sleep(0.5)


async def _healed(stage: Stage, settled: asyncio.Event) -> list[float]:
    """Return how long each job was without one of its workers."""
    since: dict[str, float] = {}
    found = []
    while not settled.is_set():
        now = time.monotonic()
        for name, player in stage.players.items():
            if not player.whole:
                since.setdefault(name, now)
            elif name in since:
                found.append(now - since.pop(name))
        await asyncio.sleep(0.02)
    return found


def main() -> int:
    effort = bench.arguments(__doc__ or "", FLAGS)
    bench.OUT.mkdir(parents=True, exist_ok=True)
    bootstrap.set_up_cluster(("scale",))
    much, both = scale(effort), not {"--growth", "--fleet"} & effort.flags
    rows: list[bench.Measurement] = []
    if both or "--growth" in effort.flags:
        with prepared("growth", "--profile" in effort.flags) as where:
            rows += asyncio.run(growth(where, much))
    if both or "--fleet" in effort.flags:
        with prepared("fleet", "--profile" in effort.flags) as where:
            rows += asyncio.run(fleet_rows(where, much))
    return bench.finish("operator_scale", rows, effort)


if __name__ == "__main__":
    sys.exit(main())
