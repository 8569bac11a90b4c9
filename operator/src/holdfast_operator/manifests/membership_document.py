"""``membership.json``, and the settings that launchers get in it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import run_id
from holdfast_operator.api.job import Job
from holdfast_operator.api.spec.hang import HangSpec
from holdfast_operator.api.spec.recovery import Rule
from holdfast_operator.api.spec.spec import JobSpec
from holdfast_operator.api.status import Membership
from holdfast_operator.manifests.common import Manifest


def settings(spec: JobSpec) -> Manifest:
    """Return the effective settings for launchers."""
    return {
        "minReplicas": spec.min_replicas,
        "replicaStep": spec.replica_step,
        "onFailure": spec.on_failure,
        "replicas": spec.replicas,
        "processesPerWorker": spec.processes_per_worker,
        "heartbeatSeconds": c.HEARTBEAT_SECONDS,
        "deadAfterSeconds": c.DEAD_AFTER_SECONDS,
        "firstAttemptWaitSeconds": c.FIRST_ATTEMPT_WAIT_SECONDS,
        "startupDeadlineSeconds": float(spec.startup_deadline_seconds),
        "checkpoint": _checkpoint(spec),
        "budgets": [
            {
                "cause": budget.cause,
                "maxRestarts": budget.max_restarts,
                "windowSeconds": float(budget.window_seconds),
            }
            for budget in spec.budgets
        ],
        "backoff": {
            "initialSeconds": float(spec.backoff.initial_seconds),
            "maxSeconds": float(spec.backoff.max_seconds),
        },
        **rules_for_launchers(spec.rules),
        **({} if spec.hang is None else {"hangDetection": _hang(spec.hang)}),
        **({"shrinkAfterSeconds": float(spec.shrink_after_seconds)} if spec.shrink_after_seconds else {}),
    }


def _checkpoint(spec: JobSpec) -> Manifest:
    asked = spec.checkpoint
    optional = {
        "fullEvery": asked.full_every if asked.full_every > 1 else None,
        "deltaThreshold": asked.delta_threshold,
        "retention": asked.retention,
        "bytesPerSecond": asked.bytes_per_second,
    }
    return {
        "interval": asked.interval,
        "keepLast": asked.keep_last,
        **{name: value for name, value in optional.items() if value},
        "resume": asked.resume,
        "deadlineSeconds": float(spec.drain_seconds),
    }


def rules_for_launchers(rules: tuple[Rule, ...]) -> Manifest:
    """Return the leading rules that launchers can evaluate, up to the first that they cannot.

    The first match wins.
    """
    if not rules:
        return {}
    known = list(takewhile(lambda rule: rule.for_launchers, rules))
    return {"rules": [_rule(rule) for rule in known], "rulesElsewhere": len(known) < len(rules)}


def _rule(rule: Rule) -> Manifest:
    asked: Manifest = {"name": rule.name, "action": rule.action}
    if rule.cause:
        asked["cause"] = rule.cause
    if rule.exit_codes is not None:
        asked["exitCodes"] = {"operator": rule.exit_codes.operator, "values": list(rule.exit_codes.values)}
    if rule.signals:
        asked["signals"] = list(rule.signals)
    if rule.oom:
        asked["oom"] = rule.oom
    if rule.hang:
        asked["hang"] = True
    return asked


def _hang(hang: HangSpec) -> Manifest:
    return {
        "mode": "Enabled" if hang.enabled else "Disabled",
        **({} if hang.step is None else {"stepTimeoutSeconds": hang.step}),
        **({} if hang.min_step is None else {"minStepTimeoutSeconds": hang.min_step}),
        "dataTimeoutSeconds": float(hang.data),
        "checkpointTimeoutSeconds": float(hang.checkpoint),
        "evaluationTimeoutSeconds": float(hang.evaluation),
    }


def membership_document(
    job: Job,
    spec: JobSpec,
    membership: Membership,
    restarts: Mapping[str, int],
    job_key: str,
    *,
    durable_step: int | None,
) -> Manifest:
    """Return ``membership.json``. ``durable_step`` is the step of the newest checkpoint outside of pods and nodes."""
    published = membership.to_json()
    return {
        "version": c.PROTOCOL_VERSION,
        "job": {"namespace": job.namespace, "name": job.name, "uid": job.uid, "runId": run_id(job)},
        **published,
        "restarts": dict(restarts),
        "durableStep": durable_step,
        "settings": settings(spec),
        "jobKey": job_key,
    }
