"""The checks: facts and the time → result, with a message that is stable while nothing changes. Pure.

A check without facts is skipped. A check without an answer in time has failed, so a hanging disk or exporter is
reported and does not block the job forever. A failed check may still pass later.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast_sidecar import constants as c
from holdfast_sidecar.protocol.preflight import BLAME_JOB, FAILED, PASSED, RUNNING, SKIPPED, Check, Peer, Preflight
from holdfast_sidecar.settings import PreflightSettings

GPU: Final = "GPU"
STORAGE: Final = "Storage"
OBJECT_STORE: Final = "ObjectStore"
NETWORK: Final = "Network"
CLOCK: Final = "Clock"
_SHOWN: Final = 4


@dataclass(frozen=True, kw_only=True)
class Skew:
    """The lead of this host's clock over the operator's, and its uncertainty, in seconds."""

    seconds: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Reachability:
    """The reached peers, and for the others the error and its duration in seconds."""

    told: bool = True
    """Whether the operator names peers at all."""
    peers: tuple[Peer, ...] = ()
    reached: frozenset[str] = frozenset()
    errors: Mapping[str, tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """The GPUs of this pod in the node's exporter."""

    count: int = 0
    answers: bool | None = None
    """Whether the exporter's last answer could be used; None before the first."""
    faults: tuple[str, ...] = ()
    """Errors that make a GPU unsuitable for the job."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All facts at one moment."""

    elapsed: float
    """Seconds since the launcher's first status. Before it, none of its results is late."""
    gpus: GpuHealth | None = None
    """The exporter's facts; None if it is not polled."""
    visible: Collection[str] = ()
    """UUIDs of the GPUs that the launcher sees."""
    launcher: bool = False
    """Whether the launcher has written a status."""
    told: Mapping[str, Any] | None = None
    """The launcher's `preflight.json`."""
    skew: Skew | None = None
    reach: Reachability | None = None
    """None until the operator has answered a report of a launcher that is ready."""


@dataclass(frozen=True, kw_only=True)
class _CheckResult:
    result: str
    message: str
    unreached: tuple[str, ...] = ()
    blame: str = ""


def judge(asked: PreflightSettings, facts: Inputs) -> Preflight:
    """Return the results of all checks."""
    found = [(name, _CHECKS[name](asked, facts) if name in _CHECKS else _unknown()) for name in asked.checks]
    return Preflight(
        checks=tuple(
            Check(
                name=name,
                result=words.result,
                message=words.message,
                unreached=words.unreached,
                blame=words.blame,
            )
            for name, words in found
        )
    )


def _unknown() -> _CheckResult:
    return _CheckResult(result=SKIPPED, message="this sidecar does not know the check")


def _gpu(asked: PreflightSettings, facts: Inputs) -> _CheckResult:
    if not asked.gpus:
        return _CheckResult(result=SKIPPED, message="the pod asks for no GPU")
    health = facts.gpus or GpuHealth()
    if health.faults:
        return _CheckResult(result=FAILED, message="; ".join(health.faults))
    late = facts.elapsed >= asked.seconds
    there = max(health.count, len(facts.visible))
    count = f"{there} of {asked.gpus} GPUs are there"
    if there < asked.gpus:
        return (
            _CheckResult(result=FAILED, message=count)
            if late
            else _CheckResult(result=RUNNING, message="GPUs are counted")
        )
    if health.answers:
        return _CheckResult(result=PASSED, message=f"{count}, and none shows a fault")
    if facts.gpus is not None and not late:
        return _CheckResult(result=RUNNING, message="the node's GPU exporter is asked")
    return _CheckResult(result=PASSED, message=f"{count}; no exporter answers, so nothing is known of their health")


def _storage(asked: PreflightSettings, facts: Inputs) -> _CheckResult:
    return _of_launcher(STORAGE, "the checkpoint volume", asked, facts)


def _object_store(asked: PreflightSettings, facts: Inputs) -> _CheckResult:
    return _of_launcher(OBJECT_STORE, "the object store", asked, facts)


def _of_launcher(name: str, what: str, asked: PreflightSettings, facts: Inputs) -> _CheckResult:
    """Judge a check of the launcher by its result or by its absence."""
    if facts.told is None:
        if facts.launcher:
            return _CheckResult(
                result=SKIPPED, message="the holdfast in the trainer's image is too old for this check"
            )
        return _CheckResult(result=RUNNING, message="the launcher has not started")
    found = _entry(facts.told, name, what)
    if found.result == RUNNING and facts.elapsed >= asked.seconds:
        return _CheckResult(result=FAILED, message=f"{what} has not answered within {asked.seconds:.0f} s")
    return found


def _entry(told: Mapping[str, Any], name: str, what: str) -> _CheckResult:
    checks = told.get("checks")
    for check in checks if isinstance(checks, list) else ():
        if isinstance(check, dict) and check.get("name") == name:
            result, message = str(check.get("result")), str(check.get("message") or "")
            if result in (RUNNING, PASSED, FAILED, SKIPPED):
                blame = BLAME_JOB if check.get("blame") == BLAME_JOB else ""
                return _CheckResult(result=result, message=message, blame=blame)
    return _CheckResult(result=SKIPPED, message=f"the launcher reports nothing about {what}")


def _network(asked: PreflightSettings, facts: Inputs) -> _CheckResult:
    """Each worker connects to the listening peers when it is ready, so the later one of any two connects to the
    other."""
    reach = facts.reach
    if reach is None:
        return _CheckResult(result=RUNNING, message="the launcher is not ready")
    if not reach.told:
        return _CheckResult(result=SKIPPED, message="this operator is too old for the check")
    patience = min(asked.seconds, c.UNREACHED_SECONDS)
    lost = [peer for peer in reach.peers if peer.uid in reach.errors and reach.errors[peer.uid][1] >= patience]
    if lost:
        shown = [f"{peer.pod} ({peer.ip}:{peer.port}, {reach.errors[peer.uid][0]})" for peer in lost[:_SHOWN]]
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        uids = tuple(peer.uid for peer in lost[: c.MAX_UNREACHED])
        return _CheckResult(result=FAILED, message=f"does not reach {', '.join(shown)}{more}", unreached=uids)
    if all(peer.uid in reach.reached for peer in reach.peers):
        return _CheckResult(result=PASSED, message=f"reaches all {len(reach.peers)} other workers that listen")
    return _CheckResult(result=RUNNING, message="other workers are tried")


def _clock(asked: PreflightSettings, facts: Inputs) -> _CheckResult:
    """Compare the clock with the operator's. Without its answer, the result could not be reported either."""
    skew = facts.skew
    if skew is None:
        return _CheckResult(result=RUNNING, message="the operator's clock is asked")
    if abs(skew.seconds) - skew.error <= asked.skew_seconds:
        return _CheckResult(result=PASSED, message=f"within {asked.skew_seconds:g} s of the operator's clock")
    side = "ahead of" if skew.seconds > 0 else "behind"
    return _CheckResult(
        result=FAILED,
        message=(
            f"the node's clock is {abs(skew.seconds):.0f} s {side} the operator's, {asked.skew_seconds:g} s are"
            " allowed: look after its time synchronisation"
        ),
    )


_CHECKS: Final[Mapping[str, Callable[[PreflightSettings, Inputs], _CheckResult]]] = {
    GPU: _gpu,
    STORAGE: _storage,
    OBJECT_STORE: _object_store,
    NETWORK: _network,
    CLOCK: _clock,
}
