"""The data about each checkpoint that retention needs. Each manifest is read once, because it never changes. No
torch.

An unreadable manifest is read again at each call, because the cause may be temporary.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.policy.fencing import Commit
from holdfast.checkpoint.policy.retention import Entry
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores.base import CheckpointStore, manifest_of
from holdfast.core.errors import CorruptCheckpointError, UnknownFormatError

_log = logging.getLogger("holdfast.checkpoint.aging")

History = dict[int, dict[str, float]]


class Ages:
    """The index of one store's checkpoints."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._known: dict[CheckpointName, tuple[Entry, History]] = {}
        self._reported: set[CheckpointName] = set()

    def entries(self) -> list[Entry]:
        """Return all checkpoints in the store, with the metrics of their steps.

        A later checkpoint may be the first that records the metrics of an earlier step.
        """
        found = {name: self._known.get(name) or self._read(name) for name in self._store.commits()}
        self._known = {name: known for name, known in found.items() if not known[0].unread}
        by_step: History = {}
        for _, history in sorted(found.values(), key=lambda known: known[0].name):
            by_step |= history
        return [replace(entry, metrics=by_step.get(entry.commit.step, {})) for entry, _ in found.values()]

    def add_entry(self, snapshot: Snapshot) -> None:
        """Add a checkpoint that was just published, so that its manifest need not be read."""
        name = snapshot.name
        commit = Commit.named(name, snapshot.job_uid, snapshot.publication)
        self._known[name] = Entry(commit=commit, created=snapshot.created), metrics(snapshot.state)

    def _read(self, name: CheckpointName) -> tuple[Entry, History]:
        try:
            manifest = manifest_of(self._store, name)
        except (CorruptCheckpointError, UnknownFormatError) as error:
            if name not in self._reported:
                self._reported.add(name)
                _log.warning("retention does not delete %s: %s", name, error)
            return Entry(commit=Commit.named(name)), {}
        commit = Commit.named(name, manifest.job_uid, manifest.publication)
        entry = Entry(
            commit=commit,
            created=_moment(manifest.created),
            parent=manifest.parent,
            depends_on=manifest.depends_on,
        )
        return entry, metrics(manifest.state)


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # OverflowError: a local time before the year 1 in UTC
        return None


def metrics(state: Any) -> History:
    """Return the metrics in a manifest by step, from `[[100, {"val_loss": 2.1}], …]`. Invalid entries are skipped."""
    told = state.get("metrics") if isinstance(state, dict) else None
    pairs = [pair for pair in told if isinstance(pair, list) and len(pair) == 2] if isinstance(told, list) else []
    return {
        step: {str(name): float(value) for name, value in values.items() if _is_number(value)}
        for step, values in pairs
        if isinstance(step, int) and isinstance(values, dict)
    }


def told(history: History) -> list[list[Any]]:
    return [[step, dict(values)] for step, values in sorted(history.items())]


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer that no float can represent
        return False
