"""Finds programs: first in `KUBEBUILDER_ASSETS`, then in the cache, and those of Debian in PATH."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast_testbed.constants import CNI, CONTAINERD, ETCD, HELM, KUBERNETES, KWOK, VERSITYGW
from holdfast_testbed.errors import MissingProgramError
from holdfast_testbed.settings import settings

FOLDERS = {
    "etcd": f"etcd-{ETCD}",
    **dict.fromkeys(
        (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kubectl",
            "kube-proxy",
        ),
        f"kubernetes-{KUBERNETES}",
    ),
    **dict.fromkeys(("containerd", "containerd-shim-runc-v2", "ctr"), f"containerd-{CONTAINERD}"),
    **dict.fromkeys(("bridge", "loopback", "host-local"), f"cni-{CNI}"),
    "helm": f"helm-{HELM}",
    "kwok": f"kwok-{KWOK}-mended",
    "versitygw": f"versitygw-{VERSITYGW}",
    "pause": "pause-1",
    **dict.fromkeys(
        ("runc", "nft", "prometheus", "promtool", "prometheus-alertmanager", "amtool", "strace"),
        "debian",
    ),
}
"""Program → folder under the cache's `bin`."""

FROM_PATH = frozenset(name for name, folder in FOLDERS.items() if folder == "debian")
"""Programs of the distribution, which may also come from PATH."""

OPTIONAL = {
    "helm": "helm",
    "kwok": "scale",
    "versitygw": "s3",
    "strace": "strace",
    **dict.fromkeys(("prometheus", "promtool", "prometheus-alertmanager", "amtool"), "monitoring"),
}
"""Programs that a cluster does not need, with the option of the set-up that installs them."""


def check_assets() -> None:
    """Raise an error if `KUBEBUILDER_ASSETS` is set and is not a folder."""
    assets = settings().assets
    if assets is not None and not assets.is_dir():
        raise MissingProgramError(f"KUBEBUILDER_ASSETS names {assets}, which is not a folder: correct it or unset it")


def find(name: str) -> Path | None:
    here = settings()
    candidates = [here.assets / name] if here.assets else []
    candidates.append(here.bin / FOLDERS[name] / name)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if name in FROM_PATH:
        found = shutil.which(name, path=here.search_path)
        return Path(found) if found else None
    return None


def program(name: str) -> Path:
    """Return the program. Raises an error that says how to install it."""
    found = find(name)
    if found is None:
        option = f" --with {OPTIONAL[name]}" if name in OPTIONAL else ""
        raise MissingProgramError(
            f"{name} is not installed: run 'make setup', "
            f"or PYTHONPATH=testbed/src python3 -m holdfast_testbed.build.bootstrap --only cluster{option}"
        )
    return found
