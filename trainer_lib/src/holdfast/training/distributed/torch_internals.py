"""All uses of torch's private interface in a rank, so that a new release of torch affects one file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
    _register_process_group,
)

__all__ = ["PrefixStore", "ProcessGroup", "ProcessGroupGloo", "Store", "TCPStore"]

# Process groups


def gloo_options(timeout: timedelta, devices: list[Any]) -> Any:
    """Return options for a `ProcessGroupGloo` that listens on these devices."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = devices
    return options


def nccl_options(timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def all_gather(group: Any, output: torch.Tensor, part: torch.Tensor) -> Any:
    """Begin to gather flat parts into one flat tensor."""
    return group._allgather_base(output, part)


def reduce_scatter(group: Any, output: torch.Tensor, parts: torch.Tensor) -> Any:
    """Begin to sum one flat tensor over all ranks. Each rank gets its part."""
    return group._reduce_scatter_base(output, parts)


# FSDP2


def mesh_over(group: ProcessGroup, name: Any, device: str) -> Any:
    """Return a one-dimensional mesh over a custom process group, in which this process is rank 0."""
    from torch.distributed.device_mesh import DeviceMesh

    _register_process_group(name, group)
    mesh = DeviceMesh(device, torch.arange(group.size(), device="cpu"), _init_backend=False, _rank=0)
    mesh._dim_group_names = [name]
    mesh._pg_registry[name] = group
    return mesh


def move_to(mesh: Any, rank: int) -> None:
    """Change this process's rank in the mesh."""
    mesh._rank = rank


def is_root(module: Any) -> bool:
    """Return whether forward was called on this sharded module itself; False before the first forward."""
    return bool(module._get_fsdp_state()._is_root)


def fsdp_parameters(module: Any) -> Iterator[Any]:
    """Yield FSDP2's own records of a module's sharded parameters."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        yield from group.fsdp_params


def gathered(parameter: Any) -> Any:
    """Return a parameter's gathered tensor; None before the first forward."""
    return getattr(parameter, "_unsharded_param", None)


def drop_gathered_gradient(parameter: Any) -> None:
    """Drop the gradient that an interrupted backward left on a gathered parameter. `reset_iter_state` keeps it."""
    whole = gathered(parameter)
    if whole is not None:
        whole.grad = None
    parameter.unsharded_accumulated_grad = None


def whole_length(parameter: Any) -> int:
    """Return the number of rows of a parameter before sharding."""
    return int(parameter._orig_size[0])


def hold_rows(parameter: Any, begin: int, end: int) -> None:
    """Make a parameter hold these rows of the complete one, filled with zeros."""
    dtype, device = parameter.sharded_param.dtype, parameter.device
    padded = torch.zeros(parameter.padded_sharded_param_size, dtype=dtype, device=device)
    parameter._sharded_param_data = padded.view(-1)
    parameter.sharded_size = torch.Size([end - begin, *parameter._orig_size[1:]])
    parameter.sharded_param._local_tensor = padded[: end - begin]
