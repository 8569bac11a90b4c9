"""The checkpoints of a job: find, claim, save and restore them. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.attempt_claims import Fence
from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.expiry import Expiry
from holdfast.checkpoint.format.failure_causes import FailureCause
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import DATA_ALIGNMENT, Holding, TensorSpec
from holdfast.checkpoint.io.rate_limit import UNLIMITED, WRITERS, Pace
from holdfast.checkpoint.io.staging_buffer import Arena
from holdfast.checkpoint.policy import fencing, retention
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank, lead
from holdfast.checkpoint.restore.rank_reader import Select
from holdfast.checkpoint.restore.search import Restored, newest, no_complete_checkpoint, restore
from holdfast.checkpoint.saving.background import PendingSave, Saving
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.snapshot import SaveResult, Snapshot
from holdfast.checkpoint.saving.stager import Staged, plan
from holdfast.checkpoint.saving.writer import commit
from holdfast.checkpoint.storage_wait import until_answered, until_usable
from holdfast.checkpoint.stores.base import CheckpointStore, SharedStore
from holdfast.checkpoint.stores.fallback import FallbackStore
from holdfast.checkpoint.stores.memory.peer_client import Neighbour
from holdfast.checkpoint.stores.open import open_store
from holdfast.checkpoint.tiers.local_disk_tier import LocalTier
from holdfast.checkpoint.tiers.memory_tier import MemoryTier
from holdfast.checkpoint.tiers.settings import TierSettings
from holdfast.checkpoint.tiers.tier import Tier, TierWorld
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import NoCompleteCheckpointError, UnavailableError
from holdfast.core.protocol import OBJECT_TIER, SHARED_TIER

_log = logging.getLogger("holdfast.checkpoint")

NO_RULES: Final = retention.Rules()
# The header of a file grows with the metadata of its checkpoint.
HEADER_SPARE: Final = DATA_ALIGNMENT
# A store that answers only some requests would make a restore repeat without end.
_SEARCHES: Final = 5


def _no_check() -> None:
    """The default check, which never ends an attempt."""


def _ignore_result(result: SaveResult) -> None:
    """The default callback of a save, which ignores the result."""


class CheckpointManager:
    """The checkpoints of a job in one shared store, across attempts."""

    def __init__(
        self,
        place: Path | str,
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
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        self.shared: SharedStore = open_store(str(place), in_flight=copies_in_flight)
        """The shared tier: a folder, or an object store."""
        self._copies = FallbackStore(copies, self.shared, in_flight=copies_in_flight) if copies else None
        self._stores: tuple[CheckpointStore, ...] = tuple(filter(None, (self.shared, self._copies)))
        self._keep_last = keep_last
        self._expiry = Expiry(self.shared, keep_last=keep_last, rules=rules, clock=clock)
        self._fence = Fence(self.shared, self._stores, resume, on_foreign)
        self._shared_base: CheckpointName | None = None
        self._exchange: Exchange = SingleRank()
        self._arena = arena or Arena()
        self._planner = Planner()
        self._saving: Saving | None = None
        self.saves = 0  # number of saves of this attempt
        self._background_exchange: Callable[[int], Exchange] | None = None
        self._check = _no_check
        self._full_every, self._delta_threshold = full_every, delta_threshold
        self._bytes_per_second, self._max_in_flight, self._pace = bytes_per_second, max_in_flight, UNLIMITED
        self._chain: Chain | None = None  # per attempt, because a save of an older attempt may still be running
        self._known_tiers: tuple[Tier, ...] = (MemoryTier(), LocalTier()) if tiers is None else tuple(tiers)
        self.tiers: tuple[Tier, ...] = ()
        """The tiers that every rank uses in addition to the shared store, in the order in which they are read."""

    def enter(
        self,
        attempt: Attempt,
        exchange: Exchange,
        *,
        background_exchange: Callable[[int], Exchange] | None = None,
        check: Callable[[], None] = _no_check,
    ) -> None:
        """Begin an attempt, whose ranks exchange values over `exchange`.

        For each save, `background_exchange` returns an exchange for a background thread, by the save's number.
        `check` raises when the attempt is over.
        """
        self._exchange = exchange
        self._background_exchange, self._check, self.saves = background_exchange, check, 0
        self._fence.enter(attempt)
        self._chain = Chain(every=self._full_every, threshold=self._delta_threshold) if self._full_every > 1 else None

    def enter_tiers(
        self,
        own: Mapping[str, Mapping[str, Any]],
        members: Sequence[Mapping[str, Mapping[str, Any]]],
        local_rank: int,
        check: Callable[[], None],
    ) -> None:
        """Enter the tiers that the launchers of all ranks offer.

        `own` has the settings of each tier from this rank's launcher. `members` has what each rank announced, in
        order of ranks.
        """
        entered = []
        for tier in self._known_tiers:
            announced = [one[tier.name] for one in members if tier.name in one]
            if tier.name in own and len(announced) == len(members):
                tier.enter(
                    TierWorld(
                        settings=TierSettings.agreed(own[tier.name], announced[0]),
                        neighbours=frozenset(Neighbour.from_json(one["me"]) for one in announced),
                        local_rank=local_rank,
                        exchange=self._exchange,
                        check=check,
                    )
                )
                entered.append(tier)
                continue
            tier.close()
            if announced and self._exchange.rank == 0:
                _log.warning(
                    "some launchers have no %s tier: nothing is saved there (--%s-tier)", tier.name, tier.name
                )
        self.tiers = tuple(entered)

    def save_on(self, tier: Tier, snapshot: Snapshot, *, requested: bool = False) -> SaveResult:
        """Save on a tier that copies the live objects while training is paused."""
        exchange = self._exchange
        staged = plan(self._owned(snapshot), None, self._planner, rank=exchange.rank, size=exchange.size)
        return tier.save(staged, exchange, self._fence.context, check=self._check, requested=requested)

    def begin_on(
        self, tier: Tier, snapshot: Snapshot, on_end: Callable[[SaveResult], None] = _ignore_result
    ) -> Saving:
        """Save on a tier in the background, from the same staging buffer as `begin`. Only one save runs at a time."""
        called = time.monotonic()
        staged, exchange = self._staged(snapshot, tier.pace())
        context, check = self._fence.context, self._check
        work = partial(tier.save, staged, exchange, context, check=check)
        return self._start(PendingSave(staged=staged, commits=work, ended=on_end, called=called))

    def is_durable(self, name: CheckpointName) -> bool:
        """Return whether the shared tier has this checkpoint. Every rank calls it."""
        return bool(lead(self._exchange, lambda: self.shared.exists(name)))

    def newest(self, *, waits: Callable[[], None] | None = None) -> CheckpointName | None:
        """Return the name of the newest checkpoint with a readable manifest. Every rank calls it.

        The copies are read only if nothing else is left, because a recovery from memory must be fast. Every copy was
        on the shared tier first. With `waits`, the call retries while the shared tier cannot be used: an error would
        end a script whose state is only in memory. Rank 0 calls `waits` before each pause.
        """

        def refresh(_: bool) -> list[int]:
            self._fence.refresh()
            found = self._newest_in((*self._tier_stores(), self._stores[0])) or self._newest_copy()
            return [] if found is None else [found.step, found.attempt_id.generation, found.attempt_id.attempt]

        answer = lead(self._exchange, lambda: until_usable(refresh, waits, self._check))
        return CheckpointName(step=answer[0], attempt_id=AttemptId(answer[1], answer[2])) if answer else None

    def _newest_in(self, stores: Sequence[CheckpointStore]) -> CheckpointName | None:
        known = self._fence.context
        found = newest(stores, claims=known.claims, job_uid=known.job_uid, resume=known.resume)
        return None if found is None else found[0]

    def _newest_copy(self) -> CheckpointName | None:
        if len(self._stores) == 1:
            return None
        try:
            self._fence.refresh_all()
            return self._newest_in(self._stores)
        except UnavailableError as error:
            _log.warning("copies cannot be checked for a newer checkpoint: %s", error)
            return None

    def restore(
        self, select: Select | None = None, *, before: int | None = None, waits: Callable[[], None] | None = None
    ) -> Restored:
        """Return the newest checkpoint of this job's line that every rank can read as it requests; None if there is
        none. With `before`, only checkpoints of steps below it count. With `waits`, the call waits for the end of an
        outage of the store: an error would end the script, and then the job.

        Raise `NoCompleteCheckpointError` if all are corrupt. A claim that starts from nothing would abandon them, and
        retention would then delete them. The first checkpoint that a job made is moved aside instead: starting again
        costs less than stopping.
        """
        if self._saving is not None:
            self._saving.settle(self._check)  # the running save may be the checkpoint to restore
        found = self._found(select, before, waits)
        if found.stuck:
            raise NoCompleteCheckpointError(no_complete_checkpoint(found, [store.url for store in self._stores]))
        if found.loaded is None and found.quarantined:
            _log.error(
                "the first checkpoint in %s is corrupt: training starts from the beginning, and the "
                "checkpoint is kept in %s",
                self.shared.url,
                f"{self.shared.url}/quarantine",
            )
        self._shared_base = None
        if found.loaded is not None:
            if self._stores[0].url in found.stores and self.shared.exists(found.loaded.name):
                self._shared_base = found.loaded.name  # a checkpoint with a corrupt file was moved aside
            self._expiry.verified.add(found.loaded.name)
            for tier in self.tiers:
                tier.restored(found.loaded.name)
        return found

    def _found(self, select: Select | None, before: int | None, waits: Callable[[], None] | None) -> Restored:
        """Search for a checkpoint, and repeat the search if a store that was skipped has become available."""
        for _ in range(_SEARCHES):
            found = self._restored(select, before, waits)
            if not found.again:
                return found
        raise UnavailableError(
            "the object store answers only some of the requests of a restore. Nothing was moved or "
            "deleted. Try again when it answers all of them",
            cause=FailureCause.NETWORK,
        )

    def _copies_required(self, step: int, lost: bool) -> bool:
        """Return whether skipped copies may hold a newer checkpoint and are available now.

        Raise `UnavailableError` if they are not available. A claim from an older checkpoint would fence the newer
        one, and retention would then delete it. The copies are therefore required in three cases: checkpoints are
        lost, no checkpoint was found, or the found one is older than `known_step`.
        """
        if self._copies is None or not (lost or step == 0 or step < self._fence.known_step):
            return False
        return bool(lead(self._exchange, self._copies.require))

    def _restored(self, select: Select | None, before: int | None, waits: Callable[[], None] | None) -> Restored:
        def refresh(_: bool) -> list[dict[str, object]]:
            return self._fence.refresh_all()

        claims = lead(self._exchange, lambda: until_answered(refresh, waits, self._check))
        self._fence.claims = tuple(map(Claim.from_json, claims))
        known = self._fence.context
        return restore(
            (*self._tier_stores(), *self._stores),
            self._exchange,
            claims=known.claims,
            job_uid=known.job_uid,
            resume=known.resume,
            select=select,
            before=before,
            again=self._copies_required,
            first=before is None
            and self._keep_last > 1,  # the store has as many checkpoints as were made, up to keep_last
        )

    def read_from(self, found: Restored) -> list[str]:
        known = {
            store.url: tier_name for store, tier_name in zip(self._stores, (SHARED_TIER, OBJECT_TIER), strict=False)
        }
        for url in found.stores:  # stores that any rank read, on any node
            known.setdefault(url, next(filter(None, (tier.reported_as(url) for tier in self._known_tiers)), url))
        return list(dict.fromkeys(known[url] for url in found.stores))

    def claim(self, *, step: int, attempt_id: AttemptId | None, waits: Callable[[], None] | None = None) -> Claim:
        """Make this attempt's claim durable. After the call, check again whether another attempt has claimed.

        `step` and `attempt_id` name the state from which the attempt continues. Raise `ClaimError` if that state was
        read from the shared store and no longer exists. A replaced attempt that still saves may delete it until the
        claim exists. No claim is left in this case, so the next attempt reads what the replaced attempt saved. With
        `waits`, the call retries while the store cannot be used, as in `newest`.
        """
        claim = Claim(
            attempt_id=self._fence.attempt.attempt_id,
            job_uid=self._fence.attempt.job_uid,
            publication=self._fence.attempt.publication,
            from_step=step,
            from_attempt_id=attempt_id,
        )

        base = self._shared_base

        def write(again: bool) -> None:
            self._fence.write(claim, base, again=again)

        lead(self._exchange, lambda: until_usable(write, waits, self._check))
        return claim

    def prepare(self, specs: Sequence[TensorSpec], holding: Holding | None = None) -> None:
        """Allocate the memory for a save of these tensors, so that the first save takes no longer than later ones."""
        if self._saving is None or self._saving.ended:
            exchange = self._exchange
            layout = self._planner.layouts(specs, holding, exchange.size).of(exchange.rank)
            self._arena.prepare(layout.headed({}).nbytes + HEADER_SPARE)

    def save(self, snapshot: Snapshot) -> SaveResult:
        """Save a checkpoint on this thread."""
        saves = self._planned(snapshot, _ignore_result)
        saves.copy()
        return saves.commit()

    def begin(
        self,
        snapshot: Snapshot,
        on_end: Callable[[SaveResult], None] = _ignore_result,
        *,
        spare: bool = False,
        urgent: bool = False,
    ) -> Saving:
        """Copy the state, and write the checkpoint in the background. `on_end` receives the result on that thread.

        Only one save runs at a time: `begin` first waits for the previous one. With `spare`, retention deletes
        nothing for this save. With `urgent`, the save writes at the full speed of the storage.
        """
        saves = self._planned(snapshot, on_end, spare=spare)
        if urgent:
            self.lift_rate_limit()
        return self._start(saves)

    def _start(self, saves: PendingSave) -> Saving:
        self._saving = Saving(saves.commit)
        saves.copy()
        return self._saving

    def lift_rate_limit(self) -> None:
        """Lift the rate limit of the running save, because another save is waiting for it."""
        self._pace.lift()

    def _planned(
        self, snapshot: Snapshot, on_end: Callable[[SaveResult], None], *, spare: bool = False
    ) -> PendingSave:
        called = time.monotonic()
        total = self._bytes_per_second
        pace = Pace(total and total / self._exchange.size, self._max_in_flight)
        staged, exchange = self._staged(snapshot, pace)
        owned = staged.snapshot
        chain, attempt, check = self._chain, self._fence.attempt, self._check

        def ended(result: SaveResult) -> None:
            if result.committed:
                self._expiry.verified.add(owned.name)
            on_end(result)
            if result.committed and exchange.rank == 0:
                if chain is None:  # otherwise the manifest names its base checkpoints
                    self._expiry.add_entry(owned)
                if not spare:
                    self._expiry.expire(attempt, self._fence.claims)

        def commits() -> SaveResult:
            return commit(self.shared, staged, exchange, check=check, chain=chain)

        return PendingSave(staged=staged, commits=commits, ended=ended, called=called)

    def _staged(self, snapshot: Snapshot, pace: Pace) -> tuple[Staged, Exchange]:
        """Plan a save after the previous one has left the staging buffer. Return it with its exchange."""
        if self._saving is not None:
            self._saving.settle(self._check)
        owned = replace(self._owned(snapshot), created=datetime.now(UTC))
        self.saves += 1
        exchange = self._exchange if self._background_exchange is None else self._background_exchange(self.saves)
        staged = plan(owned, self._arena, self._planner, rank=exchange.rank, size=exchange.size)
        self._pace = pace
        return replace(staged, pace=pace), exchange

    def _owned(self, snapshot: Snapshot) -> Snapshot:
        return replace(
            snapshot,
            job_uid=self._fence.attempt.job_uid,
            publication=self._fence.attempt.publication,
            run_id=self._fence.attempt.run_id,
        )

    def _tier_stores(self) -> tuple[CheckpointStore, ...]:
        """Return this node's store of each tier, and then the stores on other nodes."""
        stores = [tier.stores(self._fence.context) for tier in self.tiers]
        return (*(of_tier[0] for of_tier in stores), *(store for of_tier in stores for store in of_tier[1:]))
