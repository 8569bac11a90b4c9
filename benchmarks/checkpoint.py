"""The cost of a checkpoint: the stall, the save, concurrent training, the metadata; and the restore.

Holdfast, torch's DCP with its defaults, and the limit (a plain copy in memory, O_DIRECT on the disk) run in random
order in each round; a ratio is computed within a round. The state has 1 GB in 628 tensors, in fp32 and in bf16.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import _bench as bench
import safetensors.torch
import torch
import torch.distributed as dist
from _checkpoint import delta, memory, restore
from _checkpoint import metadata as small
from _checkpoint import object as object_store
from _checkpoint.contenders import (
    TENSORS,
    Copy,
    Dcp,
    Disk,
    OneFile,
    OnTheNode,
    Ours,
    State,
    Through,
    Training,
    cpu_seconds,
    extra_bytes,
    finish,
    workplace,
)

from holdfast.launcher.ranks.environ import tunables

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FILES: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "safetensors": safetensors.torch.save_file,
    "torch.save": torch.save,
}


def main() -> int:
    """Run the benchmark in a process with the environment that a launcher gives its ranks."""
    if told := tunables(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **told})  # noqa: S606 - the same again
    effort = bench.arguments(__doc__ or "")
    nbytes, count = (8_000_000, 16) if effort.quick else (1_014_000_000, TENSORS)
    rounds = effort.pick(quick=1, default=7, full=25)
    steps = effort.pick(quick=3, default=100, full=100)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    metadata_row = metadata(rounds)  # before this process computes
    torch.set_num_threads(1)  # the other core is for saves
    rows: list[bench.Measurement] = []
    with workplace(bench.OUT / "checkpoint.work") as folder, one_rank():
        for name, dtype in DTYPES.items():
            what = f"{nbytes / 1e9:.2g} GB of {name}"
            rows += of_state(folder, State(nbytes, dtype, count), what, rounds, steps)
        rows += restore.rows(folder / "restore", nbytes, rounds)
        rows += delta.rows(folder, nbytes, rounds)
    rows += memory.rows(nbytes, rounds)
    rows.append(metadata_row)
    rows += object_store.rows(nbytes=nbytes, rounds=rounds)
    return bench.finish("checkpoint", rows, effort)


class one_rank:  # noqa: N801  (reads like the context manager that it is)
    """A process group of one rank, which `dcp.async_save` requires."""

    def __enter__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *raised: object) -> None:
        dist.destroy_process_group()


def of_state(folder: Path, state: State, what: str, rounds: int, steps: int) -> list[bench.Measurement]:
    """Return the rows of stall, save and concurrent training for one state."""
    ours, dcp = Ours(folder / "ours", state), Dcp(folder / "dcp", state)
    local = OnTheNode(folder / "local", state)
    files = {name: OneFile(folder / name, state, write) for name, write in FILES.items()}
    stall = bench.interleaved(
        {
            "ours": ours.stall,
            "first": ours.first_stall,
            "local": local.stall,
            "dcp": dcp.stall,
            "limit": Copy(state),
        },
        rounds,
    )
    through = Through(folder / "through", state)
    savers = {"ours": ours, "local": local, "through": through, "dcp": dcp} | files
    save = bench.interleaved(
        {name: one.save for name, one in savers.items()} | {"limit": Disk(folder / "limit", state)}, rounds
    )
    for one in (local, through, *files.values()):
        one.forget()
    return [
        on_the_node(stall, f"stall of {what}", "x memcpy"),
        on_the_node(save, f"durable checkpoint of {what}", "x disk limit"),
        *stalls(stall, what),
        *saves(save, what),
        beside(ours, dcp, what, rounds, steps),
        *costs(ours, dcp, state, what, rounds),
    ]


def stalls(stall: dict[str, list[float]], what: str) -> list[bench.Measurement]:
    """Return the rows of checkpoint-1."""
    return [
        against(stall, "ours", "checkpoint-1", f"stall of a save of {what}", unit="x memcpy", target="<= 1.15"),
        against(
            stall, "first", "checkpoint-1", f"stall of the first save of {what}", unit="x memcpy", target="<= 1.15"
        ),
    ]


def saves(save: dict[str, list[float]], what: str) -> list[bench.Measurement]:
    """Return the rows of checkpoint-2."""
    return [
        against(
            save, "ours", "checkpoint-2", f"digested, published save of {what}", unit="x disk limit", target="<= 1.25"
        ),
        bench.measured(
            "checkpoint-2",
            f"DCP's time for {what} over ours",
            bench.ratios(save["dcp"], save["ours"]),
            "x",
            target=">= 2.5",
        ),
        bench.measured(
            "",
            f"DCP's time for {what} over dcp.save with our writer",
            bench.ratios(save["dcp"], save["through"]),
            "x",
        ),
        *(
            bench.measured(
                "", f"{name}, fsynced: its time for {what} over ours", bench.ratios(save[name], save["ours"]), "x"
            )
            for name in FILES
        ),
    ]


def on_the_node(values: dict[str, list[float]], what: str, unit: str) -> bench.Measurement:
    """Return the row of a checkpoint on the local tier, relative to the limit."""
    return bench.measured("", f"local tier: {what}", bench.ratios(values["local"], values["limit"]), unit, limit=1.0)


def against(
    values: dict[str, list[float]], whose: str, bar: str, what: str, *, unit: str, target: str
) -> bench.Measurement:
    """Return the row relative to the limit, together with DCP's value."""
    return bench.measured(
        bar,
        what,
        bench.ratios(values[whose], values["limit"]),
        unit,
        target=target,
        peer=bench.median(bench.ratios(values["dcp"], values["limit"])),
        peer_name="DCP",
        limit=1.0,
    )


def beside(ours: Ours, dcp: Dcp, what: str, rounds: int, steps: int) -> bench.Measurement:
    """Return the row of a training loop's step time during a save, relative to that without one."""
    training = Training()

    def with_ours() -> float:
        saving = ours.begin()
        seconds = training.pace(lambda: saving.ended, 1)
        finish(saving)
        return seconds

    def with_dcp() -> float:
        future = dcp.begin()
        return training.pace(future.done, 1)

    contestants: dict[str, Callable[[], float]] = {
        "ours": with_ours,
        "dcp": with_dcp,
        "limit": lambda: training.pace(lambda: True, steps),
    }
    paces = bench.interleaved(contestants, rounds)
    return against(
        paces, "ours", "checkpoint-5", f"step time during a save of {what}", unit="x undisturbed", target="<= 1.05"
    )


def costs(ours: Ours, dcp: Dcp, state: State, what: str, rounds: int) -> list[bench.Measurement]:
    """Return the rows of CPU time and memory, relative to `dcp.save` and to `dcp.async_save`, which also copies."""

    def fresh() -> float:
        ours.forget()
        return extra_bytes(ours.first_stall)

    check = ours.checker()
    seconds = bench.interleaved(
        {
            "ours": lambda: cpu_seconds(ours.save),
            "check": lambda: cpu_seconds(check),
            "dcp": lambda: cpu_seconds(dcp.save),
        },
        rounds,
    )
    grown = bench.interleaved({"ours": fresh, "dcp": lambda: extra_bytes(dcp.stall)}, rounds)
    return [
        bench.measured(
            "checkpoint-2",
            f"processor time of a save of {what}",
            [value / state.nbytes * 1e9 for value in seconds["ours"]],
            "s/GB",
            peer=bench.median(seconds["dcp"]) / state.nbytes * 1e9,
            peer_name="DCP",
        ),
        bench.measured(
            "checkpoint-2",
            f"of it, the check that the weights are finite, a third of {what}",
            [100 * value for value in bench.ratios(seconds["check"], seconds["ours"])],
            "%",
        ),
        bench.measured(
            "checkpoint-1",
            f"memory for a save of {what} during training, kept for the next one",
            [value / state.nbytes for value in grown["ours"]],
            "x state",
            peer=bench.median(grown["dcp"]) / state.nbytes,
            peer_name="dcp.async_save, fetched each time",
        ),
    ]


def metadata(rounds: int) -> bench.Measurement:
    """Return the row of two ranks that save tensors of 16 bytes to memory."""
    found = small.saves(rounds)
    return bench.measured(
        "checkpoint-6",
        "metadata of a save: 628 tensors of 16 bytes, 2 ranks, in memory",
        milliseconds([value["ours"] for value in found]),
        "ms",
        target="<= 20",
        peer=bench.median(milliseconds([value["dcp"] for value in found])),
        peer_name="DCP",
    )


def milliseconds(seconds: Sequence[float]) -> list[float]:
    """Return milliseconds."""
    return [value * 1e3 for value in seconds]


if __name__ == "__main__":
    sys.exit(main())
