"""A real Kubernetes on one Linux machine, without Docker: for tests, for the demo and for manual use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast_testbed.cluster.cluster import Cluster

__all__ = ["Cluster"]


def __getattr__(name: str) -> object:
    """Import the cluster on first use, because the set-up imports this package before any dependency is installed."""
    if name != "Cluster":
        raise AttributeError(name)
    from holdfast_testbed.cluster.cluster import Cluster

    return Cluster
