"""The version of PyTorch is checked when it is used: it is no dependency, so that pip keeps a vendor's build."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path

import pytest

from holdfast.core.errors import UsageError
from holdfast.training import torch_version

INSTALL = r"install torch 2\.8 or newer"
PROJECT = Path(__file__).resolve().parents[3] / "trainer_lib" / "pyproject.toml"


@pytest.mark.parametrize(
    ("version", "is_too_old"),
    [
        ("2.8.0", False),
        ("2.15.0+cu132", False),
        ("2.8.0a0+34c6371d24.nv25.08", False),
        ("3.0", False),
        ("unknown", False),
        ("2.7.1", True),
        ("1.13.1+cpu", True),
    ],
)
def test_versions_from_2_8_on_are_accepted(version: str, is_too_old: bool) -> None:
    assert torch_version.is_too_old(version, (2, 8)) == is_too_old


def test_a_version_that_is_too_old_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"torch": "2.6.0+cu124"}.__getitem__)
    with pytest.raises(UsageError, match=rf"^torch 2\.6\.0\+cu124 is too old for Holdfast: {INSTALL}$"):
        torch_version.require()


def test_sharding_needs_a_newer_version_than_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"torch": "2.12.1"}.__getitem__)
    torch_version.require()
    with pytest.raises(UsageError, match=r"^torch 2\.12\.1 is too old for job\.fully_shard: install torch 2\.13"):
        torch_version.require(torch_version.SHARDING, "job.fully_shard")


def test_missing_torch_is_named_but_a_build_without_metadata_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    torch_version.require()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"^torch is not installed in this environment: {INSTALL}$"):
        torch_version.require()


def test_the_distribution_has_torch_as_an_extra_with_the_same_minimum() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert not [line for line in project["dependencies"] if line.startswith("torch")]
    assert project["optional-dependencies"]["torch"] == ["torch>={}.{}".format(*torch_version.MINIMUM)]
