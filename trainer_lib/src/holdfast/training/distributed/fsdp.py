"""Models that torch's FSDP2 shards over the ranks of a shard group, in changing worlds.

FSDP2 receives a mesh whose process group has only a size and this rank's place. The data is sent over the groups of
the attempt, which FSDP2 does not know. A lost peer therefore leaves nothing in FSDP2 to rebuild. FSDP2 calls its
collectives in the forward and backward of user code, where they must not raise. The first error therefore cancels the
attempt for this rank (`CancelToken`). From then on, the collectives return zeros, until `job.step` finds that the
attempt is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch

from holdfast.checkpoint.format.shard_layout import rows
from holdfast.checkpoint.state.dtensor import is_sharded, local, sharded
from holdfast.checkpoint.state.unflatten import rows_in
from holdfast.core.errors import PeerLostError, StateError, UsageError
from holdfast.telemetry.activity import Activity, Meter
from holdfast.training.distributed import torch_internals
from holdfast.training.distributed.process_group import Group
from holdfast.training.distributed.torch_internals import ProcessGroup

_numbers = count()


class _PlaceholderGroup(ProcessGroup):
    """A dummy process group for FSDP2: a rank and a size, without communication."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self.shard = 0
        self._size = size
        self._name: Any = f"holdfast-shards-{next(_numbers)}"

    def rank(self) -> int:
        return self.shard

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> Any:
        return self._name


class Sharding:
    """The sharded modules of a script, and the communication of their current shard group."""

    def __init__(self, size: int, device: torch.device, meter: Meter) -> None:
        self.size = size
        self.device = device
        self._meter = meter
        self._place = _PlaceholderGroup(size)
        self.mesh = torch_internals.mesh_over(self._place, self._place.group_name, device.type)
        self._modules: list[Any] = []
        # The complete parameters as the script created them, until the first world decides which rank holds which
        # shard.
        self._whole: dict[torch.Tensor, torch.Tensor] | None = {}
        self._shard_group: Group | None = None
        self._watched: set[int] = set()
        self._used: set[torch.Tensor] = set()

    @property
    def shard(self) -> int:
        """The shard on this rank."""
        return self._place.shard

    def add(self, module: torch.nn.Module, options: dict[str, Any]) -> None:
        """Shard those parameters of a module that are not sharded yet."""
        from torch.distributed.fsdp import fully_shard

        if self._whole is None:
            raise UsageError("call job.fully_shard before job.manage()")
        before = [(part, name, one) for part in module.modules() for name, one in part._parameters.items()]
        if any(one is not None and one.is_meta for _, _, one in before):
            raise UsageError("a parameter is on the meta device: initialize its weights before job.fully_shard")
        fully_shard(module, mesh=self.mesh, **options)
        for part, name, one in before:
            if one is not None and not is_sharded(one):
                self._whole[part._parameters[name]] = one.detach()  # type: ignore[index]
        self._modules.append(module)
        _configure(module, self)

    def attach(self, shard_group: Group) -> None:
        """Use this group for the shard group."""
        self._shard_group = shard_group

    def become(self, shard: int) -> None:
        """Hold another shard. Its values are zeros until they are loaded."""
        if shard == self.shard:
            return
        self.reset()
        self._place.shard = shard
        torch_internals.move_to(self.mesh, shard)
        for one in self._fsdp_parameters():
            torch_internals.hold_rows(one, *rows(torch_internals.whole_length(one), self.size, shard))

    def reset(self) -> None:
        """Reset an interrupted step: free gathered parameters and their gradients, and expect no backward."""
        self._used.clear()
        for module in self._roots():
            module.reset_iter_state()
        for one in self._fsdp_parameters():
            torch_internals.drop_gathered_gradient(one)

    def start_over(self, group: Group) -> None:
        """Take this rank's rows of rank 0's weights."""
        if self._whole is None:
            raise StateError(
                "all ranks that held the state of a shard are lost, and there is no checkpoint: this process "
                "cannot start over. Start it again, and set checkpoint_dir"
            )
        with torch.no_grad():
            for parameter, whole in self._whole.items():
                group.broadcast_(whole, 0)
                begin, end = rows(len(whole), self.size, self.shard)
                local(parameter).copy_(whole[begin:end])

    def watch(self) -> None:
        """Record which parameters get a gradient in the next backward, because FSDP2 replaces a
        missing one by zeros.
        """
        for one in self._fsdp_parameters():
            whole = torch_internals.gathered(one)
            if whole is not None and id(whole) not in self._watched:
                self._watched.add(id(whole))
                whole.register_post_accumulate_grad_hook(partial(self._use, one.sharded_param))

    def used(self, parameters: Iterable[torch.Tensor]) -> list[bool]:
        """Return which parameters got a gradient on this rank since the last call."""
        used, self._used = self._used, set()
        return [parameter in used for parameter in parameters]

    def settled(self) -> None:
        """Free the script's initial weights after the first step or a restore."""
        self._whole = None

    def part(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a sharded tensor of a global shape, from the complete tensor or from this rank's rows."""
        if tuple(tensor.shape) == tuple(shape):
            begin, end = rows(shape[0], self.size, self.shard)
            tensor = tensor[begin:end].clone()
        whole = torch.empty(tuple(shape), device="meta")
        return sharded(tensor.to(self.device), self.mesh, whole.shape, whole.stride())

    def wanted(self, tree: Any, shard: int) -> dict[str, tuple[int, int]]:
        """Return the rows of a checkpoint's sharded tensors that this shard needs."""
        return {name: rows(length, self.size, shard) for name, length in rows_in(tree)}

    # Called by FSDP2

    def gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """Gather the parts of the shard group, in order; zeros if a rank is lost."""
        shard_group = self._reachable()
        try:
            with self._waiting():
                shard_group.launch_gather(output, part.clone()).wait()
        except PeerLostError as error:
            shard_group.cancel.set(str(error))
            output.zero_()

    def scatter(self, output: torch.Tensor, parts: torch.Tensor) -> None:
        """Return this rank's part of the sum over the shard group; zeros if a rank is lost."""
        shard_group = self._reachable()
        try:
            with self._waiting():
                shard_group.launch_scatter(output, parts).wait()
        except PeerLostError as error:
            shard_group.cancel.set(str(error))
            output.zero_()

    # Internal

    def _waiting(self) -> AbstractContextManager[None]:
        """Return a context for a wait in forward or backward, which does not count as a hang of this rank."""
        computes = self._meter.activity is Activity.COMPUTE
        return self._meter.during(Activity.AVERAGE) if computes else nullcontext()

    def _use(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        self._used.add(parameter)

    def _reachable(self) -> Group:
        if self._shard_group is None:
            raise UsageError(
                "the model has only one shard of its weights: call job.manage(model=…, optimizer=…) before you use it"
            )
        return self._shard_group

    def _roots(self) -> Iterator[Any]:
        """Return the modules on which forward was called; none before the first call."""
        return (module for module in self._modules if torch_internals.is_root(module))

    def _fsdp_parameters(self) -> Iterator[Any]:
        for module in self._modules:
            yield from torch_internals.fsdp_parameters(module)


class _Gather:
    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._sharding.gather(output_tensor, input_tensor)


class _Scatter(_Gather):
    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._sharding.scatter(output_tensor, input_tensor)


def _configure(module: Any, sharding: Sharding) -> None:
    """Configure sums instead of means, because gradients are weighted, and the same collectives on all ranks."""
    module.set_custom_all_gather(_Gather(sharding))
    module.set_custom_reduce_scatter(_Scatter(sharding))
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True)


def check_sharded(sharding: Sharding | None, trained: Iterable[torch.nn.Parameter], scaler: Any) -> None:
    """Check that either all trained parameters are sharded by `job.fully_shard`, or none."""
    wanted = [parameter for parameter in trained if parameter.requires_grad]
    meshes = [getattr(parameter, "device_mesh", None) for parameter in wanted]
    if any(mesh is not None and (sharding is None or mesh != sharding.mesh) for mesh in meshes):
        raise UsageError("a parameter is a DTensor of the script's own: shard the model with job.fully_shard")
    if sharding is None:
        return
    if None in meshes:
        raise UsageError(
            "some parameters are sharded and others are not: call job.fully_shard on the complete model last, "
            "before you create the optimizer"
        )
    if scaler is not None:
        raise UsageError("a sharded model cannot have a GradScaler: train in bfloat16, with mp_policy")


def whole_norms(own: Sequence[float], shard_group: Group) -> list[float]:
    """Return norms over all shards, with the same bits on every rank of the group; infinite if a shard's is NaN."""
    squares = torch.full((len(own), shard_group.size), -1.0, dtype=torch.float64, device="cpu")
    for index, norm in enumerate(own):
        squares[index, shard_group.rank] = norm * norm if math.isfinite(norm) else math.inf
    shard_group.agree_(squares)
    return [math.sqrt(sum(shards)) for shards in squares.tolist()]
