"""What corruption costs a chain of sparse patches, and what the commands print for one."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from lossy_states import (
    ONE,
    WEIGHT,
    State,
    assert_within,
    manifest,
    moved,
    read,
    save,
    snapshot,
    weights,
)

from holdfast.checkpoint.attempt_info import Attempt
from holdfast.checkpoint.folder import catalog
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.file_names import CheckpointName
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.policy.fencing import Resume
from holdfast.checkpoint.ranks.exchange import SingleRank
from holdfast.checkpoint.restore.lossy_delta import inexactness
from holdfast.checkpoint.restore.search import restore
from holdfast.checkpoint.saving.incremental import Chain
from holdfast.checkpoint.saving.snapshot import Snapshot
from holdfast.checkpoint.stores.folder import FolderStore
from holdfast.checkpoint.tiers.uploader import Uploader, UploadSettings
from holdfast.cli.checkpoints.access.commit_reader import Content
from holdfast.cli.checkpoints.access.progress_bar import progress
from holdfast.cli.checkpoints.copy import copy, lineage
from holdfast.cli.checkpoints.diff import diff
from holdfast.cli.main import main
from holdfast.core.errors import UnknownFormatError

# Losses


def lost(root: Path) -> dict[str, str]:
    return {one.path: one.reason for one in restore(root, SingleRank()).lost}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_patch_that_is_damaged_costs_its_own_commit_alone(lossy: tuple[Path, list[State]]) -> None:
    root, states = lossy
    flip(root / "step-3.g1.a1" / "rank-0.safetensors", 4096 + 9)
    assert lost(root).keys() == {"step-3.g1.a1"}
    assert_within(read(root), states[1], WEIGHT, 1e-3, {"weight"})


def test_missing_base_costs_its_patches_and_restores_older_one(tmp_path: Path) -> None:
    chain, state = Chain(every=2, threshold=1e-3), weights()
    states = {}
    for step in (1, 2, 3, 4):
        states[step] = state = moved(state, 50, 0.3)
        save(tmp_path, step, state, chain)
    assert [manifest(tmp_path, step).version for step in states] == [1, 3, 1, 3]
    shutil.rmtree(tmp_path / "step-3.g1.a1")
    assert lost(tmp_path) == {
        "step-4.g1.a1": "step-3.g1.a1, on which step-4.g1.a1 depends: rank-0.safetensors is missing"
    }
    assert_within(read(tmp_path, 2), states[2], WEIGHT, 1e-3, {"weight"})
    assert read(tmp_path, 1)["weight"].tobytes() == states[1]["weight"].tobytes()


def test_corruption_of_the_only_full_one_leaves_nothing(tmp_path: Path) -> None:
    """The error reports that no checkpoint is left."""
    chain, state = Chain(every=3, threshold=1e-3), weights()
    save(tmp_path, 1, state, chain)
    save(tmp_path, 2, moved(state, 50, 0.3), chain)
    flip(tmp_path / "step-1.g1.a1" / "rank-0.safetensors", 5000)
    found = restore(tmp_path, SingleRank())
    assert found.loaded is None
    assert {one.path for one in found.lost} == {"step-1.g1.a1", "step-2.g1.a1"}


def engine(root: Path, *, keep_last: int = 1, threshold: float = 1e-3) -> CheckpointManager:
    made = CheckpointManager(
        root,
        keep_last=keep_last,
        resume=Resume.ALWAYS,
        on_foreign=lambda _: None,
        full_every=4,
        delta_threshold=threshold,
    )
    made.enter(Attempt(attempt_id=ONE, job_uid="job-1", publication="p", run_id="r"), SingleRank())
    found = made.restore()
    made.claim(step=found.step, attempt_id=found.attempt_id)
    return made


def test_retention_keeps_what_a_patch_stands_on(tmp_path: Path) -> None:
    job, state, seen = engine(tmp_path), weights(), []
    for step in range(1, 7):
        state = moved(state, 50, 0.1 * step)
        assert job.save(snapshot(step, state, WEIGHT, frozenset({"weight"}))).committed
        seen.append(sorted(name.step for name in catalog.list_commits(tmp_path)))
        assert_within(read(tmp_path, step), state, WEIGHT, 1e-3, {"weight"})
    assert all(1 in there for there in seen[:4])
    assert seen[4:] == [[5], [5, 6]]
    assert manifest(tmp_path, 6).version == 3


def test_only_model_weights_may_be_inexact(tmp_path: Path) -> None:
    """The optimizer state and the buffers are exact."""
    torch = pytest.importorskip("torch")
    from holdfast.checkpoint.state.flatten import flatten, trained

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 256).requires_grad_(False)
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    objects = {"model": model, "optimizer": optimizer}
    job, then = engine(tmp_path, keep_last=9, threshold=5e-3), {}
    for step in (1, 2, 3):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        flat = flatten(objects)
        then = {name: tensor.clone() for name, tensor in flat.tensors.items()}
        made = Snapshot(
            name=CheckpointName(step=step, attempt_id=ONE),
            specs=flat.specs,
            read=flat.read,
            fill=flat.fill,
            state={"objects": flat.tree, "counters": {}},
            data=None,
            per_rank={},
            numerics={},
            inexact=trained(objects, flat),
        )
        assert made.inexact == {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias"}
        assert job.save(made).committed
    found = manifest(tmp_path, 3)
    loaded = restore(tmp_path, SingleRank(), step=3).loaded
    assert loaded is not None
    assert found.bounds.keys() <= made.inexact
    assert "model/0.weight" in found.bounds
    for name, tensor in then.items():
        got = torch.frombuffer(bytearray(loaded.tensors[name]), dtype=tensor.dtype).reshape(tensor.shape)
        if name in made.inexact:
            assert float((got.double() - tensor.double()).abs().max()) <= 5e-3
        else:
            assert torch.equal(got, tensor), name


def test_tied_and_wrapped_weights_are_found_and_frozen_are_not() -> None:
    torch = pytest.importorskip("torch")
    from holdfast.checkpoint.state.flatten import flatten, trained

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.still = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
            self.register_buffer("mean", torch.zeros(3))

    objects = {"net": torch.nn.DataParallel(Net()), "other": torch.optim.SGD([torch.zeros(2)])}
    assert trained(objects, flatten(objects)) == {"net/embed.weight"}


# Commands


def test_a_restore_and_show_say_that_a_state_is_not_exact(
    lossy: tuple[Path, list[State]], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = lossy
    with caplog.at_level(logging.WARNING, "holdfast.checkpoint.reader"):
        restore(root, SingleRank())
    said = "1 of 2 tensors are within 0.001 of the saved value, the others are exact"
    assert f"step-3.g1.a1 is not exact: {said}" in caplog.text
    assert main(["checkpoints", "show", str(root)]) == 0
    assert f"not exact   {said}" in capsys.readouterr().out
    assert main(["checkpoints", "show", str(root), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["inexact"] == said
    assert {tensor["name"]: tensor.get("bound") for tensor in shown["tensors"]} == {"weight": 1e-3, "moment": None}
    caplog.clear()
    restore(root, SingleRank(), step=1)
    assert "not exact" not in caplog.text


def test_where_all_may_be_inexact_nothing_is_said_of_others(tmp_path: Path) -> None:
    chain, state, forms = Chain(every=4, threshold=0.1), weights(), {"weight": WEIGHT["weight"]}
    for step in (1, 2):
        state = moved(state, 10, 1e-6)
        save(tmp_path, step, state, chain, forms=forms)
    assert inexactness(manifest(tmp_path, 2)) == "all tensors are within 0.1 of the saved value"
    assert inexactness(manifest(tmp_path, 1)) == ""


def test_release_without_patch_support_refuses_them_by_name(
    lossy: tuple[Path, list[State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release reads every other checkpoint."""
    root, _ = lossy
    assert [manifest(root, step).version for step in (1, 2, 3)] == [1, 3, 3]
    monkeypatch.setattr(manifests, "_KNOWN", (1, 2))
    with pytest.raises(UnknownFormatError, match=r"version 3.*use a newer holdfast"):
        restore(root, SingleRank())
    assert restore(root, SingleRank(), step=1).loaded is not None
    assert not (root / "quarantine").exists()


# Copies


def test_copies_uploads_and_exports_have_what_a_restore_has(
    lossy: tuple[Path, list[State]],
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, _ = lossy
    whole, elsewhere = read(root, 3)["weight"].tobytes(), tmp_path_factory.mktemp("elsewhere")
    name = CheckpointName(step=3, attempt_id=ONE)
    for one in lineage(FolderStore(root), name):
        with progress("", 0) as shown:
            copy(FolderStore(root), one, FolderStore(elsewhere / "copy"), shown)
    uploader = Uploader(
        source=FolderStore(root),
        target=FolderStore(elsewhere / "up"),
        settings=UploadSettings(url="file:///up", keep_last=1),
        pace=Pace(None),
    )
    assert uploader.upload(name).arrived
    assert uploader.delete_replaced(name) == ""
    assert [read(elsewhere / place, 3)["weight"].tobytes() for place in ("copy", "up")] == [whole, whole]
    assert main(["checkpoints", "export", str(root), str(elsewhere / "w.safetensors")]) == 0
    assert "step-3.g1.a1 is not exact" in capsys.readouterr().err
    assert (elsewhere / "w.safetensors").read_bytes().endswith(whole)


def test_diff_compares_what_a_restore_has(lossy: tuple[Path, list[State]]) -> None:
    root, _ = lossy
    with (
        Content(FolderStore(root), CheckpointName(step=2, attempt_id=ONE)) as before,
        Content(FolderStore(root), CheckpointName(step=3, attempt_id=ONE)) as after,
        Content(FolderStore(root), CheckpointName(step=3, attempt_id=ONE)) as again,
        progress("", 0) as shown,
    ):
        assert diff(before, after, shown).changed == ("weight",)
        assert diff(after, again, shown).changed == ()
