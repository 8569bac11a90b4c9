"""A job whose shared tier is an object store: ranks save into it directly, and claims are conditional writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from nothing_managed import snapshot, snapshot_of

from holdfast.checkpoint import manager
from holdfast.checkpoint.attempt_info import Attempt, attempt_by_hand
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import Exchange, SingleRank
from holdfast.checkpoint.stores.objects.fsspec import FsspecBucket
from holdfast.checkpoint.stores.objects.s3 import S3Bucket
from holdfast.checkpoint.stores.objects.store import ObjectStore
from holdfast.core.attempt import AttemptId, Claim
from holdfast.core.errors import ClaimError, ForeignClaimError, UnavailableError
from holdfast_testbed.fakes.s3_faults import Answer, Proxy, Request, faults

ALONE = SingleRank()
TENSORS = {"w": bytes(range(250)) * 90_000, "b": b"short"}  # three parts of S3, and slices


@dataclass
class Bench:
    """Managers of attempts in one store."""

    monkeypatch: pytest.MonkeyPatch
    store: ObjectStore

    def attempt(
        self,
        generation: int,
        attempt: int,
        exchange: Exchange = ALONE,
        *,
        store: ObjectStore | None = None,
        known: tuple[Claim, ...] = (),
        **settings: Any,
    ) -> CheckpointManager:
        """A manager that entered this attempt."""
        self.monkeypatch.setattr(manager, "open_store", lambda url, **_: store or self.store)
        made = CheckpointManager(
            "s3://bucket/job", **{"keep_last": 3, "resume": Resume.ALWAYS, "on_foreign": lambda _: None} | settings
        )
        made.enter(
            Attempt(
                attempt_id=AttemptId(generation, attempt),
                job_uid="job-1",
                publication=f"p{generation}",
                run_id="run",
                known=known,
            ),
            exchange,
        )
        return made

    def resumed(self, generation: int, attempt: int, exchange: Exchange = ALONE, **more: Any) -> CheckpointManager:
        """A manager that restored and claimed."""
        made = self.attempt(generation, attempt, exchange, **more)
        found = made.restore()
        made.claim(step=found.step, attempt_id=found.attempt_id)
        return made

    def names(self) -> set[str]:
        return {str(name) for name in self.store.commits()}

    def files(self) -> set[str]:
        """Every key below the job's prefix."""
        return {key.removeprefix(self.store._prefix) for key in self.store._bucket.keys(self.store._prefix)}


@pytest.fixture
def bench(s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch, s3_store)


def test_each_rank_saves_its_part_and_every_byte_returns(
    bench: Bench, world: Callable[..., list[Any]], content: Callable[..., dict[str, bytes]]
) -> None:
    def train(exchange: Exchange) -> None:
        engine = bench.resumed(1, 1, exchange)
        assert engine.save(snapshot_of(10, AttemptId(1, 1), TENSORS, rank=exchange.rank)).committed

    def resume(exchange: Exchange) -> Any:
        return bench.attempt(1, 2, exchange).restore()

    world(3, train)
    found = world(2, resume)
    assert [one.step for one in found] == [10, 10]
    assert content(found[0].loaded) == TENSORS
    own = {f"rank-{rank}.{kind}" for rank in range(3) for kind in ("json", "safetensors", "slices")}
    assert {name for name in bench.files() if name.startswith("step-10")} == {
        f"step-10.g1.a1/{name}" for name in {*own, "MANIFEST.json", "CONTENT"}
    }


def test_retention_keeps_the_newest_checkpoints(bench: Bench) -> None:
    engine = bench.resumed(1, 1, keep_last=2)
    for step in (10, 20, 30, 40):
        assert engine.save(snapshot(step, AttemptId(1, 1))).committed
    assert bench.names() == {"step-30.g1.a1", "step-40.g1.a1"}


def test_checkpoints_build_on_earlier_ones(bench: Bench, content: Callable[..., dict[str, bytes]]) -> None:
    engine = bench.resumed(1, 1, full_every=4)
    tensors = {"w": bytearray(TENSORS["w"])}
    for step in (1, 2, 3):
        tensors["w"][step] ^= 1
        assert engine.save(snapshot_of(step, AttemptId(1, 1), {"w": bytes(tensors["w"])})).committed
    newest = bench.store.manifest(CheckpointName(step=3, attempt_id=AttemptId(1, 1)))
    assert newest.depends_on == {"step-1.g1.a1"}
    assert content(bench.attempt(1, 2).restore().loaded) == {"w": bytes(tensors["w"])}


# Claims


def test_a_claim_fences_the_attempt_before_it(bench: Bench) -> None:
    zombie = bench.resumed(1, 1)
    assert zombie.save(snapshot(10, AttemptId(1, 1))).committed
    bench.resumed(1, 2)
    assert zombie.save(snapshot(20, AttemptId(1, 1))).committed, "nothing stops it, and nobody reads it"
    assert bench.attempt(1, 3).restore().step == 10
    assert [claim.attempt_id for claim in bench.store.claims()] == [AttemptId(1, 1), AttemptId(1, 2)]


def test_two_processes_cannot_claim_one_attempt(bench: Bench) -> None:
    bench.store.write_claim(Claim(attempt_id=AttemptId(1, 1), job_uid="job-1", publication="p1", from_step=0))
    other = Claim(attempt_id=AttemptId(1, 1), job_uid="job-2", publication="p1", from_step=0)
    with pytest.raises(ClaimError, match=r"claims/1\.1\.json exists"):
        bench.store.write_claim(other)


def test_a_second_job_on_the_same_prefix_is_refused(bench: Bench) -> None:
    bench.store.write_claim(Claim(attempt_id=AttemptId(7, 1), job_uid="other", publication="p", from_step=0))
    bench.monkeypatch.setattr(CheckpointManager, "restore", lambda self: None)
    engine = bench.attempt(7, 1)
    with pytest.raises(ForeignClaimError, match="another job or operator saves there"):
        engine.claim(step=0, attempt_id=None)


def test_a_base_that_was_deleted_leaves_no_claim(bench: Bench) -> None:
    zombie = bench.resumed(1, 1, keep_last=1)
    zombie.save(snapshot(10, AttemptId(1, 1)))
    late = bench.attempt(1, 2)
    found = late.restore()
    zombie.save(snapshot(20, AttemptId(1, 1)))
    with pytest.raises(ClaimError, match=r"step-10\.g1\.a1 .* was deleted after this attempt read it"):
        late.claim(step=found.step, attempt_id=found.attempt_id)
    assert [claim.attempt_id for claim in bench.store.claims()] == [AttemptId(1, 1)]


def test_runs_without_an_operator_have_rising_generations(bench: Bench) -> None:
    first = attempt_by_hand(bench.store, ALONE)
    bench.resumed(first.attempt_id.generation, 1)
    assert attempt_by_hand(bench.store, ALONE).attempt_id == AttemptId(2, 1)


# Failures


@pytest.fixture
def proxy(s3: Any) -> Any:
    with faults(s3.url) as running:
        yield running


@pytest.fixture
def through(s3_settings: Any, proxy: Proxy) -> ObjectStore:
    """The same store behind a proxy, with two tries of each request."""
    settings = replace(s3_settings, endpoint=proxy.url, attempts=2)
    return ObjectStore(S3Bucket(settings), settings.prefix)


def test_a_save_that_fails_on_one_rank_leaves_nothing(
    bench: Bench, world: Callable[..., list[Any]], proxy: Proxy, through: ObjectStore
) -> None:
    def refuses(request: Request) -> Answer | None:
        bad = request.method == "PUT" and "rank-1.safetensors" in request.target
        return Answer(status=503, code="SlowDown") if bad else None

    def train(exchange: Exchange) -> Any:
        engine = bench.resumed(1, 1, exchange, store=through)
        exchange.gather(None)
        if exchange.rank == 0:
            proxy.plan = refuses
        exchange.gather(None)
        failed = engine.save(snapshot_of(10, AttemptId(1, 1), TENSORS, rank=exchange.rank))
        left = exchange.share(sorted(bench.files()) if exchange.rank == 0 else None)
        exchange.gather(None)
        proxy.heal()
        exchange.gather(None)
        return failed, left, engine.save(snapshot_of(10, AttemptId(1, 1), TENSORS, rank=exchange.rank))

    for failed, left, repeated in world(2, train):
        assert (failed.committed, failed.cause) == (False, "Throttled")
        assert "rank 1: " in failed.message
        assert left == ["claims/1.1.json"]
        assert repeated.committed
    assert bench.names() == {"step-10.g1.a1"}


def test_weights_that_are_not_finite_are_not_published(bench: Bench) -> None:
    values = np.ones(1000, dtype=np.float32)
    values[17] = np.nan
    made = snapshot_of(10, AttemptId(1, 1), {"w": values.tobytes()})
    made = replace(
        made,
        specs=[TensorSpec(name="w", dtype="F32", shape=(1000,))],
        read=lambda piece: values[piece.start[0] : piece.start[0] + piece.shape[0]].tobytes(),
        weights=frozenset({"w"}),
    )
    result = bench.resumed(1, 1).save(made)
    assert (result.committed, result.cause) == (False, "NonFinite"), result.message
    assert bench.files() == {"claims/1.1.json"}


def test_a_rank_with_its_state_in_memory_waits_for_the_store(
    bench: Bench, proxy: Proxy, through: ObjectStore
) -> None:
    bench.resumed(1, 1).save(snapshot(10, AttemptId(1, 1)))
    survivor = bench.attempt(1, 2, store=through)
    proxy.plan = lambda _: Answer(status=503, code="SlowDown")
    waited: list[None] = []

    def waits() -> None:
        waited.append(None)
        proxy.heal()

    assert survivor.newest(waits=waits) == CheckpointName(step=10, attempt_id=AttemptId(1, 1))
    assert waited, "it was told that the rank waits"
    proxy.plan = lambda _: Answer(status=503, code="SlowDown")
    survivor.claim(step=12, attempt_id=AttemptId(1, 1), waits=waits)
    assert len(waited) == 2
    assert [claim.from_step for claim in bench.store.claims()] == [0, 12]


def test_a_rank_without_a_state_does_not_start_over(bench: Bench, proxy: Proxy, through: ObjectStore) -> None:
    bench.resumed(1, 1).save(snapshot(10, AttemptId(1, 1)))
    proxy.plan = lambda _: Answer(status=503, code="SlowDown")
    with pytest.raises(UnavailableError, match="asks for fewer requests"):
        bench.attempt(1, 2, store=through).restore()


def test_a_restore_waits_for_the_end_of_an_outage(bench: Bench, proxy: Proxy, through: ObjectStore) -> None:
    bench.resumed(1, 1).save(snapshot(10, AttemptId(1, 1)))
    proxy.plan = lambda _: Answer(status=503, code="SlowDown")
    assert bench.attempt(1, 2, store=through).restore(waits=proxy.heal).step == 10


def test_a_restore_does_not_wait_for_credentials(bench: Bench, proxy: Proxy, through: ObjectStore) -> None:
    proxy.plan = lambda _: Answer(status=403, code="AccessDenied")
    with pytest.raises(UnavailableError, match="the credentials lack permissions"):
        bench.attempt(1, 1, store=through).restore(waits=proxy.heal)


# A kill at any request


class _KilledError(BaseException):
    """The end of the process."""


class _Killed:
    """A bucket of a process that ends at its request number `at`, before or after the server has carried it out."""

    def __init__(self, bucket: Any, at: int, *, carried_out: bool) -> None:
        self._bucket, self._left, self._carried_out = bucket, at, carried_out

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bucket, name)
        return self._request(found) if callable(found) else found

    def _request(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0 or (self._left == 0 and not self._carried_out):
                raise _KilledError
            answer = act(*arguments)
            if self._left == 0:
                raise _KilledError
            return answer

        return request


@pytest.mark.parametrize("carried_out", [False, True], ids=["before", "after"])
def test_a_kill_at_any_request_costs_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, content: Callable[..., dict[str, bytes]], carried_out: bool
) -> None:
    """The next attempt reads the newest step that was reported, or the one whose report was lost."""
    states = {step: {"w": bytes([step]) * 300_000} for step in (10, 20, 30)}

    def train(bench: Bench, store: ObjectStore, reported: list[int]) -> None:
        engine = bench.resumed(1, 1, store=store, keep_last=2)
        for step, tensors in states.items():
            if engine.save(snapshot_of(step, AttemptId(1, 1), tensors)).committed:
                reported.append(step)

    for at in range(1, 200):
        bucket = FsspecBucket(f"memory://{uuid4().hex}", 4)
        bench, reported = Bench(monkeypatch, ObjectStore(bucket, "job")), []
        try:
            train(bench, ObjectStore(_Killed(bucket, at, carried_out=carried_out), "job"), reported)
        except _KilledError:
            pass
        else:
            assert at > 40, "the process reached its end: every request before was tried"
            return
        second = bench.attempt(1, 2)
        found = second.restore()
        newest = max(reported, default=0)
        assert found.step in (newest, newest + 10), f"killed at request {at}"
        if found.loaded is not None:
            assert content(found.loaded) == states[found.step]
        second.claim(step=found.step, attempt_id=found.attempt_id)
        folders = {key.partition("/")[0] for key in bench.files()} - {"claims"}
        assert folders == bench.names(), f"killed at request {at}: unfinished files are removed"
    raise AssertionError("the process never reached its end")
