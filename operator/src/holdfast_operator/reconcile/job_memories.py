"""The state of jobs that a process keeps between passes. Its loss costs a few requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime

from holdfast_operator.decision.snapshot import CreationError


@dataclass(frozen=True, kw_only=True)
class JobMemory:
    """What this process knows about a job in addition to the cluster."""

    refusal: CreationError | None = None
    applied: str = ""
    applied_at: datetime | None = None
    published: int = -1
    rendezvous_ip: str = ""


class JobMemories:
    """Memories by the job's key. Thread-safe; a job has one pass at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memories: dict[str, JobMemory] = {}
        self._uids: dict[str, str] = {}
        self._pods: dict[str, set[str]] = {}

    def of(self, key: str) -> JobMemory:
        """Return the memory of a job."""
        with self._lock:
            return self._memories.get(key, JobMemory())

    def keep(self, key: str, memory: JobMemory) -> None:
        """Replace the memory of a job."""
        with self._lock:
            self._memories[key] = memory

    def replaced(self, key: str, uid: str) -> str | None:
        """Note the job's UID. Return that of another job that had this name before, whose memory is dropped."""
        with self._lock:
            before = self._uids.get(key)
            self._uids[key] = uid
            if before in (None, uid):
                return None
            self._memories.pop(key, None)
            return before

    def gone_pods(self, key: str, uids: set[str]) -> set[str]:
        """Note the UIDs of the job's pods. Return those that it has no more."""
        with self._lock:
            gone = self._pods.get(key, set()) - uids
            self._pods[key] = uids
            return gone

    def forget(self, key: str) -> str | None:
        """Drop all that is known of a deleted job; return its UID."""
        with self._lock:
            self._memories.pop(key, None)
            self._pods.pop(key, None)
            return self._uids.pop(key, None)
