"""Set-up on a bare machine: what is missing is named, and nothing is done twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_testbed import debs, programs, venv
from holdfast_testbed.errors import MissingProgramError
from holdfast_testbed.settings import settings

PACKAGE = Path(venv.__file__).parent


def test_what_the_distribution_must_bring_is_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(debs.NEEDED, "no-such-program", "some-package")
    monkeypatch.setitem(debs.NEEDED, "nor-this-one", "another-package")
    with pytest.raises(MissingProgramError, match=r"please install these packages .*: another-package, some-package"):
        debs.check_needed()


def test_a_program_that_was_not_built_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs.FOLDERS, "helm", "helm-0.0.0")
    with pytest.raises(MissingProgramError, match=r"helm is not there: run 'make setup'.*--with helm"):
        programs.program("helm")


def repository(folder: Path) -> Path:
    (folder / "constraints.txt").write_text("# known to work\nrequests>=2.32  # HTTP\n\nPyYAML>=6\n")
    for name in ("operator", "testbed"):
        (folder / name).mkdir()
        (folder / name / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["kopf==1.45.2"]\n')
    return folder


def test_all_that_constraints_and_packages_name_is_installed_once(tmp_path: Path) -> None:
    assert venv.requirements(repository(tmp_path)) == ["requests>=2.32", "PyYAML>=6", "kopf==1.45.2"]


def test_the_stamp_changes_with_every_file_that_says_what_to_install(tmp_path: Path) -> None:
    where = repository(tmp_path)
    stamps = {venv.stamp_of(where)}
    for path in (
        where / "constraints.txt",
        where / "operator" / "pyproject.toml",
        where / "testbed" / "pyproject.toml",
    ):
        path.write_text(path.read_text() + "\n")
        stamps.add(venv.stamp_of(where))
    assert len(stamps) == 4


@pytest.fixture
def empty_cache(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "HOLDFAST_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(PACKAGE.parent)}


def test_the_set_up_needs_nothing_but_the_standard_library(empty_cache: dict[str, str]) -> None:
    """`-S` hides site-packages, so an import of a dependency would fail."""
    command = [sys.executable, "-S", "-m", "holdfast_testbed.bootstrap", "--help"]
    shown = subprocess.run(command, env=empty_cache, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "--only" in shown.stdout


def command_line(words: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast_testbed", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_down_without_a_cluster_is_no_failure(empty_cache: dict[str, str]) -> None:
    done = command_line(["down"], empty_cache)
    assert done.returncode == 0
    assert "nothing to remove" in done.stderr
    assert command_line(["down", "--all"], empty_cache).returncode == 0


def test_other_commands_without_a_cluster_say_so(empty_cache: dict[str, str]) -> None:
    done = command_line(["kubeconfig", "--name", "mine"], empty_cache)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no cluster 'mine' is recorded")


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="looks into Debian's package lists")
def test_only_packages_of_this_release_are_asked_for() -> None:
    found = debs.known(("no-such-package-of-debian",))
    assert found == []


def test_the_cache_is_where_git_ignores_it() -> None:
    ignored = (settings().repository / ".gitignore").read_text().split()
    assert ".cache/" in ignored
