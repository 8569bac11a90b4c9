"""The rows of the guards' cost, from the values of `guards_rank.py`."""

from __future__ import annotations

from dataclasses import replace

import _bench as bench

import holdfast

BAR = "guards"
PERIOD = holdfast.Guards().replica_check_steps


def rows(shape: str, size: str, trials: bench.Trials) -> list[bench.Measurement]:
    """Return the rows of one model: a step, a comparison of replicas, and a save."""
    wall = step(shape, "wall", trials)
    title = f"with guards ÷ without, {size}"
    found = [
        bench.measured(BAR, title, wall, "x", target="<= 1.02"),
        replace(bench.measured(BAR, f"{title}: 95 % bound of the mean", wall, "x"), ours=bench.bound(wall)),
        bench.measured(BAR, f"{title}: CPU time", step(shape, "cpu", trials), "x"),
        *calls(shape, size, trials),
    ]
    seconds = trials.values(f"{shape} comparison wall")
    steps = trials.values(f"{shape} guards wall peer")
    percent = [100 * one / (PERIOD * bench.median(steps)) for one in seconds]
    return [
        *found,
        bench.measured(BAR, f"one comparison of replicas, {size}", milliseconds(seconds), "ms"),
        bench.measured(BAR, f"one comparison in {PERIOD} steps, {size}", percent, "% of the time", target="<= 1"),
        bench.measured(BAR, f"a step without guards, {size}", milliseconds(steps), "ms"),
        *save(shape, size, trials),
    ]


def step(shape: str, what: str, trials: bench.Trials) -> list[float]:
    """Return the ratios of a step, each with its part of a comparison."""
    usual = bench.median(trials.values(f"{shape} guards {what} peer"))
    part = bench.median(trials.values(f"{shape} comparison {what}")) / (PERIOD * usual)
    return [ratio + part for ratio in trials.values(f"{shape} guards {what}")]


def calls(shape: str, size: str, trials: bench.Trials) -> list[bench.Measurement]:
    """Return the rows of the CPU time in the guards' calls, which other load disturbs least."""
    own, norm, steps = (trials.values(f"{shape} guards {what}") for what in ("own", "norm", "step"))
    part = bench.median(trials.values(f"{shape} comparison cpu")) / PERIOD
    title, unit = f"calls of the guards, {size}", "% of a step's CPU time"
    added = [100 * (one + part) / (step - one) for one, step in zip(own, steps, strict=True)]
    norms = [100 * one / step for one, step in zip(norm, steps, strict=True)]
    return [
        bench.measured(BAR, title, added, unit),
        bench.measured(BAR, f"{title}: the norm of the gradients alone", norms, unit),
    ]


def save(shape: str, size: str, trials: bench.Trials) -> list[bench.Measurement]:
    """Return the rows of a save by two ranks."""
    found = []
    for what, title in (
        ("stall", "stall of a save by 2 ranks"),
        ("durable", "save by 2 ranks until it is durable"),
        ("cpu", "save by 2 ranks: CPU time of a rank"),
    ):
        checked, unchecked = (trials.values(f"{shape} save {what} {how}") for how in ("checked", "unchecked"))
        added = [1000 * (one - other) for one, other in zip(checked, unchecked, strict=True)]
        ratios = bench.ratios(checked, unchecked)
        found.append(bench.measured(BAR, f"{title}, with guards ÷ without, {size}", ratios, "x"))
        found.append(bench.measured(BAR, f"{title}, with guards − without, {size}", added, "ms"))
    return found


def milliseconds(seconds: list[float]) -> list[float]:
    return [1000 * one for one in seconds]
