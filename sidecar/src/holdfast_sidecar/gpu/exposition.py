"""Parses the exporter's text for this pod's GPUs. Pure.

A GPU is this pod's if the exporter maps it now (labels `namespace` and `pod`, in old exporters `pod_namespace` and
`pod_name`) or did before: mappings are not stable, but a pod's GPUs are. If the exporter maps no GPU to any pod, the
UUIDs that the launcher sees count. For a GPU in parts (MIG) they prove nothing, because each part may belong to
another pod.
"""

import io
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from holdfast_sidecar import constants as c
from holdfast_sidecar.gpu import rules
from holdfast_sidecar.protocol.report import Pod

# DCGM writes these for a value that it does not have, and many exporters pass them on.
_BLANK_INT32: Final = range(0x7FFFFFF0, 0x80000000)
_BLANK_FROM: Final = 2.0**47


# Prometheus's own parser takes five times as long, which would be most of what the sidecar costs.
_LINE: Final = re.compile(r"(\w+)\{(.*)\}\s+(\S+)(?:\s+-?\d+)?\s*")
# A name begins at a word's beginning only, or a long word without a value would be tried from each of its letters.
_LABEL: Final = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')


class _Owner(Enum):
    NOBODY = 0
    OURS = 1
    ANOTHER = 2


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One of this pod's GPUs at one moment."""

    uuid: str
    """With `/` and the instance's number for a part of a GPU (MIG)."""
    index: int | None
    values: Mapping[str, float]
    """Values by field. Missing and blank fields are absent."""
    xids: Mapping[int, float] | None = None
    """The number of occurrences of each XID, if the exporter counts them."""
    shared: bool = False
    """Whether other parts of the GPU belong to other pods. The exporter shows an XID on every part."""

    @property
    def device(self) -> str:
        """The UUID of the whole GPU."""
        return self.uuid.partition("/")[0]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer of the exporter."""

    gpus: tuple[Gpu, ...]
    present: frozenset[str] = frozenset()
    """UUIDs of all GPUs in the text, including those of other pods."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    uuid: str
    index: int | None
    owner: _Owner
    field: str
    labels: Mapping[str, str]
    value: float


def read(body: bytes, pod: Pod, *, known: Collection[str] = (), launcher_gpus: Collection[str] = ()) -> Sample:
    """Parse the pod's GPUs. `known` were the pod's before, and its launcher sees `launcher_gpus`."""
    by_uuid: dict[str, list[_Row]] = {}
    for row in _rows(body, pod):
        by_uuid.setdefault(row.uuid, []).append(row)
    ours = [uuid for uuid, rows in by_uuid.items() if _is_ours(uuid, rows, known, launcher_gpus)]
    others = {uuid.partition("/")[0] for uuid in by_uuid.keys() - set(ours) if "/" in uuid}
    gpus = tuple(_gpu(uuid, by_uuid[uuid], others) for uuid in sorted(ours)[: c.MAX_GPUS])
    return Sample(gpus=gpus, present=frozenset(by_uuid))


def _rows(body: bytes, pod: Pod) -> Iterator[_Row]:
    for line in io.BytesIO(body):
        field = line.partition(b"{")[0].decode("latin-1")
        if field not in rules.FIELDS or len(line) > c.MAX_EXPORTER_LINE_BYTES:
            continue
        parsed = _parsed(line)
        if parsed is None:
            continue
        labels, value = parsed
        uuid = labels.get("UUID") or labels.get("uuid") or labels.get("gpu_uuid") or ""
        if not uuid or math.isnan(value):
            continue
        if instance := labels.get("GPU_I_ID"):
            uuid = f"{uuid}/{instance}"
        yield _Row(
            uuid=uuid[: c.MAX_GPU_NAME],
            index=_index(labels.get("gpu", "")),
            owner=_owner(labels, pod),
            field=field,
            labels=labels,
            value=value,
        )


def _parsed(line: bytes) -> tuple[Mapping[str, str], float] | None:
    """Return labels and value of one line, or None if the line is malformed."""
    try:
        found = _LINE.fullmatch(line.decode())
        return None if found is None else (dict(_LABEL.findall(found[2])), float(found[3]))
    except ValueError:
        return None


def _index(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def _owner(labels: Mapping[str, str], pod: Pod) -> _Owner:
    name = labels.get("pod") or labels.get("pod_name") or ""
    namespace = labels.get("namespace") or labels.get("pod_namespace") or ""
    if not name:
        return _Owner.NOBODY
    same = (namespace, name) == (pod.namespace, pod.name) and labels.get("pod_uid", "") in ("", pod.uid)
    return _Owner.OURS if same else _Owner.ANOTHER


def _is_ours(uuid: str, rows: list[_Row], known: Collection[str], launcher_gpus: Collection[str]) -> bool:
    owners = {row.owner for row in rows}
    if _Owner.OURS in owners or uuid in known:
        return True
    return _Owner.ANOTHER not in owners and uuid in launcher_gpus


def _gpu(uuid: str, rows: list[_Row], others: Collection[str]) -> Gpu:
    return Gpu(
        uuid=uuid,
        index=next((row.index for row in rows if row.index is not None), None),
        values=_values(rows),
        xids=_xids(rows, rules.XID_TOTAL) or _xids(rows, rules.XID_WINDOW),
        shared="/" in uuid and uuid.partition("/")[0] in others,
    )


def _values(rows: list[_Row]) -> dict[str, float]:
    """Of several lines for one field (containers of one pod) the highest; links of one GPU add up."""
    values: dict[str, float] = {}
    links: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.field in (rules.XID_TOTAL, rules.XID_WINDOW) or _blank(row.value):
            continue
        if link := row.labels.get("nvlink"):
            links.setdefault(row.field, {})[link] = row.value
        else:
            values[row.field] = max(row.value, values.get(row.field, row.value))
    return {field: sum(found.values()) for field, found in links.items()} | values


def _xids(rows: list[_Row], field: str) -> dict[int, float] | None:
    """Return the counts by XID; None if the exporter has no counts.

    A line without an XID means that there was none.
    """
    found = [row for row in rows if row.field == field]
    if not found:
        return None
    counts: dict[int, float] = {}
    for row in found:
        xid = _index(row.labels.get("xid", ""))
        if xid and not _blank(row.value):
            counts[xid] = max(row.value, counts.get(xid, 0.0))
    return counts


def _blank(value: float) -> bool:
    return not 0 <= value < _BLANK_FROM or value in _BLANK_INT32
