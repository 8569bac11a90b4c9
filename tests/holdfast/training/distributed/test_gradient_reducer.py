"""Gradient averages: their results, the faults that they survive, and the errors that they report with a fix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from holdfast.core.errors import PeerLostError, UsageError
from holdfast.training.distributed.cancel_token import CancelToken
from holdfast.training.distributed.process_group import Group, Pending
from holdfast.training.step.gradient_reducer import Reducer, check_devices

CPU = torch.device("cpu")


class Landed:
    def wait(self) -> None:
        return None


class Twin(Group):
    """A world of two in which the other rank has equal gradients. It remembers what was launched."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=2, device=CPU, cancel=CancelToken())
        self.sums: list[torch.Tensor] = []
        self.failing = False

    def launch_sum(self, tensor: torch.Tensor) -> Pending:
        if self.failing:
            raise PeerLostError("the twin is gone")
        self.sums.append(tensor)
        tensor.mul_(2)
        return Landed()

    def launch_max(self, tensor: torch.Tensor) -> Pending:
        return Landed()


class Step:
    """One step of a model in which every loss is one micro-batch."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def __call__(self, *losses: torch.Tensor) -> list[torch.Tensor | None]:
        self.backward(*losses)
        self.finish()
        return [parameter.grad for parameter in self.reducer.parameters]

    def backward(self, *losses: torch.Tensor) -> None:
        for loss in losses:
            self.reducer.arm(last=loss is losses[-1])
            loss.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        touched = self.reducer.touched()
        self.reducer.finish([0.0])
        self.reducer.adopt(touched)


def _attached(parameters: Sequence[torch.nn.Parameter], **options: Any) -> tuple[Step, Twin]:
    reducer, twin = Reducer(parameters, **options), Twin()
    reducer.attach(twin)
    return Step(reducer), twin


def _parameter(*numbers: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(numbers))


def _numbers(gradients: Sequence[torch.Tensor | None]) -> list[list[float] | None]:
    return [None if gradient is None else gradient.tolist() for gradient in gradients]


# With real ranks


def test_uneven_batch_shares_average_to_the_full_gradient(members: Any) -> None:
    torch.manual_seed(0)
    body, extra = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
    samples = torch.arange(48.0).reshape(8, 6) / 48
    hidden = torch.cat([extra(body(samples[:3])), body(samples[3:])])
    hidden.pow(2).mean(dim=1).mean().backward()
    wanted = [parameter.grad for parameter in (*body.parameters(), *extra.parameters())]
    ranks = members.play("weighted", size=3)
    for heard in ranks:
        assert heard["gradients"] == ranks[0]["gradients"]
        assert heard["agreed"] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
        for gradient, right in zip(heard["gradients"], wanted, strict=False):
            torch.testing.assert_close(torch.tensor(gradient), right)
        assert heard["gradients"][4:] == [None, None], "nobody used the last layer"
    assert ranks[1]["touched"] == [True, True, False, False, False, False]


# Order


def test_buckets_are_launched_in_one_order_for_any_backward() -> None:
    """A different order of use on each rank must not change what they launch."""
    launched = []
    for order in itertools.permutations(range(3)):
        parameters = [_parameter(1.0), _parameter(2.0), _parameter(3.0)]
        step, twin = _attached(parameters, bucket_bytes=4)
        value = torch.zeros(1)
        for index in order:
            value = torch.tanh(value + parameters[index])
        step(value.sum())
        launched.append([tensor.data_ptr() for tensor in step.reducer._flats] == [t.data_ptr() for t in twin.sums])
    assert all(launched)


def test_only_the_last_micro_batch_launches() -> None:
    parameter = _parameter(1.0)
    step, twin = _attached([parameter])
    step.reducer.arm(last=False)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert not twin.sums
    step.reducer.arm(last=True)
    parameter.sum().backward()  # type: ignore[no-untyped-call]
    assert len(twin.sums) == 1


def test_a_parameter_of_an_earlier_micro_batch_counts() -> None:
    first, second = _parameter(1.0), _parameter(1.0)
    step, _ = _attached([first, second])
    assert _numbers(step((first * 3).sum(), (second * 5).sum())) == [[6.0], [10.0]]


# Kinds of parameters


def test_a_shared_parameter_is_averaged_once() -> None:
    shared = _parameter(2.0)
    step, twin = _attached([shared, shared])
    assert _numbers(step((shared * 3 + shared * 4).sum())) == [[14.0]]
    assert len(twin.sums) == 1


def test_an_unused_parameter_counts_as_zeros_in_every_step() -> None:
    used, sometimes = _parameter(1.0), _parameter(1.0)
    step, twin = _attached([used, sometimes])
    step((used * sometimes).sum())
    step.reducer.clear()
    gradients = step(used.sum())
    assert _numbers(gradients) == [[2.0], None]
    assert float(twin.sums[-1].sum()) == 2.0, "the last step's average was sent again"


def test_a_complex_parameter_is_averaged() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64))
    step, _ = _attached([parameter, _parameter(1.0)])
    (parameter * (2 + 1j)).real.sum().backward()
    wanted = parameter.grad
    step.reducer.clear()
    gradient, _ = step((parameter * (2 + 1j)).real.sum())
    assert wanted is not None
    assert gradient is not None
    torch.testing.assert_close(gradient, wanted * 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_each_dtype_travel_in_separate_buckets(dtype: torch.dtype) -> None:
    parameters = [_parameter(1.0), torch.nn.Parameter(torch.ones(3, dtype=dtype)), _parameter(1.0)]
    step, twin = _attached(parameters)
    step(sum((p.sum().float() for p in parameters), torch.zeros(())))
    assert [tensor.dtype for tensor in twin.sums] == [torch.float32, dtype]


def test_gradients_keep_the_memory_format_of_their_parameter() -> None:
    layer = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    step, _ = _attached([*layer.parameters()])
    images = torch.arange(48.0).reshape(1, 3, 4, 4)
    layer(images).pow(2).sum().backward()
    wanted = [parameter.grad for parameter in layer.parameters()]
    step.reducer.clear()
    gradients = step(layer(images).pow(2).sum())
    assert gradients[0] is not None
    assert gradients[0].stride() == layer.weight.stride()
    for gradient, right in zip(gradients, wanted, strict=True):
        assert right is not None
        torch.testing.assert_close(gradient, right * 2)


def test_integer_buffers_and_frozen_parameters_take_no_part() -> None:
    layer = torch.nn.BatchNorm1d(3)
    layer.bias.requires_grad_(False)
    step, _ = _attached([*layer.parameters()])
    step(layer(torch.randn(4, 3)).pow(3).sum())
    assert step.reducer.parameters == (layer.weight,)
    assert int(layer.num_batches_tracked or 0) == 1


def test_a_parameter_may_be_frozen_and_thawed_in_mid_run() -> None:
    head, body = _parameter(1.0), _parameter(1.0)
    step, _ = _attached([head, body])
    body.requires_grad_(False)
    assert _numbers(step((head * body).sum())) == [[2.0], None]
    step.reducer.clear()
    body.requires_grad_(True)
    assert _numbers(step((head * body).sum())) == [[2.0], [2.0]]


# After the average


def test_norm_and_clipping_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 7)
    step, _ = _attached([*layer.parameters()])
    gradients = [g for g in step(layer(torch.randn(3, 5)).pow(2).sum()) if g is not None]
    wanted = float(torch.nn.utils.get_total_norm(gradients))
    (norm,) = step.reducer.norms()
    assert [norm] == step.reducer.norms(recompute=True) == pytest.approx([wanted])
    step.reducer.clip(wanted / 4, norm)
    for recompute in (False, True):
        assert step.reducer.norms(recompute=recompute) == pytest.approx([wanted / 4])
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(wanted / 4)


def test_norms_of_groups_are_those_of_torch() -> None:
    torch.manual_seed(0)
    body, head = torch.nn.Linear(5, 7), torch.nn.Linear(7, 2)
    frozen, still, unused = (
        _parameter(1.0).requires_grad_(False),
        _parameter(2.0).requires_grad_(False),
        _parameter(3.0),
    )
    small = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    groups: list[list[torch.nn.Parameter]] = [
        [body.weight, frozen, head.bias, small],
        [head.weight, body.bias],
        [unused],
        [still],
    ]
    optimizer = torch.optim.SGD([{"params": group} for group in groups])
    step, _ = _attached([*body.parameters(), *head.parameters(), frozen, still, unused, small], optimizer=optimizer)
    loss = head(body(torch.randn(3, 5))).pow(2).sum() + (small * 20_000).sum()
    step(loss)
    wanted = [_total(group) for group in groups]
    norm, *found = step.reducer.norms(of_groups=True)
    assert found == pytest.approx(wanted)
    assert [norm] == step.reducer.norms(), "the sum over all groups does not depend on them"
    assert found[0] > torch.finfo(torch.float16).max, "a norm of small numbers may be larger than they can be"
    assert found[2:] == [0.0, 0.0]
    step.reducer.scale(0.5)
    assert step.reducer.norms(of_groups=True) == pytest.approx([norm / 2, *(one / 2 for one in wanted)])


def _total(group: Sequence[torch.nn.Parameter]) -> float:
    return float(torch.nn.utils.get_total_norm([one.grad.float() for one in group if one.grad is not None]))


def test_norm_of_a_group_with_a_complex_parameter() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64))
    step, _ = _attached([parameter], optimizer=torch.optim.SGD([parameter]))
    (gradient,) = step(parameter.abs().pow(2).sum())
    assert gradient is not None
    assert step.reducer.norms(of_groups=True) == pytest.approx([float(torch.linalg.vector_norm(gradient))] * 2)


def test_averages_in_doubt_survive_into_the_next_attempt() -> None:
    parameter = _parameter(1.0)
    step, _ = _attached([parameter])
    step((parameter * 3).sum())
    step.reducer.attach(Twin())
    step.reducer.adopt([True])
    assert _numbers([parameter.grad]) == [[6.0]]
    step.reducer.clear()
    assert parameter.grad is None


def test_a_discarded_step_leaves_nothing_and_gets_other_buckets() -> None:
    """An aborted collective may write into its buffer at any later time."""
    parameter = _parameter(1.0)
    step, twin = _attached([parameter])
    step.backward((parameter * 3).sum())
    step.reducer.discard()
    assert parameter.grad is None
    gradients = step((parameter * 5).sum())
    twin.sums[0].fill_(1000.0)
    assert _numbers(gradients) == [[10.0]]


def test_after_the_first_error_nothing_is_launched() -> None:
    """`finish` raises the error."""
    parameters = [_parameter(1.0) for _ in range(3)]
    step, twin = _attached(parameters, bucket_bytes=4)
    twin.failing = True
    step.backward(torch.cat([*parameters]).sum())
    twin.failing = False
    with pytest.raises(PeerLostError, match="the twin is gone"):
        step.finish()
    assert not twin.sums
    step.reducer.discard()
    assert _numbers(step(torch.cat([*parameters]).sum())) == [[2.0]] * 3


def test_backward_ends_at_the_next_gradient_after_the_attempt() -> None:
    """The peers cannot form the next world without this rank, and the backward of a large model takes seconds."""
    first, second = _parameter(1.0), _parameter(2.0)
    step, twin = _attached([first, second])
    loss = second.sum() * (first * 3).sum()
    for parameter in (first, second):  # whichever comes first
        parameter.register_post_accumulate_grad_hook(lambda _: twin.cancel.set("a peer is lost"))  # type: ignore[no-untyped-call]
    with step.reducer.leaving(), pytest.raises(PeerLostError, match="a peer is lost"):
        step.backward(loss)
    (first * second).sum().backward()  # type: ignore[no-untyped-call]  # of the script's own
    step.reducer.discard()
    step.reducer.attach(Twin())
    assert _numbers(step(second.sum() * (first * 3).sum())) == [[12.0], [6.0]]


# Refusals, with the fix


def test_a_sparse_gradient_is_refused_after_backward() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    step, _ = _attached([*table.parameters()])
    with pytest.raises(UsageError, match="sparse=False"):
        step(table(torch.tensor([1])).sum())


def test_a_gradient_that_comes_twice_in_one_backward_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    step, _ = _attached([*layer.parameters()], bucket_bytes=4)
    inside = torch.ones(1, 2, requires_grad=True)
    once = checkpoint(layer, inside, use_reentrant=True)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        step(checkpoint(layer, once, use_reentrant=True).sum())


def test_checkpointed_activations_are_fine() -> None:
    layer = torch.nn.Linear(2, 2)
    step, _ = _attached([*layer.parameters()], bucket_bytes=4)
    inside = torch.ones(1, 2)
    layer(layer(inside)).sum().backward()
    wanted = [parameter.grad for parameter in layer.parameters()]
    step.reducer.clear()
    gradients = step(checkpoint(layer, checkpoint(layer, inside, use_reentrant=False), use_reentrant=False).sum())
    for gradient, right in zip(gradients, wanted, strict=True):
        assert right is not None
        torch.testing.assert_close(gradient, right * 2)


def test_parameter_frozen_from_the_start_cannot_be_unfrozen() -> None:
    parameter = _parameter(1.0).requires_grad_(False)
    step, _ = _attached([parameter, _parameter(1.0)])
    parameter.requires_grad_(True)
    with pytest.raises(UsageError, match="freeze it afterwards"):
        step(parameter.sum())


def test_parameter_added_to_the_optimizer_in_mid_run_is_refused() -> None:
    parameter, later = _parameter(1.0), _parameter(1.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    step, _ = _attached([parameter], optimizer=optimizer)
    step(parameter.sum())
    step.reducer.clear()
    optimizer.add_param_group({"params": [later]})
    with pytest.raises(UsageError, match=r"before job\.manage"):
        step(later.sum())


def test_a_model_that_is_converted_in_mid_run_is_refused() -> None:
    layer = torch.nn.Linear(2, 2)
    step, _ = _attached([*layer.parameters()])
    layer.double()
    with pytest.raises(UsageError, match=r"before job\.manage"):
        step(layer(torch.ones(1, 2, dtype=torch.float64)).sum())


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="initialize its weights"):
        Reducer(layer.parameters())


def test_cpu_and_one_accelerator_may_share_a_model() -> None:
    """Two accelerators may not."""
    check_devices([CPU, torch.device("cuda", 0)])
    with pytest.raises(UsageError, match=r"cuda:0, cuda:1.*job\.device"):
        check_devices([torch.device("cuda", 0), torch.device("cuda", 1)])
