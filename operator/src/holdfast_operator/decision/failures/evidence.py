"""The evidence for one failure that rules match: from the launcher's report, the pod and the GPUs' errors."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from holdfast_operator.api import names as c
from holdfast_operator.api.child_names import pod_name
from holdfast_operator.api.reasons import COLLATERAL, Cause, FailureReason, LauncherReason
from holdfast_operator.api.status import Worker
from holdfast_operator.decision.draft import PlanDraft
from holdfast_operator.decision.failures import causes
from holdfast_operator.views import GpuError, ReportedIncident


@dataclass(frozen=True, kw_only=True)
class FailureEvidence:
    """One failure as rules match it."""

    exit_code: int | None = None
    oom: str = ""  # Process, Container, or empty
    hung: bool = False
    conditions: tuple[tuple[str, str, str], ...] = ()
    gpu_errors: tuple[GpuError, ...] = ()

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, from the exit code 128 + n."""
        code = self.exit_code
        return code - 128 if code is not None and 128 < code <= 192 else None


def of_incident(
    draft: PlanDraft, worker: Worker | None, told: ReportedIncident | None, detected: datetime
) -> FailureEvidence:
    """Collect all evidence for a failure. The exit of the process takes precedence over that of its container."""
    reason = told.reason if told is not None else ""
    return FailureEvidence(
        exit_code=_exit_code(draft, worker, told),
        oom=_oom(worker, reason),
        hung=reason == LauncherReason.HUNG,
        conditions=_conditions(draft, worker),
        gpu_errors=tuple(error for error in gpu_errors(draft, worker) if _recent(error, detected)),
    )


def gpu_errors(draft: PlanDraft, worker: Worker | None) -> tuple[GpuError, ...]:
    """Return the GPU errors that the worker's sidecar reports."""
    report = draft.seen.report(worker.pod_uid) if worker is not None else None
    return report.gpu_errors if report is not None else ()


def fault_of(error: GpuError) -> str:
    """Return the identity of a fault, which is the same on every GPU that shows it."""
    return f"{error.kind}/{error.xid}"


def faults(draft: PlanDraft, pod: str | None, moment: datetime) -> frozenset[str]:
    """Return the faults that the pod's GPUs reported at about that time. Several pods may report the same fault."""
    named = (w for w in draft.status.workers if pod_name(draft.seen.job.name, w.incarnation) == pod)
    errors = gpu_errors(draft, next(named, None))
    return frozenset(fault_of(error) for error in errors if _recent(error, moment))


def of_running(draft: PlanDraft, worker: Worker) -> FailureEvidence:
    """Return the evidence for a worker that has not failed."""
    return FailureEvidence(conditions=_conditions(draft, worker), gpu_errors=gpu_errors(draft, worker))


def _exit_code(draft: PlanDraft, worker: Worker | None, told: ReportedIncident | None) -> int | None:
    if told is not None and told.exit_code is not None and told.reason not in COLLATERAL:
        return told.exit_code
    if worker is None or worker.cause == Cause.INTERRUPTION or worker.reason == FailureReason.EVICTED:
        return None  # SIGTERM or SIGKILL caused that code, not the script
    code = worker.exit_code
    return code if causes.fails(code, launched=draft.spec.launched) else None


def _oom(worker: Worker | None, reason: str) -> str:
    if worker is not None and worker.reason == FailureReason.OOM_KILLED:
        return c.OOM_CONTAINER
    return c.OOM_PROCESS if reason == LauncherReason.OUT_OF_MEMORY else ""


def _conditions(draft: PlanDraft, worker: Worker | None) -> tuple[tuple[str, str, str], ...]:
    pod = draft.pod(worker) if worker is not None else None
    return pod.conditions if pod is not None else ()


def _recent(error: GpuError, detected: datetime) -> bool:
    return error.time is not None and abs(error.time - detected) <= c.SAME_FAILURE
