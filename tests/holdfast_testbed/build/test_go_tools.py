"""What is built is what is pinned, and a build that was cut off never looks finished."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast_testbed.build import go_tools, programs
from holdfast_testbed.build.go_tools import UPSTREAMS, Patch, Upstream
from holdfast_testbed.constants import GO_AT_LEAST, KUBERNETES
from holdfast_testbed.errors import CommandFailedError
from holdfast_testbed.settings import settings

MODULES = {
    "versitygw": "github.com/versity/versitygw",
    "etcd": "go.etcd.io/etcd/server/v3",
    "kubernetes": "k8s.io/kubernetes",
    "containerd": "github.com/containerd/containerd/v2",
    "cni": "github.com/containernetworking/plugins",
    "helm": "helm.sh/helm/v3",
    "kwok": "sigs.k8s.io/kwok",
}


@pytest.mark.parametrize("upstream", [u for u in UPSTREAMS if u.name in MODULES], ids=lambda u: u.name)
def test_the_version_that_names_the_folder_is_the_one_pinned(upstream: Upstream) -> None:
    go_mod = (settings().tools / upstream.name / "go.mod").read_text()
    assert go_tools.pinned_version(go_mod, MODULES[upstream.name]) == upstream.version


@pytest.mark.parametrize("upstream", [u for u in UPSTREAMS if u.name in MODULES], ids=lambda u: u.name)
def test_every_built_package_is_pinned_with_checksums(upstream: Upstream) -> None:
    folder = settings().tools / upstream.name
    go_mod = (folder / "go.mod").read_text()
    for package in upstream.programs.values():
        assert re.search(rf"^(tool )?\s*{re.escape(package)}$", go_mod, re.MULTILINE), package
    assert f"{MODULES[upstream.name]} v{upstream.version} h1:" in (folder / "go.sum").read_text()


def test_all_of_kubernetes_staging_modules_are_of_one_version() -> None:
    go_mod = (settings().tools / "kubernetes" / "go.mod").read_text()
    versions = set(re.findall(r"=> k8s\.io/\S+ v(\S+)", go_mod))
    assert versions == {KUBERNETES.replace("1.", "0.", 1)}


def test_every_program_has_a_place_where_its_upstream_puts_it() -> None:
    built = {name: upstream.folder.name for upstream in UPSTREAMS for name in upstream.programs}
    unpacked = {name for name, folder in programs.FOLDERS.items() if folder == "debian"}
    assert {name: folder for name, folder in programs.FOLDERS.items() if name not in unpacked} == built
    assert unpacked == programs.FROM_PATH


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("go1.26", (1, 26, 0)),
        ("go version go1.27rc1 linux/arm64", (1, 27, 0)),
        ("go version devel +abc", None),
        ("", None),
    ],
)
def test_go_versions_are_read(text: str, version: tuple[int, ...] | None) -> None:
    assert go_tools.parse_go_version(text) == version


def test_one_point_nine_is_older_than_one_point_twenty_six() -> None:
    old, new = go_tools.parse_go_version("go1.9.7"), go_tools.parse_go_version("go1.26.0")
    assert old is not None
    assert new is not None
    assert old < GO_AT_LEAST <= new


@pytest.mark.parametrize(
    ("package", "output"),
    [("go.etcd.io/etcd/server/v3", "server"), ("helm.sh/helm/v3/cmd/helm", "helm"), (".", "pause")],
)
def test_the_name_that_go_gives_is_known(package: str, output: str) -> None:
    assert go_tools.default_output(package, "pause") == output


def test_a_failed_build_leaves_nothing_that_looks_finished() -> None:
    broken = Upstream(name="pause", version="broken", programs={"pause": "./no-such-package"})
    with pytest.raises(CommandFailedError, match="building pause failed"):
        go_tools.build(broken, go_tools.find_go())
    assert not broken.present()


def test_a_build_puts_the_program_in_its_place() -> None:
    fresh = Upstream(name="pause", version="test", programs={"pause": "."})
    try:
        go_tools.build(fresh, go_tools.find_go())
        assert (fresh.folder / "pause").stat().st_mode & 0o111
        assert fresh.present()
    finally:
        remove(fresh.folder)


def test_an_upstream_is_patched_in_a_removable_copy(tmp_path: Path) -> None:
    kwok = next(upstream for upstream in UPSTREAMS if upstream.name == "kwok")
    assert kwok.patch is not None
    go_mod = go_tools.patched_module(kwok, kwok.patch, go_tools.find_go(), tmp_path)
    (copy,) = re.findall(rf'^replace {re.escape(kwok.patch.module)} => "(.+)"$', go_mod.read_text(), re.MULTILINE)
    assert kwok.patch.becomes in (Path(copy) / kwok.patch.file).read_text()
    assert all(folder.stat().st_mode & 0o200 for folder in Path(copy).rglob("*") if folder.is_dir())


def test_a_failed_patch_names_module_and_cause(tmp_path: Path) -> None:
    kwok = next(upstream for upstream in UPSTREAMS if upstream.name == "kwok")
    other = Patch(module="example.org/none", file="a.go", was="the fault", becomes="none")
    with pytest.raises(CommandFailedError, match=r"building kwok failed:\n.*example\.org/none"):
        go_tools.patched_module(kwok, other, go_tools.find_go(), tmp_path)


@pytest.mark.parametrize("text", ["", "a fault", "the fault, and the fault"])
def test_a_patch_whose_text_is_not_there_once_is_refused(text: str) -> None:
    patch = Patch(module="example.org/m", file="a.go", was="the fault", becomes="none")
    with pytest.raises(
        CommandFailedError, match=r"a\.go of example\.org/m differs from the file that the patch was written for"
    ):
        patch.of(text)


def test_a_patched_program_has_a_folder_of_its_own() -> None:
    """Else a machine that has the release's build in its cache goes on with the fault."""
    kwok = next(upstream for upstream in UPSTREAMS if upstream.name == "kwok")
    assert kwok.folder != replace(kwok, patch=None).folder


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
