"""Set-up on a bare machine: what is missing is named, and nothing is done twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_testbed.__main__ import main
from holdfast_testbed.build import bootstrap, debian_packages, go_tools, programs, venv
from holdfast_testbed.errors import MissingProgramError
from holdfast_testbed.settings import settings

SOURCES = Path(venv.__file__).parents[2]


def test_what_the_distribution_must_bring_is_named_in_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(debian_packages.NEEDED, "no-such-program", "some-package")
    monkeypatch.setitem(debian_packages.NEEDED, "nor-this-one", "another-package")
    with pytest.raises(MissingProgramError, match=r"please install these packages .*: another-package, some-package"):
        debian_packages.check_needed()


def test_a_program_that_was_not_built_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs.FOLDERS, "helm", "helm-0.0.0")
    with pytest.raises(MissingProgramError, match=r"helm is not installed: run 'make setup'.*--with helm"):
        programs.program("helm")


def repository(folder: Path) -> Path:
    (folder / "constraints.txt").write_text("# known to work\nrequests>=2.32  # HTTP\n\nPyYAML>=6\n")
    for name in ("operator", "testbed"):
        (folder / name).mkdir()
        (folder / name / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["kopf==1.45.2"]\n')
    return folder


def test_each_requirement_is_installed_once(tmp_path: Path) -> None:
    assert venv.requirements(repository(tmp_path)) == ["requests>=2.32", "PyYAML>=6", "kopf==1.45.2"]


def test_the_stamp_changes_with_every_list_of_requirements(tmp_path: Path) -> None:
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
    return {**os.environ, "HOLDFAST_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(SOURCES)}


def test_the_set_up_needs_nothing_but_the_standard_library(empty_cache: dict[str, str]) -> None:
    """`-S` hides site-packages, so an import of a dependency would fail."""
    command = [sys.executable, "-S", "-m", "holdfast_testbed.build.bootstrap", "--help"]
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
    found = debian_packages.known(("no-such-package-of-debian",))
    assert found == []


def test_an_unpacked_program_works_in_a_moved_checkout(tmp_path: Path) -> None:
    folder = tmp_path / "before" / "bin" / "debian"
    binary, libraries = folder / "nft.root" / "usr" / "sbin" / "nft", folder / "nft.root" / "usr" / "lib"
    binary.parent.mkdir(parents=True)
    libraries.mkdir()
    binary.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH" "$@"\n')
    binary.chmod(0o755)
    debian_packages.write_script(folder / "nft", binary, [libraries])
    (tmp_path / "before").rename(tmp_path / "after")
    done = subprocess.run([tmp_path / "after" / "bin" / "debian" / "nft", "list"], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'after' / 'bin' / 'debian' / 'nft.root' / 'usr' / 'lib'} list\n"


def test_git_ignores_the_cache_whether_it_is_a_folder_or_a_link(tmp_path: Path) -> None:
    shutil.copy(settings().repository / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".cache").symlink_to("elsewhere")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / ".cache").mkdir()
    for cache in (".cache", "below/.cache"):
        assert subprocess.run(["git", "check-ignore", "--quiet", cache], cwd=tmp_path).returncode == 0


def checkout(folder: Path) -> Path:
    """The Makefile beside empty folders, with something that was built."""
    shutil.copy(settings().repository / "Makefile", folder)
    for name in ("operator", "sidecar", "trainer_lib", "testbed", "tests", "benchmarks", "drills", "tools", "out"):
        (folder / name / "__pycache__").mkdir(parents=True)
    return folder


def make_clean(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOLDFAST_CACHE": str(cache)}
    return subprocess.run(["make", "clean"], cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_make_clean_removes_what_was_made_here_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    where, cache, elsewhere = checkout(tmp_path / "checkout"), tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (cache / "clusters" / "of-before").mkdir(parents=True)
    (cache / "venv").symlink_to(elsewhere)
    (cache / "somebody-elses").touch()
    done = make_clean(where, cache)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in cache.iterdir()) == ["somebody-elses"]
    assert (elsewhere / "kept").exists(), "a link is removed, not what it leads to"
    assert not (where / "out").exists()
    assert not list(where.glob("*/__pycache__"))


def test_make_clean_removes_nothing_while_a_cluster_remains(tmp_path: Path) -> None:
    where, cache = checkout(tmp_path), tmp_path / "cache"
    (cache / "clusters" / "one").mkdir(parents=True)
    (cache / "clusters" / "one" / "cluster.json").write_text("{}")
    done = make_clean(where, cache)
    assert done.returncode != 0
    assert "clusters run still" in done.stderr
    assert (cache / "clusters" / "one" / "cluster.json").exists()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def test_an_environment_that_was_cut_off_is_made_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m venv` leaves it where Debian's python3-venv is missing, or on Ctrl-C: no pip is in it."""
    half, version = own_cache / "venv", f"python{sys.version_info.major}.{sys.version_info.minor}"
    (half / "lib" / version / "site-packages").mkdir(parents=True)
    (half / "bin").mkdir()
    (half / "bin" / "python").symlink_to(sys.executable)
    made: list[str] = []
    monkeypatch.setattr(venv, "_create", lambda: made.append("environment"))
    monkeypatch.setattr(venv, "_install", lambda: made.append("packages"))
    venv.make_venv()
    assert made == ["environment", "packages"]
    venv.make_venv()
    assert made == ["environment", "packages"], "nothing is done twice"


def test_an_impossible_cluster_is_reported_before_installing(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(venv, "make_venv", lambda: pytest.fail("torch was installed for nothing"))
    assert bootstrap.main([]) == 1
    assert "run as root" in capsys.readouterr().err


def test_programs_of_kubebuilder_assets_are_used_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = next(upstream for upstream in go_tools.UPSTREAMS if upstream.name == "etcd")
    (tmp_path / "etcd").touch()
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", tmp_path.name)
    settings.cache_clear()
    try:
        assert programs.program("etcd") == tmp_path / "etcd"
        assert programs.find("helm") != tmp_path / "helm", "what is not there is looked for elsewhere"
        monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
        settings.cache_clear()
        assert upstream.present(), "nothing is left to build of it"
    finally:
        settings.cache_clear()


def test_assets_that_are_no_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "nowhere"))
    settings.cache_clear()
    try:
        with pytest.raises(MissingProgramError, match="nowhere, which is not a folder: correct it or unset it"):
            programs.check_assets()
    finally:
        settings.cache_clear()


@pytest.mark.parametrize("verb", ["up", "down", "status"])
@pytest.mark.parametrize("name", ["", ".", "..", "../demo", "a/b", "Demo", "-x", "x" * 41, "a b"])
def test_what_does_not_do_as_a_clusters_name_touches_nothing(
    own_cache: Path, capsys: pytest.CaptureFixture[str], verb: str, name: str
) -> None:
    assert main([verb, f"--name={name}"]) == 1
    assert capsys.readouterr().err.startswith(f"error: invalid cluster name '{name}'")
    assert not own_cache.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["notice", "1", "--seconds", "nan"], "invalid value 'nan': expected an integer"),
        (["notice", "1", "--seconds", "-5"], "invalid value '-5'"),
        (["up", "--node-monitor-grace-seconds", "0"], "invalid value '0'"),
        (["node", "explode", "1"], "invalid choice: 'explode'"),
    ],
)
def test_a_bad_word_is_named(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert says in capsys.readouterr().err
