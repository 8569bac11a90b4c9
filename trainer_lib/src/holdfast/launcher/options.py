"""The options of `holdfast run` that have no environment variable, and their parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.core.settings import one_of, setting, settings_of, switch, whole

DEVICES: Final = ("auto", "gpu", "cpu")


def _processes(text: str) -> Any:
    """Parse a number, or a word that the command line replaces by the number of devices."""
    try:
        return text if text in DEVICES else whole(1)(text)
    except ValueError as error:
        raise ValueError(f"{error}, or {', '.join(DEVICES)}") from None


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise ValueError("expected N or MIN:MAX, for example 2:4")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high:
        raise ValueError("expected MIN of at least 1 and at most MAX")
    return low, high


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("expected HOST:PORT, for example node-1:29400")
    return host.strip("[]"), int(port)


def _hang_timeout(text: str) -> str:
    if text not in {"Auto", "Off"} and re.fullmatch(r"[1-9]\d*", text, re.ASCII) is None:
        raise ValueError("expected an integer number of seconds, Auto, or Off")
    return text


def _warm(text: str) -> int | None:
    try:
        return None if text == "none" else whole()(text)
    except ValueError as error:
        raise ValueError(f"{error}, or none") from None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The parsed and validated options of `holdfast run`."""

    command: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    """The options that also have an environment variable, by the name of the setting."""

    processes: int = setting(
        0,
        _processes,
        "rank processes on this host; `auto`, `gpu` and `cpu` count the devices of this host (under the operator, "
        "leave out `processesPerWorker` instead)",
        flag="--nproc-per-node N",
        shown="1, or the resource's",
    )
    nodes: tuple[int, int] = setting(
        (1, 1),
        _nodes,
        "number of hosts; with a range the run continues with fewer hosts, and adds them again when they return",
        flag="--nnodes MIN[:MAX]",
        shown="1",
    )
    replica_step: int = setting(
        1,
        whole(1),
        "the number of hosts in a world is a multiple of N: the hosts of one replica of a "
        "[sharded model](trainer-library.md#sharded-models)",
        flag="--replica-step N",
    )
    endpoint: tuple[str, int] | None = setting(
        None,
        _endpoint,
        "address of the rendezvous; the launcher that owns it takes the operator's role",
        flag="--rdzv-endpoint HOST:PORT",
    )
    run_name: str = setting("", str, "the run's name, `HOLDFAST_RUN_ID`", flag="--rdzv-id NAME", shown="random")
    backend: str = setting(
        "c10d", one_of("c10d"), "accepted for compatibility with torchrun", flag="--rdzv-backend NAME"
    )
    standalone: bool = setting(False, switch, "accepted for compatibility with torchrun", flag="--standalone")
    max_restarts: int = setting(
        3,
        whole(),
        "tolerated incidents of cause Application or OOM. If two attempts in a row end with the same error at the "
        "same line, with no step in between, the job ends at once",
        flag="--max-restarts N",
    )
    hang_timeout: str = setting(
        "Auto",
        _hang_timeout,
        "how long the other ranks wait for a rank in a step before it counts as a hang: seconds (an integer), `Auto` "
        "(5 × the median step, at least 60 s, and longer for a rank that uses its CPU), or `Off` "
        "([hang detection](../explanation/hang-detection.md))",
        flag="--hang-timeout SECONDS",
    )
    hang_min_timeout: int | None = setting(
        None,
        whole(1),
        "opt in to tight deadlines: `Auto` is 5 × the median step and at least this number of seconds, also for a "
        "rank that uses its CPU",
        flag="--hang-min-timeout SECONDS",
    )
    warm_processes: int | None = setting(
        1,
        _warm,
        "warm standby processes on this host; `0` keeps only a zygote, `none` prepares nothing "
        "([warm processes](#warm-processes))",
        flag="--warm-processes N",
    )
    prefix_output: bool = setting(
        False, switch, "prefixes each output line of a rank with `[rank]`", flag="--prefix-output"
    )
    nested_launcher: bool = setting(
        False,
        switch,
        "start a command that is itself a launcher: `torchrun`, `accelerate launch`, `deepspeed`, `mpirun`. Without "
        "the option such a command is refused, because `holdfast run` starts the ranks",
        flag="--allow-nested-launcher",
    )
    timeline: Path | None = setting(
        None,
        Path,
        "file for the [timeline](timeline.md)",
        flag="--timeline FILE",
        shown="`timeline.jsonl` in the run directory",
    )

    @property
    def min_nodes(self) -> int:
        """The smallest number of hosts with which the job trains."""
        return self.nodes[0]

    @property
    def max_nodes(self) -> int:
        """The largest number of hosts with which the job trains."""
        return self.nodes[1]


OPTIONS: Final = settings_of(RunOptions)
