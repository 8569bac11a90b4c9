"""Ranks of a script's process group save their shards together, each row once, and load them in other layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from holdfast import checkpoint
from holdfast.checkpoint.folder.catalog import list_commits, read_manifest
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.core.attempt import AttemptId

SCRIPTS = Path(__file__).parents[1] / "scripts"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def ranks(size: int) -> list[dict[str, str]]:
    return [{**ENVIRONMENT, "RANK": str(rank)} for rank in range(size)]


@pytest.mark.thorough
def test_mesh_shards_are_saved_once_and_load_into_other_meshes(
    tmp_path: Path, together: Callable[..., list[str]]
) -> None:
    together([[sys.executable, SCRIPTS / "sharded.py", tmp_path]] * 4, ranks(4))
    manifest = read_manifest(tmp_path / "tier", CheckpointName(step=3, attempt_id=AttemptId(0, 1)))
    assert manifest.mesh == {"replica": 2, "shard": 2}
    assert [chunk.shape for chunk in manifest.tensors["model/0.weight"].chunks] == [(3, 4), (3, 4)]
    names = []
    for rank in range(4):
        with safe_open(tmp_path / "tier" / "step-3.g0.a1" / f"rank-{rank}.safetensors", "pt") as file:
            names += file.keys()
    assert names.count("model/0.weight") == 2


@pytest.mark.parametrize("when", ["before", "within"])
def test_save_with_a_lost_rank_fails_and_keeps_the_last_step(
    tmp_path: Path, together: Callable[..., list[str]], when: str
) -> None:
    said, _ = together([[sys.executable, SCRIPTS / "lost_rank.py", tmp_path, when]] * 2, ranks(2))
    assert "a rank of group= is lost" in said
    model = torch.nn.Linear(4, 6)
    found = checkpoint.load(tmp_path / "tier", model=model)
    assert found is not None
    assert found.step == 1
    checkpoint.save(tmp_path / "tier", step=2, model=model)
    assert sorted(map(str, list_commits(tmp_path / "tier"))) == ["step-1.g0.a1", "step-2.g0.a1"]


def test_a_group_without_a_backend_for_cpu_tensors_is_refused(tmp_path: Path) -> None:
    script = """if True:
        import sys, torch, torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
        from holdfast import checkpoint
        dist.Backend.register_backend("accelerators", _create_fake_pg, extended_api=True, devices=["cuda"])
        dist.init_process_group("cuda:accelerators", rank=0, world_size=2, store=FakeStore())
        checkpoint.save(sys.argv[1], step=1, group=dist.group.WORLD, model=torch.nn.Linear(2, 2))
        """
    words = [sys.executable, "-c", script, tmp_path / "tier"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert 'pass torch.distributed.new_group(backend="gloo")' in ran.stderr.splitlines()[-1]
    assert not (tmp_path / "tier").exists()
