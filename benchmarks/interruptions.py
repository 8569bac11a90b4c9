"""A cloud's notice for a worker's node: the time to its touch file, and whether it ends in an agreed checkpoint.

Three real pods train on the testbed's real nodes. Each node has its cloud's metadata service at the real address.
There are four nodes, so with a free one, as an autoscaler provides it, each worker has its own node. A notice is
announced at a random time for the node of one worker. After that worker has left, the machine is replaced by one of
the cloud that lacks most trials, with the same name.

Bar sidecar-1 requires that:
- the launcher acknowledged a checkpoint of all three ranks before the cloud's deadline
- no step of that world came after it
- the worker exited with 75
- three workers train again
- the job counted one incident, an Interruption

The trials do not wait for standby processes: the leaving worker needs none, and the others keep theirs. Ctrl-C ends
the run with the table of the measurements; with `--full` the next run continues from there.
"""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import _bench as bench

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.drill import script_log
from holdfast_testbed.drill.departure import COMMITTED, Departure, Witness, complaints
from holdfast_testbed.drill.faults import DrillJob, workers_away_from_operator
from holdfast_testbed.drill.install import DRILL_JOB, apply_drill_job, install_chart
from holdfast_testbed.drill.job_view import AttemptId
from holdfast_testbed.drill.matrix import Case
from holdfast_testbed.drill.trial import WORKERS, Trial, run, settle
from holdfast_testbed.drill.watcher import PodView, Watcher
from holdfast_testbed.fakes.metadata import AWS, AZURE, CLOUDS, GCP, NOTICE_SECONDS, Announcement

NAME = "interruptions"
NODES = WORKERS + 1
POLL_SECONDS = 2.0
LEAVES_WITHIN = 60.0
WHAT = {AWS: "AWS spot interruption", GCP: "GCP preemption", AZURE: "Azure Scheduled Event"}
TOUCH, COMMIT, AGREED, COUNTED, LOST = "touch", "commit", "agreed", "counted", "lost"
BESIDES = "besides"


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of one notice."""

    trial: Trial
    departure: Departure | None
    told: int = 0
    """Lost steps, as the job reports them."""
    complaints: tuple[str, ...] = ()

    def figures(self) -> dict[str, float]:
        """Return the figures to keep. A missing event counts as later than any limit."""
        seen = self.departure
        committed = seen is not None and seen.result == COMMITTED
        whole = self.trial.resumed is not None and self.trial.equal and not self.trial.wrong
        return {
            TOUCH: math.inf if seen is None or seen.touched is None else max(0.0, seen.touched - seen.noticed),
            COMMIT: seen.answered - seen.noticed if committed and seen and seen.answered else math.inf,
            AGREED: float(whole and not self.complaints and not self.trial.complaint),
            COUNTED: float(dict(self.trial.counted) == {"Interruption": 1}),
            LOST: float(max(self.trial.lost, self.told)),
        }


class Book:
    """Figures by cloud, kept across runs with `--full`."""

    def __init__(self, effort: bench.Effort) -> None:
        self._trials = bench.Trials(NAME, effort)
        each, more = divmod(effort.pick(quick=3, default=9, full=100), len(CLOUDS))
        self._wanted = {cloud: each + (place < more) for place, cloud in enumerate(CLOUDS)}

    def keep(self, cloud: str, figures: Mapping[str, float]) -> None:
        """Add a trial."""
        for name, value in figures.items():
            self._trials.keep(f"{cloud} {name}", value)

    def keep_besides(self, incidents: int) -> None:
        """Add the number of incidents between two trials."""
        self._trials.keep(BESIDES, incidents)

    @property
    def besides(self) -> list[float]:
        """The incidents between trials, of all trials."""
        return self._trials.values(BESIDES)

    def of(self, cloud: str, name: str) -> list[float]:
        """Return one figure of all trials of a cloud."""
        return self._trials.values(f"{cloud} {name}")

    def all(self, name: str) -> list[float]:
        """Return one figure of all trials of all clouds."""
        return [value for cloud in CLOUDS for value in self.of(cloud, name)]

    def lacks(self, cloud: str) -> int:
        """Return how many trials are missing."""
        return self._wanted[cloud] - len(self.of(cloud, LOST))

    def complete(self) -> bool:
        """Whether each cloud has the requested number of trials."""
        return all(self.lacks(cloud) <= 0 for cloud in CLOUDS)


@contextmanager
def stage() -> Iterator[DrillJob]:
    """Start a job of three workers that train, on nodes of all clouds."""
    cluster = Cluster.up(name=NAME, nodes=NODES, replace=True)
    try:
        for number in range(1, NODES + 1):  # before the job: a sidecar probes a missing cloud only once per minute
            cluster.clear_notice(number, cloud=CLOUDS[number % len(CLOUDS)])
        install_chart(cluster)
        cluster.prepare_namespace(NAME)
        apply_drill_job(cluster, NAME)
        with Watcher(cluster, NAME, DRILL_JOB) as watcher:
            yield DrillJob(cluster=cluster, watcher=watcher, say=say)
    finally:
        cluster.down()


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S', time.gmtime())}  {text}", file=sys.stderr, flush=True)


def announced(where: DrillJob, node: int) -> Announcement:
    return Announcement.read(where.cluster.node(node).files.announcement)


def cloud_of(where: DrillJob, pod: PodView) -> str:
    return announced(where, where.node_number(pod)).cloud


def choose(where: DrillJob, book: Book) -> PodView:
    """Return a worker alone on its node and away from the leading operator, of the cloud that lacks most trials."""
    nodes = [worker.node for worker in where.workers()]
    alone = [pod for pod in workers_away_from_operator(where) if nodes.count(pod.node) == 1]
    if not alone:
        raise SystemExit(f"no worker is alone on its node, away from the operator: {nodes}")
    random.shuffle(alone)
    return max(alone, key=lambda pod: book.lacks(cloud_of(where, pod)))


def next_cloud(where: DrillJob, book: Book, node: int) -> str:
    """Return the cloud of the next machine: it lacks most trials, less those that other nodes will provide."""
    others = [announced(where, number).cloud for number in range(1, NODES + 1) if number != node]
    return max(CLOUDS, key=lambda cloud: book.lacks(cloud) - others.count(cloud))


class Notice:
    """One notice, from its announcement until its machine was replaced."""

    def __init__(self, pod: PodView, cloud: str, book: Book) -> None:
        self.cloud, self.departure = cloud, None
        self.world = AttemptId(generation=0, attempt=0)
        self._pod, self._book = pod, book
        self._witness: Witness | None = None
        self.departure: Departure | None

    def case(self) -> Case:
        return Case(
            name=self.cloud,
            fault=f"{WHAT[self.cloud]} for {self._pod.node} of {self._pod.name}",
            inflict=self.announce,
            cause="Interruption",
            repair=self.reclaim,
        )

    def announce(self, where: DrillJob) -> None:
        self.world = script_log.newest_attempt(script_log.read(where.checkpoints))
        self._witness = Witness(where, self._pod, self.world)
        time.sleep(random.uniform(0.0, POLL_SECONDS))  # noqa: S311 - at any moment between two polls
        where.strike()
        where.cluster.notice(where.node_number(self._pod), cloud=self.cloud)

    def reclaim(self, where: DrillJob) -> None:
        """Do what the cloud does after its notice, but not before the worker has left."""
        number, noticed = where.node_number(self._pod), where.struck[-1]
        if self._witness is not None:
            deadline = noticed + NOTICE_SECONDS[self.cloud]
            self.departure = self._witness.tell(noticed=noticed, deadline=deadline, patience=LEAVES_WITHIN)
            if self.departure.result != COMMITTED:
                print(story(where), file=sys.stderr)  # the worker's log is deleted with its node
        node = where.cluster.node(number)
        node.kill()
        where.cluster.clear_notice(number, cloud=next_cloud(where, self._book, number))
        node.start()


def one(where: DrillJob, book: Book) -> Found:
    """Return the result of one notice."""
    pod = choose(where, book)
    notice = Notice(pod, cloud_of(where, pod), book)
    case, known = notice.case(), {incident.attempt_id for incident in where.watcher.view.incidents}
    say(case.fault)
    try:
        trial = run(case, where, warm=False)
    except TimeoutError as error:
        trial = Trial(case=case.name, resumed=None, complaint=str(error))
    new = [incident for incident in where.watcher.view.incidents if incident.attempt_id not in known]
    why = ("no notice was made",)
    if notice.departure is not None:
        why = complaints(notice.departure, notice.world, WORKERS, script_log.read(where.checkpoints))
    told = sum(incident.lost_steps or 0 for incident in new)
    found = Found(trial=trial, departure=notice.departure, told=told, complaints=why)
    report(found)
    book.keep(notice.cloud, found.figures())
    return found


def report(found: Found) -> None:
    """Print the result, with all details if a promise was not kept."""
    figures = found.figures()
    say("  " + ", ".join(f"{name} {bench.number(value)}" for name, value in figures.items()))
    if not (figures[AGREED] and figures[COUNTED] and not figures[LOST]):
        say(f"  NOT AS PROMISED: {found.complaints} {found.departure} {json.dumps(found.trial.to_json())}")


def story(where: DrillJob) -> str:
    """Return the details for debugging."""
    names = ("-n", where.watcher.namespace)
    ask = (
        (*names, "describe", "ftj"),
        (*names, "get", "pods", "-o", "wide"),
        ("get", "nodes"),
        (*names, "logs", "-l", "holdfast.dev/job-name", "-c", "trainer", "--prefix", "--tail=60"),
    )
    return "\n".join(where.cluster.kubectl(*words, check=False) for words in ask)


def measure(book: Book) -> None:
    """Measure until each cloud has its trials, or until a job no longer trains."""
    with stage() as where:
        counted = 0
        while not book.complete():
            where.cluster.wait_for_nodes()
            settle(where, warm=False)
            book.keep_besides(sum(where.watcher.view.incidents_by_cause.values()) - counted)
            found = one(where, book)
            counted = sum(where.watcher.view.incidents_by_cause.values())
            if found.trial.resumed is None or found.trial.complaint:
                print(story(where), file=sys.stderr)
                return


def rows(book: Book) -> list[bench.Measurement]:
    """Return the rows of the measurements."""
    limit = f"<= {POLL_SECONDS + 0.2}"
    made = []
    for cloud, what in WHAT.items():
        if own := book.of(cloud, TOUCH):
            said = f"{what} → touch-file, p99 (poll {POLL_SECONDS:.0f} s)"
            made.append(bench.measured("sidecar-1", said, own, "s", target=limit, at=0.99))
    for cloud, what in WHAT.items():
        if own := book.of(cloud, COMMIT):
            made.append(bench.measured("sidecar-1", f"{what} → agreed checkpoint", own, "s"))
    if book.all(LOST):
        made += [
            share("ended in an agreed checkpoint, before the deadline", book.all(AGREED)),
            share("counted once, as Interruption, and nothing else", book.all(COUNTED)),
            bench.measured(
                "sidecar-1",
                "counted besides, as one machine went and another came",
                book.besides,
                "",
                target="<= 0",
                at=1.0,
            ),
            bench.measured(
                "sidecar-1", "completed steps lost, the maximum", book.all(LOST), "", target="<= 0", at=1.0
            ),
        ]
    return made


def share(what: str, values: list[float]) -> bench.Measurement:
    """Return the row of a share."""
    made = bench.measured("sidecar-1", what, [sum(values)], f"of {len(values)}", target=f">= {len(values)}")
    return replace(made, n=len(values))


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    effort = bench.arguments(__doc__ or "")
    book = Book(effort)
    if not book.complete():
        with suppress(KeyboardInterrupt):
            measure(book)
    return bench.finish(NAME, rows(book), effort)


if __name__ == "__main__":
    sys.exit(main())
