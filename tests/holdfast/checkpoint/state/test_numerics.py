"""The versions and devices on which results depend, and the differences between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.state import numerics


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A GPU by what PyTorch reports. Return the file with the version of its driver."""
    driver = tmp_path / "version"
    driver.write_text("570.86.15\n")
    monkeypatch.setattr(numerics, "_DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    numerics.gpu_versions.cache_clear()
    yield driver
    numerics.gpu_versions.cache_clear()


def test_versions_of_the_gpu_are_recorded(gpu: Path) -> None:
    found = numerics.fingerprint()
    assert found["device"] == "NVIDIA H100"
    assert {name: found[name] for name in ("cuda", "cudnn", "nccl", "driver")} == {
        "cuda": "13.0",
        "cudnn": "92000",
        "nccl": "2.29.7",
        "driver": "570.86.15",
    }


def test_versions_that_are_unknown_are_absent(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def incompatible() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", incompatible)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    gpu.unlink()
    assert numerics.gpu_versions() == {"cuda": "13.0"}


def test_no_version_of_a_gpu_is_recorded_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = numerics.fingerprint()
    assert found["device"] == "cpu"
    assert found.keys().isdisjoint({"cuda", "cudnn", "nccl", "driver"})


def test_changes_have_the_field_and_both_values() -> None:
    saved = {"torch": "2.12", "threads": 2, "driver": "570"}
    current = {"torch": "2.13", "threads": 2, "nccl": "2.29"}
    assert numerics.changes(saved, current) == (
        "torch was 2.12, is 2.13; driver was 570, is absent; nccl was absent, is 2.29"
    )
    assert numerics.changes(saved, saved) == ""


def test_imported_weights_have_no_numerics_to_compare() -> None:
    assert numerics.changes({}, numerics.fingerprint()) == ""
