"""A pod and its node's exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast_sidecar.protocol.report import Pod
from holdfast_testbed.fakes.dcgm import ExporterServer, FakeGpu, FakeNode

POD = Pod(namespace="ml", name="gpt-w0", uid="uid-w0", node="node-1")
UUIDS = (
    "GPU-3f1c9a52-7d0e-4b6a-9c11-0d5e8a7b2c44",
    "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",
    "GPU-a8394b51-c086-568a-9f1a-c1e1c934c44c",
)


@pytest.fixture
def pod() -> Pod:
    return POD


@pytest.fixture
def gpu_of() -> Callable[..., FakeGpu]:
    """A GPU by its number, of this pod unless said otherwise."""

    def make(index: int = 0, pod: str = POD.name, **changes: Any) -> FakeGpu:
        return FakeGpu(index=index, uuid=UUIDS[index], pod=pod, **changes)

    return make


@pytest.fixture
def node_of() -> Callable[..., FakeNode]:
    return lambda *gpus, **changes: FakeNode(gpus=list(gpus), **changes)


@pytest.fixture
def exporter(node_of: Callable[..., FakeNode], gpu_of: Callable[..., FakeGpu]) -> Iterator[ExporterServer]:
    """A node with a GPU of this pod and one of another's."""
    with ExporterServer(node_of(gpu_of(0), gpu_of(1, pod="another"))) as server:
        yield server
