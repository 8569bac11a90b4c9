"""`holdfast.init(deterministic=True)`: what it sets, and when it is too late."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from holdfast.core.errors import UsageError
from holdfast.training import determinism


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored at the end, whatever a test sets
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield
    torch.use_deterministic_algorithms(False)


def test_all_settings_of_pytorch_are_set() -> None:
    determinism.enable()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_initialised_cuda_is_refused_before_anything_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        UsageError, match="before the script uses CUDA, or start it with CUBLAS_WORKSPACE_CONFIG=:4096:8"
    ):
        determinism.enable()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_workspace_of_the_environment_stays_and_allows_initialised_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    determinism.enable()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_workspace_with_other_results_each_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UsageError, match="is ':0:0': for deterministic=True, expected :4096:8 or :16:8"):
        determinism.enable()


def test_init_sets_it_on_request() -> None:
    script = "import holdfast; holdfast.init(deterministic=True)"
    check = "import torch; assert torch.are_deterministic_algorithms_enabled()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    command = [sys.executable, "-c", f"{script}; {check}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240)
    assert ended.returncode == 0, ended.stderr
