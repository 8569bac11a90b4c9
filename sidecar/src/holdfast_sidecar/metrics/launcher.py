"""The launcher's `status.json` as metrics. A field that is absent or malformed has no sample."""

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast_sidecar.metrics import accounting
from holdfast_sidecar.metrics.families import entries, gauge, gauges, label, number, state_set, timestamp
from holdfast_sidecar.protocol.document import Document
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus

PHASES: Final = ("Starting", "Waiting", "AwaitingFence", "Forming", "Running", "Draining", "Complete", "Failed")
"""The launcher's phases, in the order of its life."""
# The cause of failures that a launcher reports without causes.
_UNKNOWN_CAUSE: Final = "Unknown"


def liveness(current: LauncherStatus, reported_at: float) -> Iterator[Metric]:
    """Yield when the launcher last wrote its status (Unix time), and whether it is silent."""
    text = "Unix time at which the launcher last wrote its status"
    yield gauge("holdfast_launcher_last_status_timestamp_seconds", text, round(reported_at, 2))
    text = "1 if the launcher wrote a status before and has stopped, otherwise 0"
    yield gauge("holdfast_launcher_silent", text, float(current.silent))


def metrics(status: Document) -> Iterator[Metric]:
    """Yield all families of one status."""
    yield from _training(status)
    yield from gauges(
        {"holdfast_warm_processes": ("Processes on standby for a lost rank", status.get("warmProcesses"))}
    )
    yield from _paces(status.get("ranks"))
    yield from _phase(status.get("phase"))
    yield from _world(status.get("world"))
    yield from _checkpoints(status.get("checkpoints"))
    yield from _failing_checkpoints(status.get("checkpointsFailing"))
    yield from _failed_checkpoints(status.get("checkpointFailures"), status.get("checkpointFailureCauses"))
    yield from _written(status.get("checkpointWrites"))
    yield from _restores(status)
    yield from _uploads(status.get("uploads"))
    yield from _divergences(status.get("divergences"))
    yield from _non_finite(status.get("nonFinite"))
    skipped = "Samples skipped because they could not be read"
    yield from _counter("holdfast_training_bad_samples", skipped, status.get("badSamples"))
    repeated = "Steps repeated because a rank of this pod was out of GPU memory"
    yield from _counter("holdfast_training_out_of_memory", repeated, status.get("outOfMemory"))
    refused = "Connections rejected because the peer did not prove that it has the job's key"
    yield from _counter("holdfast_refused_peers", refused, status.get("refusedPeers"))
    yield from accounting.metrics(status.get("accounting"))


def _training(status: Document) -> Iterator[Metric]:
    """Yield what the script's loop reports."""
    steps = [step for rank in _objects(status.get("ranks")) if (step := number(rank.get("step"))) is not None]
    yield from gauges(
        {
            "holdfast_training_step": ("Highest step of a rank process in this pod", max(steps, default=None)),
            "holdfast_training_completed_step": ("Last completed step", status.get("committedStep")),
            "holdfast_training_completed_step_timestamp_seconds": (
                "Unix time of the last completed step",
                timestamp(status.get("committedAt")),
            ),
            "holdfast_training_loss": ("Loss of the last completed step", status.get("loss")),
            "holdfast_training_gradient_norm": (
                "Norm of the last completed step's gradients before clipping",
                status.get("gradientNorm"),
            ),
            "holdfast_training_samples_per_second": ("Samples per second, smoothed", status.get("throughput")),
            "holdfast_training_step_seconds": ("Duration of a step, smoothed", status.get("stepSeconds")),
        }
    )


def _divergences(divergences: object) -> Iterator[Metric]:
    """Yield how often a rank differed, by outcome."""
    if not isinstance(divergences, Mapping):
        return
    count, repaired = number(divergences.get("count")), number(divergences.get("repaired"))
    if count is not None and repaired is not None:
        text = "Times that a rank of this pod differed from other replicas, by whether it received their state"
        family = CounterMetricFamily("holdfast_training_replica_divergences", text, labels=["repaired"])
        family.add_metric(["true"], repaired)
        family.add_metric(["false"], count - repaired)
        yield family


_NON_FINITE: Final = {
    "skippedSteps": ("holdfast_training_skipped_steps", "Steps skipped because numbers were not finite, or a spike"),
    "learningRateChanges": (
        "holdfast_training_learning_rate_changes",
        "Times that the guards lowered the learning rate",
    ),
    "rollBacks": ("holdfast_training_roll_backs", "Roll-backs because numbers were not finite, or a spike"),
    "spikes": ("holdfast_training_spikes", "Steps with a loss or a gradient norm far above the usual ones"),
    "skippedSamples": ("holdfast_training_skipped_samples", "Samples that roll-backs excluded"),
}


def _non_finite(counters: object) -> Iterator[Metric]:
    """Yield the responses to steps whose numbers were not finite, or spikes."""
    if isinstance(counters, Mapping):
        for field, (name, text) in _NON_FINITE.items():
            yield from _counter(name, text, counters.get(field))


_PACES: Final = {"dataSeconds": "data", "computeSeconds": "compute"}


def _paces(ranks: object) -> Iterator[Metric]:
    """Yield each rank's own time per step."""
    text = "Seconds per step that the rank uses itself (median), without waiting for other ranks"
    family = GaugeMetricFamily("holdfast_rank_step_seconds", text, labels=["rank", "activity"])
    for rank in _objects(ranks):
        for field, activity in _PACES.items():
            if (seconds := number(rank.get(field))) is not None:
                family.add_metric([label(rank.get("rank")), activity], seconds)
    yield family


def _objects(values: object) -> list[Mapping[str, object]]:
    return [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []


def _phase(phase: object) -> Iterator[Metric]:
    if isinstance(phase, str):
        family = GaugeMetricFamily(
            "holdfast_launcher_phase", "1 for the current phase, otherwise 0", labels=["phase"]
        )
        state_set(family, [], PHASES, [label(phase)])
        yield family


def _world(world: object) -> Iterator[Metric]:
    """Yield the world's gauges. There is none while no world runs."""
    if not isinstance(world, Mapping):
        return
    members = world.get("members")
    yield from gauges(
        {
            "holdfast_world_generation": ("Generation of the current world", world.get("generation")),
            "holdfast_world_attempt": ("Attempt of the current world", world.get("attempt")),
            "holdfast_world_workers": (
                "Workers in the current world",
                len(members) if isinstance(members, list) else 0,
            ),
        }
    )


def _checkpoints(checkpoints: object) -> Iterator[Metric]:
    step = GaugeMetricFamily("holdfast_checkpoint_step", "Step of the newest checkpoint, by tier", labels=["tier"])
    text = "Unix time of the newest checkpoint, by tier"
    time = GaugeMetricFamily("holdfast_checkpoint_timestamp_seconds", text, labels=["tier"])
    for tier, checkpoint in entries(checkpoints):
        if not isinstance(checkpoint, Mapping):
            continue
        if (of := number(checkpoint.get("step"))) is not None:
            step.add_metric([label(tier)], of)
        if (at := timestamp(checkpoint.get("time"))) is not None:
            time.add_metric([label(tier)], at)
    yield step
    yield time


def _failing_checkpoints(tiers: object) -> Iterator[Metric]:
    """Yield the tiers on which the last checkpoint failed."""
    text = "Unix time of the first of the consecutive failed checkpoints, by tier and last cause"
    name = "holdfast_checkpoint_failing_since_timestamp_seconds"
    family = GaugeMetricFamily(name, text, labels=["tier", "cause"])
    for tier, failing in entries(tiers):
        if isinstance(failing, Mapping) and (since := timestamp(failing.get("since"))) is not None:
            family.add_metric([label(tier), label(failing.get("cause"))], since)
    yield family


def _failed_checkpoints(failures: object, by_cause: object) -> Iterator[Metric]:
    """Yield checkpoints that failed on any rank of this launcher."""
    if not isinstance(failures, Mapping):
        return
    text = "Failed checkpoints, by tier and cause"
    family = CounterMetricFamily("holdfast_checkpoint_failures", text, labels=["tier", "cause"])
    for tier, total in failures.items():
        if number(total) is None:
            continue
        causes = by_cause.get(tier) if isinstance(by_cause, Mapping) else None
        for cause, value in entries(causes if isinstance(causes, Mapping) else {_UNKNOWN_CAUSE: total}):
            if (count := number(value)) is not None:
                family.add_metric([label(tier), label(cause)], count)
    yield family


_WRITES: Final = {
    "commits": ("holdfast_checkpoint_writes", "Completed checkpoints, by tier"),
    "bytes": ("holdfast_checkpoint_written_bytes", "Bytes that ranks of this launcher wrote, by tier"),
    "seconds": ("holdfast_checkpoint_write_seconds", "Seconds from start to end of completed checkpoints, by tier"),
}


def _written(writes: object) -> Iterator[Metric]:
    """Yield the completed checkpoints of which ranks of this launcher wrote a part."""
    if not isinstance(writes, Mapping):
        return
    for field, (name, text) in _WRITES.items():
        family = CounterMetricFamily(name, text, labels=["tier"])
        for tier, written in writes.items():
            if isinstance(written, Mapping) and (value := number(written.get(field))) is not None:
                family.add_metric([label(tier)], value)
        yield family


def _restores(status: Document) -> Iterator[Metric]:
    restores = status.get("restores")
    if isinstance(restores, Mapping):
        family = CounterMetricFamily(
            "holdfast_restores", "Attempts that got their state, by origin", labels=["origin"]
        )
        for origin, value in restores.items():
            if (count := number(value)) is not None:
                family.add_metric([label(origin)], count)
        yield family
    text = "Checkpoints, or copies of checkpoints, that a restore skipped because they were corrupt"
    yield from _counter("holdfast_checkpoint_fallbacks", text, status.get("fallbacks"))


_UPLOADS: Final = {
    "commits": ("holdfast_uploads", "Checkpoints copied to the object store"),
    "bytes": ("holdfast_uploaded_bytes", "Bytes copied to the object store"),
    "seconds": ("holdfast_upload_seconds", "Seconds of successful uploads"),
}


def _uploads(uploads: object) -> Iterator[Metric]:
    """Yield the uploads of this launcher, if the job has an object tier."""
    if not isinstance(uploads, Mapping):
        return
    for field, (name, text) in _UPLOADS.items():
        yield from _counter(name, text, uploads.get(field))
    failures = CounterMetricFamily("holdfast_upload_failures", "Failed uploads, by cause", labels=["cause"])
    for cause, value in entries(uploads.get("failures")):
        if (count := number(value)) is not None:
            failures.add_metric([label(cause)], count)
    yield failures


def _counter(name: str, text: str, value: object) -> Iterator[Metric]:
    if (count := number(value)) is not None:
        yield CounterMetricFamily(name, text, value=count)
