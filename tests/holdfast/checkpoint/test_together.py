"""Ranks of a script's own process group save their shards together, each row once, and load them in other shapes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open

from holdfast.checkpoint.names import CommitName
from holdfast.checkpoint.tier import read_manifest
from holdfast.worlds import Pair

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"


def test_shards_of_a_mesh_are_saved_once_and_load_into_other_meshes(
    tmp_path: Path, together: Callable[..., list[str]]
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    together([[sys.executable, SCRIPT, tmp_path]] * 4, [{**environment, "RANK": str(rank)} for rank in range(4)])
    manifest = read_manifest(tmp_path / "tier", CommitName(step=3, pair=Pair(0, 1)))
    assert manifest.mesh == {"replica": 2, "shard": 2}
    assert [chunk.shape for chunk in manifest.tensors["model/0.weight"].chunks] == [(3, 4), (3, 4)]
    names = []
    for rank in range(4):
        with safe_open(tmp_path / "tier" / "step-3.g0.a1" / f"rank-{rank}.safetensors", "pt") as file:
            names += file.keys()
    assert names.count("model/0.weight") == 2
