"""Enter a world: form its process groups, decide whose state to continue from, synchronise every rank, and claim.

If the world fails meanwhile, nothing is lost: survivors keep their state and enter the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, Final

import torch

from holdfast.checkpoint.attempt_info import Attempt, attempt_by_hand
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.restore.lossy_delta import inexactness
from holdfast.checkpoint.restore.rank_reader import Select
from holdfast.checkpoint.restore.search import Restored
from holdfast.checkpoint.state import rng
from holdfast.checkpoint.state.dtensor import is_sharded
from holdfast.checkpoint.tiers.settings import announced
from holdfast.core.attempt import AttemptId
from holdfast.core.environment import publish
from holdfast.core.errors import CorruptCheckpointError, ForeignClaimError, NonFiniteError, PeerLostError, UsageError
from holdfast.telemetry.activity import Activity, Meter
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import Group, store_client
from holdfast.training.distributed.store_exchange import StoreClient, StoreExchange
from holdfast.training.distributed.torch_internals import TCPStore
from holdfast.training.guards import messages
from holdfast.training.guards.out_of_memory import latest
from holdfast.training.launcher_client.connection import LauncherConnection
from holdfast.training.launcher_client.placement import RankPlacement
from holdfast.training.protocol import entry_plan, step_commit
from holdfast.training.protocol.entry_plan import EntryPlan, EntryReport
from holdfast.training.protocol.random_streams import Seeds
from holdfast.training.protocol.shard_assignment import ShardAssignment
from holdfast.training.protocol.step_commit import RankState, Resolution
from holdfast.training.recovery import state_transfer
from holdfast.training.recovery.team import Team
from holdfast.training.step.call_mismatch import Calls
from holdfast.training.step.device_memory import empty_caches
from holdfast.training.step.model_outline import difference, digest, outline
from holdfast.training.step.stepper import Stepper
from holdfast.training.step.train_state import TrainState

_log = logging.getLogger("holdfast.job")

# Only a limit for a peer that never answers: launchers end an attempt long before.
CONNECT_SECONDS: Final = 1800.0


class WorldEntry:
    """Takes a rank's state from world to world."""

    def __init__(
        self,
        *,
        agent: LauncherConnection,
        engine: CheckpointManager | None,
        state: TrainState,
        stepper: Stepper,
        meter: Meter,
        device: Callable[[RankPlacement], torch.device],
        interface: str,
    ) -> None:
        self._agent = agent
        self._engine = engine
        self._state = state
        self._stepper = stepper
        self._meter = meter
        self._device = device
        self._interface = interface
        self._served: TCPStore | None = None
        self._receive_buffers = state_transfer.ReceiveBuffers()
        self._outline = outline(state.objects)
        python, numpy, cpu, cuda = rng.digests()
        self._seeds = Seeds(python=python, numpy=numpy, cpu=cpu, cuda=cuda)
        self.place: RankPlacement | None = None
        """The place in the current world, or in the one that is being formed."""

    def enter(self, first: RankPlacement | None = None) -> Team:
        """Enter the next world that can be formed, and return it. `first` is a place that is already known."""
        place = first
        while True:
            if place is None:
                self._meter.enter(Activity.PARKED)
                self._prepare_buffers()
                place = self._agent.next_place()
            try:
                return self._enter(place)
            except PeerLostError as error:
                self._agent.lose_peers(str(error))
            except ForeignClaimError:
                if not self._agent.connected:
                    raise
                self._agent.leave("the checkpoint folder has a foreign claim")
            place = None

    def _prepare_buffers(self) -> None:
        """Fault in memory for a state while the process is on standby.

        Tensors of a shard have other shapes, and are skipped.
        """
        if self._state.sharding is not None:
            return
        try:
            self._receive_buffers.prepare(takewhile(lambda _: self._agent.on_standby(), self._state.foreseen()))
        except Exception as error:  # noqa: BLE001  (a custom optimizer, or no memory: optional work)
            _log.debug("memory for the state was not allocated in advance: %s", error)
            self._receive_buffers.close()

    def leave(self, team: Team, reason: str) -> None:
        """Leave a world, and prepare for the next one."""
        self._agent.leave(reason)
        team.abandon()

    # Internal

    def _enter(self, place: RankPlacement) -> Team:
        self.place = place
        publish(place.torchrun)
        cancel = self._agent.enter(place)
        self._meter.enter(Activity.SYNC, self._state.step)
        if place.world_size > 1 and place.serves_store and place.port is not None:
            self._served = TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)
        group = self._connect(place, cancel)
        team = None
        try:
            attempt, calls = self._attempt(place, group), self._calls(place)
            team = Team(place=place, group=group, cancel=cancel, attempt=attempt, calls=calls)
            if self._engine is not None:
                self._engine.enter(
                    team.attempt, group, background_exchange=self._saves(place, cancel), check=cancel.check
                )
            plan = self._agree(team)
            team = self._assigned(team, plan.assignment)
            self._follow(team, plan)
            self._stepper.attach(group, team.attempt_id, peers=team.peers, shard_group=team.shard_group)
            cancel.waited = calls.waited
        except BaseException:
            (team or group).abandon()
            raise
        return team

    def _connect(
        self, place: RankPlacement, cancel: CancelToken, name: str = "", members: Sequence[int] | None = None
    ) -> Group:
        """Connect a group of all ranks, or of `members`."""
        ranks = range(place.world_size) if members is None else members
        return Group.connect(
            host=place.host,
            port=place.port or 0,
            prefix=place.name + name,
            rank=ranks.index(place.rank),
            size=len(ranks),
            device=self._device(place),
            cancel=cancel,
            timeout=CONNECT_SECONDS,
            interface=self._interface,
        )

    def _saves(self, place: RankPlacement, cancel: CancelToken) -> Callable[[int], Exchange]:
        """Return the exchanges for asynchronous saves, by the number of the save."""
        if place.world_size == 1:
            return lambda number: SingleRank()
        name = f"{place.name}/saves"
        client = StoreClient(lambda: store_client(place.host, place.port or 0, name, CONNECT_SECONDS), cancel)
        return lambda number: StoreExchange(client, rank=place.rank, size=place.world_size, number=number)

    def _calls(self, place: RankPlacement) -> Calls:
        return Calls(
            rank=place.rank,
            step=lambda: self._state.step,
            connect=lambda: store_client(place.host, place.port or 0, f"{place.name}/calls", CONNECT_SECONDS),
        )

    def _attempt(self, place: RankPlacement, group: Group) -> Attempt:
        if place.attempt_id is None:
            return attempt_by_hand(self._engine.shared if self._engine else None, group, place.run_id)
        known = self._agent.known_claims()  # waits for the launcher's welcome
        return Attempt(
            attempt_id=place.attempt_id,
            job_uid=place.job_uid,
            publication=place.publication,
            run_id=place.run_id,
            known=known,
            durable=self._agent.durable,
        )

    def _agree(self, team: Team) -> EntryPlan:
        """Decide with all ranks whose state to continue from."""
        state, sharding = self._state, self._state.sharding
        leaves_state = state.roll_back is not None
        own = EntryReport(
            rank_state=step_commit.invalidated(state.rank_state) if leaves_state else state.rank_state,
            roll_back=state.roll_back,
            outline=digest(self._outline),
            seeds=self._seeds,
            claimed=state.claimed,
            saved_step=state.saved_step,
            trained=self._agent.trained,
            shard=None if sharding is None else sharding.shard,
            out_of_memory=latest(state.out_of_memory, self._agent.out_of_memory),
        )
        tiers = {} if self._engine is None else announced(self._agent.tiers)
        answers = team.group.gather({**own.to_json(), "tiers": tiers})
        reports = [EntryReport.from_json(value) for value in answers]
        self._check_outlines(team.group, reports)
        if self._engine is not None:
            members = [value["tiers"] for value in answers]
            self._engine.enter_tiers(self._agent.tiers, members, team.place.local_rank, team.cancel.check)
        deciding = partial(
            entry_plan.decide, reports, team.attempt_id, shards=None if sharding is None else sharding.size
        )
        plan = deciding()
        if plan.depends_on_newest and self._engine is not None:
            newest = self._engine.newest(waits=self._wait_for_storage)
            plan = deciding(newest=None if newest is None else newest.attempt_id)
        if team.group.rank in plan.resolution.survivors:
            state.saved_step = plan.saved_step  # only some ranks may know of a save that a lost peer interrupted
        _log.info("%s", plan.resolution.message)
        return plan

    def _check_outlines(self, group: Group, reports: Sequence[EntryReport]) -> None:
        """Raise `UsageError` if the ranks' models differ, and this rank is the one to leave."""
        if len({report.outline for report in reports}) > 1:
            outlines = group.gather(self._outline)
            reference = entry_plan.odd_model(reports, group.rank)
            if reference is not None:
                raise UsageError(difference(outlines, reference))

    def _follow(self, team: Team, plan: EntryPlan) -> None:
        """Bring every rank to the state that continues."""
        resolution, claimed = plan.resolution, plan.claimed
        # Before any rank is synchronised: a claim that fails is due again in the next attempt.
        self._state.claimed = team.attempt_id.generation if claimed else None
        memory_was_full = plan.out_of_memory.times > self._state.out_of_memory.times
        self._state.out_of_memory = plan.out_of_memory
        if resolution.donor is None:
            self._receive_buffers.close()
            self._from_checkpoint(team, plan)
        else:
            self._from_memory(team, resolution, claimed=claimed)
        if resolution.apply:
            self._affirm(team)
        else:
            team.group.barrier()
        if memory_was_full:
            empty_caches()
        if self._state.sharding is not None and self._state.step:
            self._state.sharding.settled()

    def _affirm(self, team: Team) -> None:
        """Vote on a prepared step that was applied without its vote.

        No checkpoint may hold it before all ranks have voted.
        """
        self._agent.begin_vote()
        try:
            self._state.rank_state = step_commit.affirmed(self._state.rank_state, team.attempt_id)
            team.group.barrier()
        finally:
            self._agent.end_vote()

    def _assigned(self, team: Team, assignment: ShardAssignment | None) -> Team:
        sharding, place = self._state.sharding, team.place
        if assignment is None or sharding is None:
            return team
        _log.info(
            "shard %d of %d, replica %d",
            assignment.shards[place.rank],
            assignment.size,
            assignment.replica(place.rank),
        )
        team = replace(team, assignment=assignment)
        peers = self._connect(
            place, team.cancel, f"/shard-{assignment.shards[place.rank]}", assignment.peers(place.rank)
        )
        team = replace(team, peers=peers)
        try:
            shard_group = self._connect(
                place, team.cancel, f"/replica-{assignment.replica(place.rank)}", assignment.shard_group(place.rank)
            )
        except BaseException:
            peers.abandon()
            raise
        sharding.attach(shard_group)
        return replace(team, shard_group=shard_group)

    def _from_memory(self, team: Team, resolution: Resolution, *, claimed: bool) -> None:
        group, state = team.group, self._state
        donors, receivers = team.sharing(resolution.survivors), team.sharing(resolution.newcomers)
        if group.rank in resolution.survivors:
            self._stepper.settle(self._synchronised(team, resolution), apply=resolution.apply)
            if receivers:
                state_transfer.send(group, receivers, donors, state.flat(), state.side())
            self._claim_due(team, state.step, state.origin, claimed=claimed, trained=True)
        else:
            # until it is received, an older state of this rank may still count
            received = self._received(group, donors)
            self._stepper.settle(step_commit.invalidated(state.rank_state), apply=False)
            origin = AttemptId.from_optional(received[2]["origin"])
            self._claim_due(team, resolution.step, origin, claimed=claimed, trained=True)
            self._take_shard(team)
            state.load_from_peer(*received)
            state.rank_state = self._synchronised(team, resolution)
        self._report_restored("memory", state.origin)

    def _received(self, group: Group, donors: Sequence[int]) -> tuple[Any, dict[str, torch.Tensor], Any]:
        """Receive the state. If it is corrupt, raise `PeerLostError`, so that the next attempt requests it again."""
        try:
            return state_transfer.receive(group, donors, self._receive_buffers)
        except CorruptCheckpointError as error:
            raise PeerLostError(f"the received state is not complete: {error}") from error
        finally:
            self._receive_buffers.close()

    def _take_shard(self, team: Team) -> None:
        if team.assignment is not None and self._state.sharding is not None:
            self._state.sharding.become(team.assignment.shards[team.group.rank])

    def _synchronised(self, team: Team, resolution: Resolution) -> RankState:
        rank_state = self._state.rank_state
        if rank_state.voted != resolution.voted and rank_state.synced is not None:
            rank_state = step_commit.invalidated(
                rank_state
            )  # same attempt, according to `shard_assignment.resolve`: only the vote did not return here
        return step_commit.synchronised(rank_state, team.attempt_id, resolution.step, resolution.voted)

    def _from_checkpoint(self, team: Team, plan: EntryPlan) -> None:
        self._meter.enter(Activity.RESTORE)
        state, roll_back = self._state, plan.roll_back
        before = None if roll_back is None else roll_back.before
        found = Restored(loaded=None)
        if self._engine is not None:
            found = self._engine.restore(self._select(team), before=before, waits=self._wait_for_storage)
        if roll_back is not None and found.loaded is None:
            raise NonFiniteError(messages.nothing_earlier(roll_back))
        self._stepper.settle(step_commit.invalidated(state.rank_state), apply=False)
        self._take_shard(team)
        if found.loaded is None:
            state.start_over(plan.seeds)
            self._equalise(team.group)
        else:
            state.load_checkpoint(found.loaded, rank=team.group.rank, seeds=plan.seeds)
            if self._engine is not None and not self._engine.is_durable(found.loaded.name):
                state.saved_step = 0
        if roll_back is not None:
            state.roll_back_to_here(roll_back)
        self._report_restored("none" if found.loaded is None else "checkpoint", found.attempt_id, found)
        self._claim_due(team, state.step, state.origin, claimed=False, trained=False)
        state.rank_state = step_commit.synchronised(state.rank_state, team.attempt_id, state.step, None)
        _log.info(
            "training resumes from step %d of %s" if found.loaded else "training starts at step %d",
            *((found.step, found.loaded.name) if found.loaded else (0,)),
        )

    def _select(self, team: Team) -> Select | None:
        """Return the selection of this rank's rows of sharded tensors; None if the model is not sharded."""
        sharding, assignment = self._state.sharding, team.assignment
        if sharding is None or assignment is None:
            return None
        shard = assignment.shards[team.group.rank]
        return lambda manifest: sharding.wanted(manifest.objects, shard)

    def _equalise(self, group: Group) -> None:
        """Copy rank 0's weights to all ranks."""
        if self._state.sharding is not None:
            self._state.sharding.start_over(group)
        if group.size == 1:
            return
        for module in self._state.modules():
            for tensor in (*module.parameters(), *module.buffers()):
                if not is_sharded(tensor):
                    group.broadcast_(tensor.data, 0)

    def _report_restored(self, source: str, attempt_id: AttemptId | None, found: Restored | None = None) -> None:
        tiers = self._engine.read_from(found) if found is not None and self._engine is not None else []
        found = found or Restored(loaded=None)
        sharding = self._state.sharding
        shard = {} if sharding is None else {"shard": {"index": sharding.shard, "count": sharding.size}}
        self._agent.send(
            "restored",
            step=self._state.step,
            source=source,
            fromPair=None if attempt_id is None else attempt_id.to_json(),
            stores=list(found.stores),
            quarantined=[{"path": bad.path, "reason": bad.reason} for bad in found.quarantined],
            lost=[{"path": gone.path, "reason": gone.reason} for gone in found.lost],
            tiers=tiers,
            inexact="" if found.loaded is None else inexactness(found.loaded.manifest),
            **shard,
        )

    def _claim_due(self, team: Team, step: int, origin: AttemptId | None, *, claimed: bool, trained: bool) -> None:
        """Write the claim, if it is due, before a newcomer loads its state. All ranks call it.

        `trained`: the state is only in memory, so the call waits for the storage.
        """
        if claimed or self._engine is None:
            return
        claim = self._engine.claim(step=step, attempt_id=origin, waits=self._wait_for_storage if trained else None)
        if trained:
            self._meter.enter(Activity.SYNC)  # again, in case it had to wait
        self._state.claimed = team.attempt_id.generation
        if team.group.rank == 0:
            self._agent.send("claim", claim=claim.to_json())

    def _wait_for_storage(self) -> None:
        """Report the wait of the rank that uses the store, for which all others wait."""
        self._meter.enter(Activity.CHECKPOINT)
