"""The rules for NCCL with a simulated communicator, since there is no GPU here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from holdfast.training.distributed.nccl import Nccl, name_of

CPU = torch.device("cpu")


@dataclass
class Work:
    """An operation that ends when the test sets it. Like NCCL's, an abort makes it done and successful."""

    done: bool = False
    right: bool = True

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.right

    def wait(self) -> None:
        return None


@dataclass
class Communicator:
    """A communicator that remembers its operations and the order of its end."""

    works: list[Work] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def allreduce(self, tensors: list[torch.Tensor], op: object) -> Work:
        self.works.append(Work())
        return self.works[-1]

    def abort(self) -> None:
        self.events.append("aborted")
        for work in self.works:
            work.done = True


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    made = Communicator()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: made.events.append("synchronised"))
    return made


def test_an_operation_lands_when_it_is_done(communicator: Communicator) -> None:
    flight = Nccl(communicator, CPU).all_reduce(torch.ones(1), None)
    assert not flight.landed()
    communicator.works[0].done = True
    assert flight.landed()


def test_an_aborted_operation_is_not_taken_for_a_result(communicator: Communicator) -> None:
    group = Nccl(communicator, CPU)
    flight = group.all_reduce(torch.ones(1), None)
    group.abort()
    assert communicator.works[0].is_completed()
    with pytest.raises(RuntimeError, match="aborted"):
        flight.landed()


def test_group_being_left_gives_no_result_before_the_abort(communicator: Communicator) -> None:
    group = Nccl(communicator, CPU)
    flight = group.all_reduce(torch.ones(1), None)
    group.lost = True
    communicator.works[0].done = True
    with pytest.raises(RuntimeError, match="aborted"):
        flight.landed()


def test_an_error_of_the_library_is_raised(communicator: Communicator) -> None:
    flight = Nccl(communicator, CPU).all_reduce(torch.ones(1), None)
    communicator.works[0].done, communicator.works[0].right = True, False
    with pytest.raises(RuntimeError, match="NCCL reported an error"):
        flight.landed()


def test_buffers_in_flight_are_kept_until_no_write_can_happen(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Nccl(communicator, CPU)
    group.all_reduce(torch.ones(1), None)
    kept: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: kept.append(len(group._flying)))
    group.abort()
    assert kept == [1]
    assert not group._flying


def test_the_device_is_synchronised_after_the_abort(communicator: Communicator) -> None:
    Nccl(communicator, CPU).abort()
    assert communicator.events == ["aborted", "synchronised"]


def test_a_rank_on_the_cpu_has_no_gpu_to_name() -> None:
    assert name_of(CPU) == ""
