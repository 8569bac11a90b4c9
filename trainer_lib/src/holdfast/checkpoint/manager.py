"""The checkpoints of a job: look, claim, save, keep. No torch.

Before its first step an attempt has restored what it goes on from and has written its claim; from then on nothing
that an older attempt commits beyond that point is ever read.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.folder.claims import highest_generation, list_claims, remove_claims, write_claim
from holdfast.checkpoint.folder.publish import exists
from holdfast.checkpoint.folder.upload_marker import on_its_way
from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import DATA_ALIGNMENT, Holding, TensorSpec
from holdfast.checkpoint.io.durable_files import make_folder
from holdfast.checkpoint.io.rate_limit import UNHINDERED, WRITERS, Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.policy import fencing, retention
from holdfast.checkpoint.policy.fencing_context import FencingContext
from holdfast.checkpoint.policy.interval import retry_after
from holdfast.checkpoint.ranks.exchange import Alone, Exchange, lead
from holdfast.checkpoint.restore.rank_reader import Select
from holdfast.checkpoint.restore.search import Restored, newest, none_whole, restore
from holdfast.checkpoint.save.background import Saving
from holdfast.checkpoint.save.checkpoint_index import Ages
from holdfast.checkpoint.save.incremental import Chain
from holdfast.checkpoint.save.protocol import SaveResult, Snapshot, Staged, commit, plan
from holdfast.checkpoint.save.write_plan import Planner
from holdfast.checkpoint.stores.base import CheckpointStore
from holdfast.checkpoint.stores.fallback import FallbackStore
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.tiers.local_disk_tier import LocalSettings, LocalTier
from holdfast.checkpoint.tiers.memory_settings import MemorySettings
from holdfast.checkpoint.tiers.memory_tier import MemoryTier, tier_of
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import CheckpointError, ClaimError, ForeignClaimError, NoneWholeError, UnavailableError
from holdfast.core.tier_names import OBJECT_TIER, SHARED_TIER

_log = logging.getLogger("holdfast.checkpoint")

# The owner of what a script makes that was started by hand.
BY_HAND: Final = "by-hand"
NO_RULES: Final = retention.Rules()
# A file's header grows with what it says of its commit.
HEADER_SPARE: Final = DATA_ALIGNMENT
# A store that answers only some requests would let a restore begin again without end.
_LOOKS: Final = 5
_SLICE_SECONDS: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Who commits. `known` are the claims of the membership, `durable` the step of the newest checkpoint that the
    volume is known to have had."""

    pair: AttemptId
    job_uid: str
    publication: str
    run_id: str
    known: tuple[Claim, ...] = ()
    durable: int = 0


def attempt_by_hand(root: Path | None, exchange: Exchange, run_id: str = "") -> Attempt:
    """Without an operator, the folder itself says which attempts there were: this is the next generation."""

    def choose() -> dict[str, str | int]:
        highest = 0 if root is None else highest_generation(root)
        return {"generation": highest + 1, "publication": uuid4().hex}

    chosen = lead(exchange, choose)
    known = () if root is None else tuple(Claim.from_json(c) for c in lead(exchange, lambda: _listed(root)))
    return Attempt(
        pair=AttemptId(int(chosen["generation"]), 1),
        job_uid=BY_HAND,
        publication=str(chosen["publication"]),
        run_id=run_id or BY_HAND,
        known=known,
    )


def _nothing() -> None:
    """Nobody ends an attempt."""


def _untold(result: SaveResult) -> None:
    """Nobody waits to hear it."""


def _listed(root: Path) -> list[dict[str, object]]:
    return [claim.to_json() for claim in list_claims(root)]


class _Save:
    """One save: a thread copies, and perhaps another commits."""

    def __init__(
        self,
        staged: Staged,
        commits: Callable[[], SaveResult],
        ended: Callable[[SaveResult], None],
        *,
        called: float,
    ) -> None:
        self._staged = staged
        self._commits = commits
        self._ended = ended
        self._called = called
        self._copied = math.inf

    def copy(self) -> None:
        """All for which training waits."""
        self._staged.copy()
        self._copied = time.monotonic()

    def commit(self) -> SaveResult:
        """The rest, and say how it ended."""
        result, now = self._commits(), time.monotonic()
        copied = min(self._copied, now)
        result = replace(result, stalled=copied - self._called, seconds=now - copied)
        self._ended(result)
        return result


class CheckpointManager:
    """A job's commits in one shared folder, attempt after attempt."""

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int,
        resume: fencing.Resume,
        on_foreign: Callable[[tuple[Claim, ...]], None],
        rules: retention.Rules = NO_RULES,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        arena: Arena | None = None,
        copies: str = "",
        full_every: int = 1,
        delta_threshold: float = 0.0,
        bytes_per_second: int | None = None,
        max_in_flight: int = WRITERS,
        copies_in_flight: int | None = None,
    ) -> None:
        self._root = root
        shared = FolderStore(root)
        self._copies = FallbackStore(copies, shared, in_flight=copies_in_flight) if copies else None
        self._where: tuple[CheckpointStore, ...] = (shared,) if self._copies is None else (shared, self._copies)
        self._keep_last = keep_last
        self._rules = rules
        self._clock = clock
        self._ages = Ages(FolderStore(root))
        self._resume = resume
        self._on_foreign = on_foreign
        self._verified: set[CheckpointName] = set()
        self._fence: tuple[Claim, ...] = ()
        self._base_here: CheckpointName | None = None
        self._attempt = Attempt(pair=AttemptId(0, 0), job_uid="", publication="", run_id="")
        self._exchange: Exchange = Alone()
        self._arena = arena or Arena()
        self._planner = Planner()
        self._saving: Saving | None = None
        self._saves = 0  # of the attempt
        self._aside: Callable[[int], Exchange] | None = None
        self._check = _nothing
        self._full_every, self._delta_threshold = full_every, delta_threshold
        self._bytes_per_second, self._max_in_flight, self._pace = bytes_per_second, max_in_flight, UNHINDERED
        self._chain: Chain | None = None  # of the attempt: an older one's save may still be on its way
        self._memory: MemoryTier | None = None
        self._local: LocalTier | None = None

    def enter(
        self,
        attempt: Attempt,
        exchange: Exchange,
        *,
        aside: Callable[[int], Exchange] | None = None,
        check: Callable[[], None] = _nothing,
    ) -> None:
        """From now on this attempt commits, and its ranks exchange over this.

        `aside` gives each save, by its number, an exchange beside it, for a thread; `check` raises when the attempt
        is over.
        """
        self._attempt, self._exchange = attempt, exchange
        self._aside, self._check, self._saves = aside, check, 0
        self._fence = fencing.union(self._fence, attempt.known)
        self._chain = Chain(every=self._full_every, threshold=self._delta_threshold) if self._full_every > 1 else None

    def enter_memory(
        self,
        said: Mapping[str, Any] | None,
        members: Sequence[Mapping[str, Any] | None],
        local_rank: int,
        check: Callable[[], None],
    ) -> None:
        """Commit into memory too, if every rank's launcher keeps some; `members` says where, by rank."""
        settings = MemorySettings.from_optional(said)
        neighbours = [Neighbour.from_json(one["me"]) for one in members if one is not None]
        if settings is None or len(neighbours) < len(members):
            if neighbours and self._exchange.rank == 0:
                _log.warning("some launchers have no memory tier: nothing is committed there (--memory-tier)")
            if self._memory is not None:
                self._memory.close()
            self._memory = None
            return
        first = members[0] or {}  # pods of before and after a change of the intervals do as rank 0 does
        settings = replace(settings, interval=int(first["interval"]), peer_interval=first["peerInterval"])
        if self._memory is None:
            self._memory = MemoryTier(settings)
        self._memory.enter(settings, frozenset(neighbours), local_rank, self._exchange, check)

    def enter_local(
        self,
        said: Mapping[str, Any] | None,
        members: Sequence[Mapping[str, Any] | None],
        local_rank: int,
        check: Callable[[], None],
    ) -> None:
        """Commit on this node's disk too, if every rank's launcher has a folder there; `members` says so, by rank."""
        if self._local is not None:
            self._local.close()
        settings, self._local = LocalSettings.from_optional(said), None
        theirs = [one for one in members if one is not None]
        if settings is not None and len(theirs) == len(members):
            settings = replace(settings, interval=int(theirs[0]["interval"]))
            there = frozenset(Neighbour.from_json(one["me"]) for one in theirs)
            self._local = LocalTier(settings, local_rank, there, check)
        elif theirs and self._exchange.rank == 0:
            _log.warning("some launchers have no local tier: nothing is committed there (--local-tier)")

    def local_due_at(self, step: int) -> bool:
        """Whether every rank is to commit this step on its node's disk, or the first one after it that it can."""
        return self._local is not None and self._local.due_at(step)

    def begin_local(self, snapshot: Snapshot, told: Callable[[SaveResult], None] = _untold) -> Saving:
        """As `begin`, on this node's disk; with the memory of that, so only one of both is on its way."""
        local = self._local
        if local is None:
            raise CheckpointError("there is no local tier")
        called = time.monotonic()
        staged, exchange = self._staged(snapshot, local.pace())
        terms, check = self._terms(), self._check
        saves = _Save(staged, lambda: local.commit(staged, exchange, terms, check=check), told, called=called)
        self._saving = Saving(saves.commit)
        saves.copy()
        return self._saving

    @property
    def saves(self) -> int:
        """How many were begun in this attempt."""
        return self._saves

    def memory_due_at(self, step: int, *, asked: bool = False) -> bool:
        """Whether every rank commits this step into memory, if not `asked` to."""
        return self._memory is not None and (asked or self._memory.due_at(step))

    def save_in_memory(self, snapshot: Snapshot, *, copy: bool = False) -> SaveResult:
        """Commit into memory, and with copies into that of other nodes; `copy`: also if none is due."""
        if self._memory is None:
            raise CheckpointError("there is no memory tier")
        return self._memory.save(self._owned(snapshot), self._terms(), copy=copy)

    def is_durable(self, name: CheckpointName) -> bool:
        """Whether the shared tier has this commit. Every rank calls it."""
        return bool(lead(self._exchange, lambda: exists(self._root, name)))

    def newest(self, *, waits: Callable[[], None] | None = None) -> CheckpointName | None:
        """The newest readable commit's name; nothing of it is read but the manifest. Every rank calls it.

        Copies are asked only where nothing else is left: who goes on from memory is in a hurry, and each of them was
        on the shared tier first. With `waits`, a folder that cannot be used is waited for, since an error would end a
        script whose state is in memory only: rank 0 calls it before each pause.
        """

        def look(_: bool) -> list[int]:
            self._look()
            found = self._newest_in((*self._near(), self._where[0])) or self._newest_copy()
            return [] if found is None else [found.step, found.pair.generation, found.pair.attempt]

        answer = lead(self._exchange, lambda: self._until_usable(look, waits))
        return CheckpointName(step=answer[0], pair=AttemptId(answer[1], answer[2])) if answer else None

    def _newest_in(self, where: Sequence[CheckpointStore]) -> CheckpointName | None:
        found = newest(where, claims=self._fence, job_uid=self._attempt.job_uid, resume=self._resume)
        return None if found is None else found[0]

    def _newest_copy(self) -> CheckpointName | None:
        if len(self._where) == 1:
            return None
        try:
            self._look_everywhere()
            return self._newest_in(self._where)
        except UnavailableError as error:
            _log.warning("whether copies hold a newer commit cannot be seen: %s", error)
            return None

    def restore(self, select: Select | None = None) -> Restored:
        """The newest commit of this job's line of which every rank can read all that it wants; None if there is none.

        NoneWholeError if all are damaged: a claim from nothing would give them up, and retention then delete them.
        The first that a job made is moved aside instead: to begin anew costs less than to stand still.
        """
        if self._saving is not None:
            self._saving.settle(self._check)  # it may be what is looked for
        found = self._found(select)
        if found.stuck:
            raise NoneWholeError(none_whole(found, [store.url for store in self._where]))
        if found.loaded is None and found.quarantined:
            _log.error(
                "the first commit in %s is damaged: training starts from the beginning, and it stays in %s",
                self._root,
                self._root / "quarantine",
            )
        self._base_here = None
        if found.loaded is not None:
            if self._where[0].url in found.stores and exists(self._root, found.loaded.name):
                self._base_here = found.loaded.name  # and was not moved aside for a damaged file
            self._verified.add(found.loaded.name)
            if self._memory is not None:
                self._memory.restored(found.loaded.name)
        return found

    def _found(self, select: Select | None) -> Restored:
        """The end of a look: it begins again where a store that was left out answers now."""
        for _ in range(_LOOKS):
            found = self._restored(select)
            if not found.again:
                return found
        raise UnavailableError(
            "the object store answers only some of the requests of a restore; nothing was moved or deleted: try again"
            " once it answers all of them",
            cause=FailureCause.NETWORK,
        )

    def _insists(self, step: int, lost: bool) -> bool:
        """Whether copies that were left out may hold a newer commit, and answer now. UnavailableError if they do not.

        A claim from an older commit would fence the newer one, and retention then delete it. So they are asked if
        commits are lost, if there is none, or if what was found is older than what the highest claim continues or
        the volume is known to have had.
        """
        if self._copies is None or not (lost or step == 0 or step < max(self._base(), self._attempt.durable)):
            return False
        return bool(lead(self._exchange, self._copies.insist))

    def _base(self) -> int:
        """The step that the highest claim of this job's line continues."""
        line = fencing.binding(self._fence, self._attempt.job_uid)
        top = line[0] if line else None
        others = top is not None and top.job_uid != self._attempt.job_uid
        return 0 if top is None or (others and self._resume is fencing.Resume.NEVER) else top.from_step

    def _restored(self, select: Select | None) -> Restored:
        claims = lead(self._exchange, self._look_everywhere)
        self._fence = tuple(map(Claim.from_json, claims))
        return restore(
            (*self._near(), *self._where),
            self._exchange,
            claims=self._fence,
            job_uid=self._attempt.job_uid,
            resume=self._resume,
            select=select,
            again=self._insists,
            first=self._keep_last > 1,  # as many are there once as many were made
        )

    def tiers(self, found: Restored) -> list[str]:
        """Which tiers a commit was read from."""
        known = {store.url: word for store, word in zip(self._where, (SHARED_TIER, OBJECT_TIER), strict=False)}
        return list(dict.fromkeys(known.get(url) or tier_of(url) for url in found.stores))

    def claim(self, *, step: int, pair: AttemptId | None, waits: Callable[[], None] | None = None) -> Claim:
        """Make this attempt's claim durable; after it, look again whether another has claimed meanwhile.

        `step` and `pair` name the state from which it goes on. ClaimError if it was read from the shared folder and
        is no longer there: a replaced attempt that still saves may delete it until the claim stands. No claim is left
        then, so what that attempt saved is read next. With `waits`, a folder that cannot be used is waited for, as in
        `newest`.
        """
        claim = Claim(
            pair=self._attempt.pair,
            job_uid=self._attempt.job_uid,
            publication=self._attempt.publication,
            from_step=step,
            from_pair=pair,
        )

        def write(again: bool) -> None:
            self._write(claim, again=again)

        lead(self._exchange, lambda: self._until_usable(write, waits))
        return claim

    def prepare(self, specs: Sequence[TensorSpec], holding: Holding | None = None) -> None:
        """Have memory ready for a save of these, so that the first one takes no longer than others."""
        if self._saving is None or self._saving.ended:
            exchange = self._exchange
            layout = self._planner.layouts(specs, holding, exchange.size).of(exchange.rank)
            self._arena.prepare(layout.headed({}).nbytes + HEADER_SPARE)

    def save(self, snapshot: Snapshot) -> SaveResult:
        """Commit on this thread."""
        saves = self._planned(snapshot, _untold)
        saves.copy()
        return saves.commit()

    def begin(
        self,
        snapshot: Snapshot,
        told: Callable[[SaveResult], None] = _untold,
        *,
        spare: bool = False,
        urgent: bool = False,
    ) -> Saving:
        """Copy what is to be committed; it is written meanwhile and beside the caller afterwards, and `told` hears
        there how it ended.

        One at a time: it waits for the last one. `spare`: nothing older is let go for it. `urgent`: as fast as the
        disk takes it.
        """
        saves = self._planned(snapshot, told, spare=spare)
        if urgent:
            self.hurry()
        self._saving = Saving(saves.commit)
        saves.copy()
        return self._saving

    def hurry(self) -> None:
        """Let the save that is on its way go as fast as the disk takes it: somebody waits for the next one."""
        self._pace.lift()

    def _planned(self, snapshot: Snapshot, told: Callable[[SaveResult], None], *, spare: bool = False) -> _Save:
        called = time.monotonic()
        total = self._bytes_per_second
        pace = Pace(total and total / self._exchange.size, self._max_in_flight)
        staged, exchange = self._staged(snapshot, pace)
        owned = staged.snapshot
        chain, attempt, check = self._chain, self._attempt, self._check

        def ended(result: SaveResult) -> None:
            if result.committed:
                self._verified.add(owned.name)
            told(result)
            if result.committed and exchange.rank == 0:
                if chain is None:  # else the manifest says on what it stands
                    self._ages.learn(owned)
                if not spare:
                    self._expire(attempt)

        def commits() -> SaveResult:
            return commit(self._root, staged, exchange, check=check, chain=chain)

        return _Save(staged, commits, ended, called=called)

    def _staged(self, snapshot: Snapshot, pace: Pace) -> tuple[Staged, Exchange]:
        """Room for this rank's share, once the last save has left it, and over what ranks exchange for this one."""
        if self._saving is not None:
            self._saving.settle(self._check)
        owned = replace(self._owned(snapshot), created=datetime.now(UTC))
        self._saves += 1
        exchange = self._exchange if self._aside is None else self._aside(self._saves)
        staged = plan(owned, self._arena, self._planner, rank=exchange.rank, size=exchange.size)
        self._pace = pace
        return replace(staged, pace=pace), exchange

    def _owned(self, snapshot: Snapshot) -> Snapshot:
        return replace(
            snapshot,
            job_uid=self._attempt.job_uid,
            publication=self._attempt.publication,
            run_id=self._attempt.run_id,
        )

    def _near(self) -> tuple[CheckpointStore, ...]:
        """This node's memory and disk, then those of others."""
        terms = self._terms()
        memory = [] if self._memory is None else self._memory.stores(terms)
        disk = [] if self._local is None else self._local.stores(terms)
        return (*memory[:1], *disk[:1], *memory[1:], *disk[1:])

    def _terms(self) -> FencingContext:
        return FencingContext(claims=self._fence, job_uid=self._attempt.job_uid, resume=self._resume)

    def _look(self) -> None:
        make_folder(self._root)
        self._heed(list_claims(self._root))

    def _look_everywhere(self) -> list[dict[str, object]]:
        """Copies may be all that is left, claims included. Asking for them is nothing for an attempt in a hurry."""
        self._look()
        self._heed(fencing.union(*(store.claims() for store in self._where)))
        return [claim.to_json() for claim in self._fence]

    def _heed(self, on_tier: Sequence[Claim]) -> None:
        self._refuse_foreign(on_tier)
        self._fence = fencing.union(on_tier, self._attempt.known)

    def _until_usable(self, action: Callable[[bool], Any], waits: Callable[[], None] | None) -> Any:
        """Try again for as long as the folder cannot be used; `action` is told whether it was tried before."""
        failed = 0
        while True:
            try:
                return action(failed > 0)
            except (OSError, ClaimError) as error:
                if waits is None or not (isinstance(error, OSError) or isinstance(error.__cause__, OSError)):
                    raise
                failed += 1
                pause = max(1.0, retry_after(failed))
                _log.error("%s. Training waits with its state in memory; next try in %.0f s", error, pause)
            waits()
            until = time.monotonic() + pause
            while (left := until - time.monotonic()) > 0:
                self._check()
                time.sleep(min(left, _SLICE_SECONDS))

    def _write(self, claim: Claim, *, again: bool) -> None:
        self._insist_on_base(claim)
        try:
            write_claim(self._root, claim, again=again)
        except ClaimError:
            self._refuse_foreign(list_claims(self._root))  # if it was another job that took the name first
            raise
        try:
            self._insist_on_base(claim)
        except ClaimError:
            remove_claims(self._root, [claim])
            raise
        on_tier = list_claims(self._root)
        self._refuse_foreign([other for other in on_tier if other != claim])
        self._fence = fencing.union(on_tier, self._fence)
        catalog.clean(self._root, own=claim.pair)
        remove_claims(self._root, fencing.superfluous(on_tier, claim))

    def _insist_on_base(self, claim: Claim) -> None:
        base = self._base_here
        if base is None or (base.step, base.pair) != (claim.from_step, claim.from_pair):
            return
        if not exists(self._root, base):
            raise ClaimError(
                f"{base} in {self._root} was deleted after this attempt read it: an attempt that this one replaces"
                " still saves there; nothing else is lost, and the next attempt starts from what it saved"
            )

    def _refuse_foreign(self, on_tier: Sequence[Claim]) -> None:
        found = fencing.foreign(
            on_tier,
            known=self._attempt.known,
            job_uid=self._attempt.job_uid,
            pair=self._attempt.pair,
            publication=self._attempt.publication,
        )
        if found:
            self._on_foreign(found)
            named = ", ".join(f"{claim.pair} of job {claim.job_uid}" for claim in found)
            raise ForeignClaimError(
                f"{self._root} holds claims that this attempt does not know ({named}): another job or operator "
                "uses the folder; give each job a folder of its own, or stop the other one and start again"
            )

    def _expire(self, attempt: Attempt) -> None:
        """Let go of old commits; not once a newer attempt has claimed, which may stand on any of them.

        On a save's thread: `attempt` is the one that made it, and the engine may be in another by now.
        """
        try:
            on_tier = list_claims(self._root)
            fence = fencing.union(on_tier, self._fence)
            if any(claim.pair > attempt.pair for claim in on_tier):
                _log.warning("a newer attempt than %s has claimed: no commit is deleted", attempt.pair)
                return
            decided = retention.decide(
                self._ages.look(),
                fence,
                job_uid=attempt.job_uid,
                own=attempt.pair,
                verified=frozenset(self._verified),
                keep_last=self._keep_last,
                rules=self._rules,
                now=self._clock(),
                uploading=on_its_way(self._root),
            )
            catalog.delete(self._root, retention.leaving(decided))
        except (OSError, CheckpointError) as error:
            _log.warning("retention could not look through %s: %s", self._root, error)
