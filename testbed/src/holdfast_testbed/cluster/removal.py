"""Removes a cluster completely, using only its plan and records."""

from __future__ import annotations

import shutil
from pathlib import Path

from holdfast_testbed.build.commands import run
from holdfast_testbed.cluster.state import State
from holdfast_testbed.errors import LeftBehindError
from holdfast_testbed.node import cgroups, network, processes


def remove(state: State) -> None:
    """Kill the recorded processes; then remove namespaces, routes, control groups, mounts and files."""
    _kill_recorded(state)
    network.remove(state.plan)
    if state.plan.nodes:
        cgroups.remove(state.plan.tag)
    _remove_tree(state.folder)


def _kill_recorded(state: State) -> None:
    """Kill every recorded process. The folder is renamed first, so that later ones cannot start."""
    condemned = state.folder / "processes.condemned"
    if state.records.is_dir():
        if condemned.is_dir():
            shutil.rmtree(condemned)
        state.records.rename(condemned)
    if condemned.is_dir():
        records = [processes.read_record(path) for path in condemned.iterdir()]
        processes.kill_all([record for record in records if record is not None])


def mounts_below(folder: Path) -> list[Path]:
    """Return the mount points below a folder, the deepest first. There should be none; a removal checks this."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]
    return sorted((point for point in points if folder in point.parents), key=lambda p: len(p.parts), reverse=True)


def _remove_tree(folder: Path) -> None:
    """Delete the folder, but nothing that is mounted below it, which could be the host's own /usr."""
    for point in mounts_below(folder.resolve()):
        run(["umount", "--lazy", point])
    if mounts_below(folder.resolve()):
        raise LeftBehindError(f"still mounted: {mounts_below(folder.resolve())}")
    shutil.rmtree(folder)
