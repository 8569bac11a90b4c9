"""The images of the testbed, built without a daemon and only when their content changed.

An archive is `<name>-<key>.tar` and a layer `layers/<name>-<key>.tar`; the key is a digest of the content.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast_testbed.build import python_layer
from holdfast_testbed.build.image_archive import ImageSettings, Layer, write_archive
from holdfast_testbed.build.programs import program
from holdfast_testbed.constants import IMAGES, NONROOT, PAUSE_IMAGE, RUNTIME_MOUNT
from holdfast_testbed.errors import TestbedError
from holdfast_testbed.locks import locked
from holdfast_testbed.node import runtime
from holdfast_testbed.progress_output import progress
from holdfast_testbed.settings import settings

_FORMAT = "2"
_PASSWD = f"root:x:0:0:root:/root:/sbin/nologin\nholdfast:x:{NONROOT}:{NONROOT}:holdfast:/tmp:/sbin/nologin\n"
_GROUP = f"root:x:0:\nholdfast:x:{NONROOT}:\n"
_SOURCE = "/opt/holdfast/src"


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """A layer, the key of its content, and the function that writes it."""

    name: str
    key: str
    fill: Callable[[Layer], None]

    @property
    def path(self) -> Path:
        return settings().images / "layers" / f"{self.name}-{self.key}.tar"

    def build(self) -> Path:
        """Write the layer unless it exists, and return its path."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.path.with_suffix(".tmp")
            with progress(f"making image layer {self.name}"), Layer(temporary) as layer:
                self.fill(layer)
            temporary.rename(self.path)
        return self.path


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """An image: its layers and settings."""

    name: str
    reference: str
    layers: Sequence[LayerPlan]
    settings: ImageSettings

    @property
    def key(self) -> str:
        """The digest of the content."""
        return key_of([*(layer.key for layer in self.layers), repr(self.settings), self.reference])

    @property
    def path(self) -> Path:
        return settings().images / f"{self.name}-{self.key}.tar"


def archive(name: str) -> Path:
    """Return the archive of image `name`, built if its content changed. Older archives of it are removed."""
    plan = plan_of(name)
    if plan.path.exists():
        return plan.path
    with locked(settings().images / "lock", what="making images"):
        if not plan.path.exists():
            layers = [layer.build() for layer in plan.layers]
            write_archive(plan.path, reference=plan.reference, layers=layers, settings=plan.settings)
            _drop_older(plan)
    return plan.path


def build_all() -> dict[str, Path]:
    return {name: archive(name) for name in IMAGES}


def _drop_older(plan: ImagePlan) -> None:
    kept = {plan.path, *(layer.path for layer in plan.layers)}
    folders = {(settings().images, plan.name), *((layer.path.parent, layer.name) for layer in plan.layers)}
    for folder, name in folders:
        for path in folder.glob(f"{name}-*.tar"):
            if path not in kept and "-" not in path.name.removeprefix(f"{name}-"):
                path.unlink(missing_ok=True)


def plan_of(name: str) -> ImagePlan:
    """Return the content of image `name`."""
    plans = {"pause": _pause, "operator": _operator, "sidecar": _sidecar, "trainer": _trainer}
    if name not in plans:
        raise TestbedError(f"no image '{name}': expected one of {', '.join(plans)}")
    return plans[name]()


def reference(name: str) -> str:
    """Return `holdfast/<name>:dev`, the name of the image on nodes."""
    return f"docker.io/holdfast/{name}:dev"


def _pause() -> ImagePlan:
    binary = program("pause")

    def fill(layer: Layer) -> None:
        layer.copy(binary, "/pause")

    layers = [LayerPlan(name="pause", key=key_of([file_key(binary)]), fill=fill)]
    started = ImageSettings(entrypoint=["/pause"], user=f"{NONROOT}:{NONROOT}")
    return ImagePlan(name="pause", reference=PAUSE_IMAGE, layers=layers, settings=started)


def _operator() -> ImagePlan:
    return _python_image("operator", "holdfast_operator")


def _sidecar() -> ImagePlan:
    return _python_image("sidecar", "holdfast_sidecar")


def _python_image(name: str, module: str) -> ImagePlan:
    project = settings().repository / name
    return ImagePlan(
        name=name,
        reference=reference(name),
        layers=[_interpreter_layer(), _site_layer(name, project), _source_layer(name, project / "src")],
        settings=ImageSettings(
            entrypoint=["python", "-m", module],
            user=f"{NONROOT}:{NONROOT}",
            environment={
                "PATH": f"{python_layer.HOME}/bin",
                "PYTHONHOME": python_layer.HOME,
                "PYTHONPATH": f"{_SOURCE}:{python_layer.SITE}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONUNBUFFERED": "1",
            },
        ),
    )


def _interpreter_layer() -> LayerPlan:
    def fill(layer: Layer) -> None:
        add_users(layer)
        python_layer.add_interpreter(layer)

    interpreter = python_layer.interpreter()
    return LayerPlan(name="python", key=key_of([str(interpreter), file_key(interpreter)]), fill=fill)


def _site_layer(name: str, project: Path) -> LayerPlan:
    distributions = python_layer.closure(python_layer.requirements(project / "pyproject.toml"))

    def fill(layer: Layer) -> None:
        layer.folder(python_layer.SITE)
        python_layer.add_distributions(layer, distributions.values())

    versions = [f"{name}=={found.version}" for name, found in distributions.items()]
    return LayerPlan(name=f"{name}-site", key=key_of(versions), fill=fill)


def _source_layer(name: str, source: Path) -> LayerPlan:
    def fill(layer: Layer) -> None:
        layer.folder(_SOURCE)
        python_layer.add_tree(layer, source, _SOURCE)

    return LayerPlan(name=f"{name}-source", key=tree_key([source]), fill=fill)


def _trainer() -> ImagePlan:
    project = settings().repository / "trainer_lib"
    source, examples = project / "src", project / "examples"
    links = runtime.links()

    def fill(layer: Layer) -> None:
        add_users(layer)
        for path, target in sorted(links.items()):
            layer.link(path, target)
        layer.folder("/opt/host")
        layer.data("/opt/holdfast/bin/holdfast", b'#!/bin/sh\nexec python -m holdfast "$@"\n', 0o755)
        python_layer.add_tree(layer, source, _SOURCE)
        if examples.is_dir():
            python_layer.add_tree(layer, examples, "/examples")

    key = key_of([json.dumps(links, sort_keys=True), tree_key([source, examples])])
    return ImagePlan(
        name="trainer",
        reference=reference("trainer"),
        layers=[LayerPlan(name="trainer", key=key, fill=fill)],
        settings=ImageSettings(
            command=["holdfast", "--help"],
            user=f"{NONROOT}:{NONROOT}",
            environment={
                "PATH": f"/opt/holdfast/bin:{RUNTIME_MOUNT}/venv/bin:/usr/bin:/bin",
                "PYTHONPATH": _SOURCE,
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONUNBUFFERED": "1",
                "HOME": "/tmp",  # noqa: S108
            },
        ),
    )


def add_users(layer: Layer) -> None:
    """Add users, and the folders that programs expect."""
    layer.data("/etc/passwd", _PASSWD.encode())
    layer.data("/etc/group", _GROUP.encode())
    layer.data("/etc/nsswitch.conf", b"hosts: files dns\n")
    layer.folder("/tmp", 0o1777)  # noqa: S108
    for folder in ("/proc", "/sys", "/dev", "/run", "/var/run", "/root"):
        layer.folder(folder)


def key_of(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join([_FORMAT, *parts]).encode()).hexdigest()[:16]


def file_key(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_key(roots: Iterable[Path]) -> str:
    """Return a digest of all sources below some folders."""
    lines = []
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                path = Path(folder, name)
                lines.append(f"{path.relative_to(root)} {file_key(path)}")
    return key_of(lines)
