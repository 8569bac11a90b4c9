"""The operator's role without an operator, on the launcher at the rendezvous endpoint.

It collects members, publishes generations and keeps their record. Its loss ends the run. A member that lost the
endpoint exits, so a member whose connection was lost for long enough is proved gone. A single launcher is a roster of
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.connections import derived_key
from holdfast.core.environment import SETTINGS, Environment
from holdfast.core.protocol import PROTOCOL_VERSION
from holdfast.launcher.options import RunOptions

# A member exits this long after it lost the endpoint. The endpoint counts it as gone some time later.
LEASE_SECONDS = 10.0
GONE_SECONDS = 20.0
LAST_CALL_SECONDS = 30.0
# In steps. A script without a launcher saves by time instead.
LAUNCHED_INTERVAL = "50"


def _hang_detection(options: RunOptions) -> dict[str, Any]:
    """Return `--hang-timeout` and `--hang-min-timeout` as settings of a membership."""
    if options.hang_timeout == "Off":
        return {"mode": "Disabled"}
    step = {} if options.hang_timeout == "Auto" else {"stepTimeoutSeconds": int(options.hang_timeout)}
    least = {} if options.hang_min_timeout is None else {"minStepTimeoutSeconds": options.hang_min_timeout}
    return {"mode": "Enabled", **step, **least}


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The settings of a run from the command line."""

    run_id: str
    options: RunOptions = field(default_factory=RunOptions)
    environment: Environment = field(default_factory=Environment)
    last_call: float = LAST_CALL_SECONDS
    backoff_seconds: float = 1.0

    @property
    def processes(self) -> int:
        """The number of rank processes per host."""
        return self.options.processes or 1

    def settings(self) -> dict[str, Any]:
        """Return the settings as a membership contains them."""
        options = self.options
        checkpoint = {one.key: getattr(self.environment, one.name) for one in SETTINGS if one.key}
        if "checkpoint_interval" not in self.environment.given:
            checkpoint["interval"] = LAUNCHED_INTERVAL
        return {
            "minReplicas": options.min_nodes,
            "replicaStep": options.replica_step,
            "onFailure": "Shrink" if options.min_nodes < options.max_nodes else "Wait",
            "replicas": options.max_nodes,
            "processesPerWorker": self.processes,
            "heartbeatSeconds": 0.25,
            "deadAfterSeconds": 1.0,
            "firstAttemptWaitSeconds": 30.0,
            "startupDeadlineSeconds": 300.0,
            "hangDetection": {**_hang_detection(options), "startupTimeoutSeconds": 1200.0},
            "checkpoint": {**{key: value for key, value in checkpoint.items() if value}, "deadlineSeconds": 25.0},
            "budgets": [
                {"cause": cause, "maxRestarts": options.max_restarts, "windowSeconds": 21600.0}
                for cause in ("Application", "OOM")
            ],
            "backoff": {"initialSeconds": self.backoff_seconds, "maxSeconds": 60.0},
        }

    def shared_options(self) -> dict[str, str]:
        """Return, by option, the values that must be the same on every host of a run."""
        low, high = self.options.nodes
        nodes = f"{low}" if low == high else f"{low}:{high}"
        name = {"--rdzv-id": self.run_id} if self.options.run_name else {}
        return {"--nproc-per-node": str(self.processes), "--nnodes": nodes, **name}

    def refusal(self, requested: Mapping[str, Any]) -> str | None:
        """Return why a launcher with these values cannot join, or None: rank numbers need equal values everywhere."""
        own = {**self.shared_options(), "--rdzv-id": self.run_id}
        for option, value in requested.items():
            if option in own and value != own[option]:
                return f"{option} is {value} here and {own[option]} at --rdzv-endpoint: set the same on every host"
        return None


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A launcher that joined, in the form of a membership's member without its index."""

    uid: str
    entry: Mapping[str, Any]

    @classmethod
    def of(cls, *, uid: str, name: str, host: str, control: int, store: int, node: str) -> Joined:
        entry = {"pod": name, "podUID": uid, "ip": host, "ports": {"store": store, "control": control}, "node": node}
        return cls(uid=uid, entry=entry)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A generation as it was published. With `through`, a range of numbers that were never published."""

    generation: int
    publication: str
    members: tuple[Joined, ...]
    through: int | None = None

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(member.uid for member in self.members)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The reports of the launchers that an operator would have recorded."""

    started: AttemptId | None = None
    acknowledged: tuple[AttemptId, ...] = ()
    foreign: tuple[Claim, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The members and the published generations. Pure: each change returns a new roster."""

    terms: RunRequest
    publication: str  # of this run; part of each generation's publication
    present: tuple[Joined, ...] = ()
    last_join: float = 0.0
    lost: Mapping[str, float] = field(default_factory=dict)
    published: tuple[Published, ...] = ()
    claims: frozenset[Claim] = frozenset()  # of other runs, found in the checkpoint folder

    def joined(self, member: Joined, now: float) -> Roster:
        others = tuple(known for known in self.present if known.uid != member.uid)
        lost = {uid: since for uid, since in self.lost.items() if uid != member.uid}
        return replace(self, present=(*others, member), last_join=now, lost=lost)

    def left(self, uid: str, now: float) -> Roster:
        """A launcher's connection to the endpoint ended."""
        present = tuple(known for known in self.present if known.uid != uid)
        return replace(self, present=present, lost={**self.lost, uid: now})

    def found(self, claims: Iterable[Claim]) -> Roster:
        """Add claims of other runs that a rank found. The next generation is above them."""
        return replace(self, claims=self.claims | frozenset(claims))

    @property
    def generation(self) -> int:
        """The last published generation; 0 before the first."""
        return self.published[-1].generation if self.published else 0

    def publish(self, now: float) -> Roster:
        """Publish the next generation if it is due."""
        members = self._next_members(now)
        if members is None:
            return self
        generation = max(self.generation, self._highest_claimed()) + 1
        skipped = _skipped(self.generation + 1, generation - 1)
        publication = f"p{generation}-{self.publication}"
        new = Published(generation=generation, publication=publication, members=members)
        return replace(self, published=(*self.published, *skipped, new))

    def _highest_claimed(self) -> int:
        return max((claim.attempt_id.generation for claim in self.claims), default=0)

    def _next_members(self, now: float) -> tuple[Joined, ...] | None:
        here = self.present[: self.terms.options.max_nodes]
        if len(here) < self.terms.options.min_nodes:
            return None
        if not self.published:
            full = len(here) == self.terms.options.max_nodes
            return here if full or now - self.last_join >= self.terms.last_call else None
        last = self.published[-1]
        kept = tuple(member for member in last.members if member in here)
        new = tuple(member for member in here if member.uid not in last.uids or member not in last.members)
        if self._highest_claimed() >= last.generation:
            return (*kept, *new)
        is_majority = 2 * len(kept) > len(last.members)
        if not new and (len(kept) == len(last.members) or is_majority):
            return None
        return (*kept, *new)

    def gone(self, now: float) -> list[str]:
        """Return members that have certainly ended: they lost the endpoint for longer than their lease."""
        return sorted(uid for uid, since in self.lost.items() if now - since > GONE_SECONDS)

    def document(self, record: Record, *, now: float, revision: int) -> dict[str, Any]:
        """Return the membership of the last published generation."""
        last, started = self.published[-1], record.started
        first = started.generation if started else 1
        return {
            "version": PROTOCOL_VERSION,
            "job": {
                "namespace": "",
                "name": self.terms.run_id,
                "uid": self.terms.run_id,
                "runId": self.terms.run_id,
            },
            "revision": revision,
            "generation": last.generation,
            "publication": last.publication,
            "active": None if started is None else started.to_json(),
            "previous": [_previous(old) for old in self.published[:-1] if old.generation >= first],
            "gone": self.gone(now),
            "members": [{"index": index, **member.entry} for index, member in enumerate(last.members)],
            "claims": [claim.to_json() for claim in sorted(self.claims)],
            "acknowledged": [attempt_id.to_json() for attempt_id in record.acknowledged],
            "restarts": {},
            "directives": {"checkpoint": None, "drain": []},
            "settings": self.terms.settings(),
        }


def _skipped(first: int, last: int) -> tuple[Published, ...]:
    return () if last < first else (Published(generation=first, publication="", members=(), through=last),)


def _previous(old: Published) -> dict[str, Any]:
    entry = {"generation": old.generation, "publication": old.publication, "members": sorted(old.uids)}
    return entry if old.through is None else {**entry, "through": old.through}


def job_key(secret: bytes, run_id: str) -> bytes:
    """Return the key of a run, with which its launchers authenticate to each other."""
    return derived_key(secret, f"holdfast-run\n{run_id}")


def rendezvous_key(secret: bytes) -> bytes:
    """Return the key with which a launcher authenticates to the endpoint, before it has the run ID."""
    return derived_key(secret, "holdfast-rendezvous")
