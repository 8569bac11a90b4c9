"""The errors that the operator receives: one `GpuError` per GPU, kind and XID, however often it occurs. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from holdfast_sidecar import constants as c
from holdfast_sidecar.gpu import rules
from holdfast_sidecar.gpu.detector import Finding
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.notice import Notice


def merged(errors: Sequence[GpuError], findings: Sequence[Finding], now: datetime) -> tuple[GpuError, ...]:
    """Add findings to the errors. The newest errors are at the end."""
    known = {(error.gpu, error.kind, error.xid): error for error in errors}
    for finding in findings:
        key = (finding.uuid, finding.kind, finding.xid)
        before = known.pop(key, None)
        error = _error(finding, now)
        known[key] = error if before is None else replace(error, count=before.count + error.count, first=before.first)
    return tuple(known.values())[-c.MAX_GPU_ERRORS :]


def new_serious(before: Sequence[GpuError], errors: Sequence[GpuError]) -> tuple[GpuError, ...]:
    """Return the errors with the advice to leave the node that were not known before."""
    known = {_id(error) for error in before}
    return tuple(error for error in errors if error.action == rules.REPLACE_NODE and _id(error) not in known)


def notice_of(error: GpuError, checkpoint_deadline: timedelta) -> Notice:
    """Return the request for a checkpoint. Its ID depends only on the error, so an error has one request."""
    return Notice(
        id=_id(error),
        reason=error.message,
        source=c.GPU_SOURCE,
        action="checkpoint",
        deadline=error.last + checkpoint_deadline,
        observed_at=error.last,
    )


def _id(error: GpuError) -> str:
    kind = error.kind if error.xid is None else f"{error.kind}-{error.xid}"
    return f"gpu-{kind}-{error.gpu}"


def _error(finding: Finding, now: datetime) -> GpuError:
    name = finding.uuid if finding.index is None else str(finding.index)
    return GpuError(
        gpu=finding.uuid,
        index=finding.index,
        kind=finding.kind,
        xid=finding.xid,
        count=finding.count,
        cause=finding.cause,
        action=finding.action,
        message=f"GPU {name}: {finding.words}",
        first=now,
        last=now,
    )
