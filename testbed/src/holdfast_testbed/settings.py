"""Paths. Only this module reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Paths of one checkout and its cache."""

    repository: Path
    cache: Path
    assets: Path | None
    """`KUBEBUILDER_ASSETS`: programs in it are used as they are."""
    search_path: str
    keep: bool
    """`KEEP=1`: the demo leaves its cluster running."""

    @property
    def venv(self) -> Path:
        return self.cache / "venv"

    @property
    def bin(self) -> Path:
        """Built programs, with a folder for each upstream and version."""
        return self.cache / "bin"

    @property
    def images(self) -> Path:
        return self.cache / "images"

    @property
    def clusters(self) -> Path:
        return self.cache / "clusters"

    @property
    def tools(self) -> Path:
        """Go modules that pin the upstreams."""
        return self.repository / "testbed" / "tools"


@cache
def settings() -> Settings:
    repository = Path(__file__).resolve().parents[3]
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    return Settings(
        repository=repository,
        cache=Path(os.environ.get("HOLDFAST_CACHE") or repository / ".cache").absolute(),
        assets=Path(assets).absolute() if assets else None,
        keep=os.environ.get("KEEP", "").lower() not in ("", "0", "no", "false"),
        search_path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/local/sbin:/usr/local/go/bin",
    )


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for child processes: the own one with the system folders on the path, and `extra`."""
    return {**os.environ, "PATH": settings().search_path, **extra}
