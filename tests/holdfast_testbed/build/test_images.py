"""Images: equal content is equal bytes, modules are compiled for good, nothing runs as root."""

from __future__ import annotations

import importlib.util
import json
import marshal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from holdfast_testbed.build import images, python_layer
from holdfast_testbed.build.image_archive import ImageSettings, Layer, write_archive
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.node import runtime

STARTED = ImageSettings(entrypoint=["/run"], user="65532:65532", environment={"A": "b"})


def layer(path: Path, text: bytes = b"text") -> Path:
    with Layer(path) as made:
        made.data("/opt/some/file", text)
        made.link("/usr", "/opt/host/usr")
        made.folder("/tmp", 0o1777)
    return path


def test_folders_above_a_file_are_made_once(tmp_path: Path) -> None:
    with tarfile.open(layer(tmp_path / "layer.tar")) as tar:
        assert tar.getnames() == ["opt", "opt/some", "opt/some/file", "usr", "tmp"]
        assert tar.getmember("usr").linkname == "/opt/host/usr"
        assert tar.getmember("tmp").mode == 0o1777
        assert {(member.uid, member.gid, member.mtime) for member in tar} == {(0, 0, 0)}


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    assert layer(tmp_path / "a").read_bytes() == layer(tmp_path / "b").read_bytes()
    assert layer(tmp_path / "a").read_bytes() != layer(tmp_path / "c", b"other").read_bytes()


def read_archive(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with tarfile.open(path) as tar:
        manifest = json.load(tar.extractfile("manifest.json") or pytest.fail("no manifest"))[0]
        config = json.load(tar.extractfile(manifest["Config"]) or pytest.fail("no config"))
        assert set(manifest["Layers"]) <= set(tar.getnames())
    return manifest, config


def test_an_archive_names_its_layers_by_digest(tmp_path: Path) -> None:
    layers = [layer(tmp_path / "a"), layer(tmp_path / "b", b"other")]
    write_archive(tmp_path / "image.tar", reference="docker.io/holdfast/x:dev", layers=layers, settings=STARTED)
    manifest, config = read_archive(tmp_path / "image.tar")
    assert manifest["RepoTags"] == ["docker.io/holdfast/x:dev"]
    assert [f"sha256:{name.split('/')[0]}" for name in manifest["Layers"]] == config["rootfs"]["diff_ids"]
    assert config["config"]["User"] == "65532:65532"
    assert config["config"]["Env"] == ["A=b"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_trainers_python_is_found_in_a_checkout_below_tmp() -> None:
    """A pod mounts an empty folder at /tmp, which hides every link there."""
    folders = images.plan_of("trainer").settings.environment["PATH"].split(":")
    assert "/opt/host/venv/bin" in folders
    assert not any(folder.startswith("/tmp") for folder in folders)


@pytest.mark.parametrize("name", ["operator", "sidecar", "trainer"])
def test_no_image_of_ours_runs_as_root(name: str) -> None:
    assert images.plan_of(name).settings.user == "65532:65532"


def test_an_unknown_image_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TestbedError, match="no image 'worker': expected one of pause, operator"):
        images.plan_of("worker")


def test_the_key_of_a_tree_ignores_compiled_files(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "__pycache__").mkdir(parents=True)
    (tmp_path / "pkg" / "a.py").write_text("1")
    before = images.tree_key([tmp_path])
    (tmp_path / "pkg" / "__pycache__" / "a.pyc").write_text("noise")
    assert images.tree_key([tmp_path]) == before
    (tmp_path / "pkg" / "a.py").write_text("2")
    changed = images.tree_key([tmp_path])
    (tmp_path / "pkg" / "a.py").rename(tmp_path / "pkg" / "b.py")
    assert len({before, changed, images.tree_key([tmp_path])}) == 3


def test_a_module_is_compiled_to_a_file_that_is_never_checked() -> None:
    source = b"answer = 42\n"
    compiled = python_layer.compile_module(source, "/opt/a.py")
    assert compiled is not None
    assert compiled[:4] == importlib.util.MAGIC_NUMBER
    assert int.from_bytes(compiled[4:8], "little") == 1, "hash-based and unchecked"
    names: dict[str, int] = {}
    exec(marshal.loads(compiled[16:]), names)  # noqa: S102, S302
    assert names["answer"] == 42


def test_a_file_that_is_no_python_is_left_uncompiled() -> None:
    assert python_layer.compile_module(b"print 'two'\n", "/opt/old.py") is None


def test_the_closure_follows_requirements_but_not_other_extras() -> None:
    found = python_layer.closure(["requests>=2"])
    assert {"requests", "urllib3", "idna", "certifi"} <= set(found)
    assert "pysocks" not in found


def test_needed_libraries_are_read_from_ldd() -> None:
    shown = (
        "\tlinux-vdso.so.1 (0x00007ffd)\n"
        "\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f0a)\n"
        "\tlibmissing.so => not found\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f0b)\n"
    )
    assert python_layer.needed_libraries(shown) == ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/ld-linux-x86-64.so.2"]


def test_the_trainer_image_links_every_exposed_folder() -> None:
    links = runtime.links()
    for item in runtime.exposed():
        assert links[str(item.source)] == f"/opt/host/{item.name}"
    assert any(path.startswith("/lib") for path in links), "the dynamic loader must be found"
