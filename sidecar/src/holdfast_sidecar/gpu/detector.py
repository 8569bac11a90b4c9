"""Detects GPU errors: previous state, a new sample and the time → new state and findings. Pure.

- Counters count by difference. If a counter falls, the driver was loaded again, and the counter's value is new.
  One low sample is no reset; two are, because exporters may return one wrong value.
- A missing field has no effect: counters continue from their last value, and a state must last from its return.
- If several fields have one counter, the first one that was seen is used. Another one would count the same errors
  again.
- The first values of a GPU's counters and XIDs are history. A state (rows that cannot be replaced) is reported at
  once.
- The same XID twice in a row is detected only if the exporter counts XIDs; the field alone has only the last one.
- Values of a GPU that did not change for minutes are stale and not used.
- The exporter shows an XID on every part of a GPU (MIG): it is reported once for the GPU. If some parts belong to
  another pod, it is reported only if the machine is the cause, because another pod's program may be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast_sidecar import constants as c
from holdfast_sidecar.gpu import rules
from holdfast_sidecar.gpu.exposition import Gpu, Sample
from holdfast_sidecar.gpu.rules import CountRule, StateRule


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An error that this sample shows."""

    uuid: str
    index: int | None
    kind: str
    xid: int | None = None
    count: int = 1
    cause: str
    action: str
    words: str


@dataclass(frozen=True)
class LastXid:
    """The field that shows the last XID: it stays until another comes, or until the driver is loaded again."""

    xid: int = 0
    fell: bool = False
    """The last sample showed none. One such sample may be wrong."""

    def new(self, shown: int | None) -> dict[int, int]:
        """Return the number of occurrences of each XID since the last sample."""
        return {shown: 1} if shown and shown != self.xid else {}

    def after(self, shown: int | None) -> "LastXid":
        """Return the state after this value; None if the field was missing."""
        if shown is None:
            return LastXid(self.xid)
        return LastXid(self.xid, fell=True) if not shown and self.xid and not self.fell else LastXid(shown)


@dataclass(frozen=True)
class XidCounts:
    """The exporter's own counts by XID; None without counts."""

    counts: Mapping[int, float] | None = None

    def new(self, shown: Mapping[int, float]) -> dict[int, int]:
        """Return the number of occurrences of each XID since the last sample."""
        before = self.counts or {}
        risen = {xid: int(count - before.get(xid, 0.0)) for xid, count in shown.items()}
        return {xid: count for xid, count in risen.items() if count > 0}

    def after(self, shown: Mapping[int, float] | None) -> "XidCounts":
        """Return the state after these counts."""
        return self if shown is None else XidCounts(shown)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The state of one GPU between samples. Times are monotonic seconds."""

    uuid: str
    index: int | None = None
    fields: Mapping[str, float] = field(default_factory=dict)
    """The last value of each counter, by field."""
    fields_that_fell: frozenset[str] = frozenset()
    """Fields that were lower in the last sample than before it."""
    last_xid: LastXid = field(default_factory=LastXid)
    xids: XidCounts = field(default_factory=XidCounts)
    counted: Mapping[str, float] = field(default_factory=dict)
    """New errors since the GPU was first seen, by the counter's name."""
    recent: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """(when, how many) of the new errors that a rule still counts, by the rule's kind."""
    since: Mapping[str, float] = field(default_factory=dict)
    """Since when a state holds, by its rule's kind."""
    told: frozenset[str] = frozenset()
    """Kinds whose present episode was reported."""
    liveness_readings: tuple[float | None, ...] = ()
    moved_at: float = 0.0
    """When its readings last changed."""
    gone_since: float | None = None

    def readings_frozen(self, now: float) -> bool:
        """Whether the readings are stale: some of them always change."""
        energy, power, *_ = self.liveness_readings or (None, None)
        return (energy is not None or power is not None) and now - self.moved_at >= c.GPU_STALE_SECONDS


GpuStates = Mapping[str, GpuState]
"""The state of all GPUs of the pod between samples, by UUID."""


def judge(known: GpuStates, sample: Sample, now: float) -> tuple[GpuStates, tuple[Finding, ...]]:
    """Compare a sample with the last one and return the errors."""
    tracks = dict(known)
    findings: list[Finding] = []
    devices: set[tuple[str, int | None]] = set()
    for gpu in sample.gpus:
        before = tracks.get(gpu.uuid)
        if before is None and len(tracks) >= c.MAX_GPUS:
            continue
        tracks[gpu.uuid], found = _first_seen(gpu, now) if before is None else _seen(before, gpu, now)
        findings += [one for one in found if one.xid is None or _is_new(one, gpu, devices)]
    seen = {gpu.uuid for gpu in sample.gpus}
    for uuid in tracks.keys() - seen:
        tracks[uuid], found = _unseen(tracks[uuid], sample, now)
        findings += found
    return tracks, tuple(findings)


def _is_new(finding: Finding, gpu: Gpu, devices: set[tuple[str, int | None]]) -> bool:
    """Whether an XID is this pod's, and not yet reported for another part of the GPU.

    ``devices`` has the reported ones.
    """
    if gpu.shared and finding.cause == rules.APPLICATION:
        return False
    told = (gpu.device, finding.xid) in devices
    devices.add((gpu.device, finding.xid))
    return not told


def _first_seen(gpu: Gpu, now: float) -> tuple[GpuState, list[Finding]]:
    read = {name: one for name, fields in rules.COUNTERS.items() if (one := _field(fields, {}, gpu)) is not None}
    track = GpuState(
        uuid=gpu.uuid,
        index=gpu.index,
        fields={one: gpu.values[one] for one in read.values()},
        counted=dict.fromkeys(read, 0.0),
        last_xid=LastXid(_shown_xid(gpu) or 0),
        xids=XidCounts(gpu.xids),
        liveness_readings=_liveness_readings(gpu),
        moved_at=now,
    )
    return _states(track, gpu, now)


def _seen(track: GpuState, gpu: Gpu, now: float) -> tuple[GpuState, list[Finding]]:
    liveness_readings = _liveness_readings(gpu)
    moved_at = track.moved_at if liveness_readings == track.liveness_readings else now
    track = replace(track, index=gpu.index, liveness_readings=liveness_readings, moved_at=moved_at, gone_since=None)
    track = replace(track, told=track.told - {rules.VANISHED_KIND})
    track, xids = _xids(track, gpu)
    track, counts = _counts(track, gpu, now)
    track, states = _states(track, gpu, now)
    return track, [*xids, *counts, *states]


def _unseen(track: GpuState, sample: Sample, now: float) -> tuple[GpuState, list[Finding]]:
    """Report a GPU as vanished if the exporter shows other GPUs. An exporter that shows none has an error itself."""
    if not sample.present:
        return track, []
    since = now if track.gone_since is None else track.gone_since
    track = replace(track, gone_since=since, since={})
    if now - since < c.GPU_VANISHED_SECONDS or rules.VANISHED_KIND in track.told:
        return track, []
    words = "the exporter shows it no more"
    track = replace(track, told=track.told | {rules.VANISHED_KIND})
    return track, [
        Finding(
            uuid=track.uuid,
            index=track.index,
            kind=rules.VANISHED_KIND,
            cause=rules.INFRASTRUCTURE,
            action=rules.IGNORE,  # an exporter may omit a GPU that still trains; a lost GPU has an XID
            words=words,
        )
    ]


# XIDs


def _shown_xid(gpu: Gpu) -> int | None:
    shown = gpu.values.get(rules.XID)
    return None if shown is None else int(shown)


def _xids(track: GpuState, gpu: Gpu) -> tuple[GpuState, list[Finding]]:
    """The counts are exact.

    If they are new and the field exists too, the field still has the XID since the last sample.
    """
    shown = _shown_xid(gpu)
    if gpu.xids is not None and (track.xids.counts is not None or shown is None):
        new = track.xids.new(gpu.xids)
    else:
        new = track.last_xid.new(shown)
    track = replace(track, last_xid=track.last_xid.after(shown), xids=track.xids.after(gpu.xids))
    return track, [_xid_finding(track, xid, count) for xid, count in sorted(new.items())]


def _xid_finding(track: GpuState, xid: int, count: int) -> Finding:
    rule = rules.xid_rule(xid)
    return Finding(
        uuid=track.uuid,
        index=track.index,
        kind=rules.XID_KIND,
        xid=xid,
        count=count,
        cause=rule.cause,
        action=rule.action,
        words=f"XID {xid}, {rule.words}",
    )


# Counters


def _field(fields: Sequence[str], known: Mapping[str, float], gpu: Gpu) -> str | None:
    """Return the field that was read before, else the first existing one."""
    return next((one for shown in (known, gpu.values) for one in fields if one in shown), None)


def _counts(track: GpuState, gpu: Gpu, now: float) -> tuple[GpuState, list[Finding]]:
    new: dict[str, float] = {}
    for name, fields in rules.COUNTERS.items():
        one = _field(fields, track.fields, gpu)
        if one is not None and one in gpu.values:
            track, new[name] = _difference(track, one, gpu.values[one])
    counted = {name: track.counted.get(name, 0.0) + delta for name, delta in new.items()}
    track = replace(track, counted={**track.counted, **counted})
    findings: list[Finding] = []
    for rule in rules.COUNT_RULES:
        track, found = _apply_count(rule, track, sum(new.get(name, 0.0) for name in rule.counters), now)
        findings += found
    return track, findings


def _difference(track: GpuState, name: str, value: float) -> tuple[GpuState, float]:
    last = track.fields.get(name)
    if last is not None and value < last and name not in track.fields_that_fell:
        return replace(track, fields_that_fell=track.fields_that_fell | {name}), 0.0
    track = replace(track, fields={**track.fields, name: value}, fields_that_fell=track.fields_that_fell - {name})
    if last is None:
        return track, 0.0
    return track, value if value < last else value - last


def _apply_count(rule: CountRule, track: GpuState, new: float, now: float) -> tuple[GpuState, list[Finding]]:
    recent = tuple(one for one in track.recent.get(rule.kind, ()) if now - one[0] < rule.seconds)
    if new > 0:
        recent = (*recent, (now, new))
    total = sum(count for _, count in recent)
    high = total >= rule.at_least
    again = rule.kind in track.told and rule.at_least > 1
    told = track.told | {rule.kind} if high else track.told - {rule.kind}
    track = replace(track, recent={**track.recent, rule.kind: recent}, told=told)
    if not high or not new or again:
        return track, []
    words = f"{total:.0f} {rule.words} within {rule.seconds / 60:.0f} min"
    count = math.ceil(total if rule.at_least > 1 else new)
    return track, [
        Finding(
            uuid=track.uuid,
            index=track.index,
            kind=rule.kind,
            count=count,
            cause=rule.cause,
            action=rule.action,
            words=words,
        )
    ]


# States


def _states(track: GpuState, gpu: Gpu, now: float) -> tuple[GpuState, list[Finding]]:
    if track.readings_frozen(now):
        return replace(track, since={}), []
    findings: list[Finding] = []
    for rule in rules.STATE_RULES:
        track, found = _apply_state(rule, track, gpu, now)
        findings += found
    return track, findings


def _apply_state(rule: StateRule, track: GpuState, gpu: Gpu, now: float) -> tuple[GpuState, list[Finding]]:
    holds = _holds(rule, gpu)
    if not holds:
        since = {kind: at for kind, at in track.since.items() if kind != rule.kind}
        told = track.told if holds is None else track.told - {rule.kind}
        return replace(track, since=since, told=told), []
    begun = track.since.get(rule.kind, now)
    track = replace(track, since={**track.since, rule.kind: begun})
    if now - begun < rule.seconds or rule.kind in track.told:
        return track, []
    track = replace(track, told=track.told | {rule.kind})
    return track, [
        Finding(
            uuid=track.uuid,
            index=track.index,
            kind=rule.kind,
            cause=rule.cause,
            action=rule.action,
            words=rule.words + _detail(rule, gpu),
        )
    ]


def _shown(rule: StateRule, gpu: Gpu) -> float | None:
    return next((gpu.values[name] for name in rule.fields if name in gpu.values), None)


def _holds(rule: StateRule, gpu: Gpu) -> bool | None:
    """None if the exporter does not report it."""
    shown = _shown(rule, gpu)
    if shown is None:
        return None
    if rule.bits:
        return bool(int(shown) & rule.bits)
    return shown >= (gpu.values.get(rule.limit_field) or rule.limit)


def _detail(rule: StateRule, gpu: Gpu) -> str:
    shown = _shown(rule, gpu) or 0.0
    if rule.bits:
        return f" ({', '.join(throttle_reasons(int(shown) & rule.bits))})"
    return f" ({shown:.0f} °C)" if rules.TEMPERATURE in rule.fields else ""


def throttle_reasons(bits: int) -> list[str]:
    """The names of the reasons in the exporter's field."""
    return [name for bit, name in rules.THROTTLE_REASONS.items() if bits & bit]


def _liveness_readings(gpu: Gpu) -> tuple[float | None, ...]:
    return tuple(gpu.values.get(name) for name in rules.LIVENESS_FIELDS)
