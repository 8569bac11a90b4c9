"""When the next report is due. Pure."""

from dataclasses import dataclass, replace

from holdfast_sidecar import constants as c
from holdfast_sidecar.run_dir.launcher_status import LauncherStatus


@dataclass(frozen=True, kw_only=True)
class ReportState:
    """The state after the last report."""

    accepted_at: float | None
    """Monotonic time of the last accepted report; None before the first."""
    attempted_at: float | None
    failures: int
    """Failed attempts since then."""
    pause: float
    """Wait after the last failure."""
    significance: bytes
    """Of the last accepted report."""
    notices: int
    """Notices in the last accepted report."""
    sequence: int
    settled: bool = True
    """False while the operator's revision differs from that of the long poll: the next report is due soon."""


NOTHING_REPORTED = ReportState(
    accepted_at=None, attempted_at=None, failures=0, pause=0.0, significance=b"", notices=0, sequence=0
)


def report_due(state: ReportState, launcher: LauncherStatus, notices: int) -> tuple[float, str]:
    """Return the monotonic time from which a report is due, and the reason. A time in the past means now."""
    if state.failures and state.attempted_at is not None:
        return state.attempted_at + state.pause, "Retry"
    if state.accepted_at is None:
        return 0.0, "First"
    if launcher.significance != state.significance or notices != state.notices:
        return 0.0, "Changed"
    if launcher.sequence != state.sequence:
        return state.accepted_at + c.REPORT_MOVING_SECONDS, "Moving"
    if not state.settled:
        return state.accepted_at + c.REVISION_MISMATCH_SECONDS, "Unsettled"
    return state.accepted_at + c.REPORT_IDLE_SECONDS, "Idle"


def accepted(launcher: LauncherStatus, notices: int, monotonic: float, *, settled: bool = True) -> ReportState:
    """Return the state after an accepted report."""
    return ReportState(
        accepted_at=monotonic,
        attempted_at=monotonic,
        failures=0,
        pause=0.0,
        significance=launcher.significance,
        notices=notices,
        sequence=launcher.sequence,
        settled=settled,
    )


def failed(state: ReportState, monotonic: float, pause: float) -> ReportState:
    """Return the state after a failed report."""
    return replace(state, attempted_at=monotonic, failures=state.failures + 1, pause=pause)
