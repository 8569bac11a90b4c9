"""The lines of the recovery benchmark, from the figures in its book."""

from __future__ import annotations

import math
import statistics

import _bench as bench

from _recovery import contenders as c
from _recovery.book import HANGS, Book

OURS = (
    *("ours kill", "ours pods launcher", "ours zygote kill", "ours stop", "ours sleep", "ours gil"),
    *("ours mismatch", "ours pods mismatch"),
)


def all_of(book: Book) -> list[bench.Measurement]:
    """Return every line of the default run."""
    return [row for part in (kill, shrink, zygote, hang, kept, goodput) for row in part(book)]


def resumed(book: Book) -> bench.Measurement:
    """Return the row of recovery-2."""
    ours = [100 * value for key in OURS for value in book.of(f"{key} resumed")]
    stock = [100 * value for value in book.of("torchrun stock kill resumed")]
    return bench.measured(
        "recovery-2",
        "resumed after a fault, of all of ours",
        [statistics.fmean(ours)],
        f"% of {len(ours)}",
        target=">= 100",
        peer=statistics.fmean(stock) if stock else None,
        peer_name=f"stock torchrun, of {len(stock)}" if stock else "stock torchrun: in the default run",
    )


def kill(book: Book) -> list[bench.Measurement]:
    """Return the rows of recovery-1 and -2."""
    ours, theirs = book.of("ours kill seconds"), book.of("torchrun kill seconds")
    peer, name = statistics.median(theirs), "torchrun, sharing off"
    what = "rank SIGKILLed, two ranks under one launcher → next step"
    return [
        bench.measured("recovery-1", f"{what}, median", ours, "s", target="<= 0.5", peer=peer, peer_name=name),
        bench.measured("recovery-1", f"{what}, p90", ours, "s", target="<= 1.0", at=0.9, peer=peer, peer_name=name),
        against(book, "recovery-1", what, "ours kill", ("torchrun kill", name), target=">= 8"),
        resumed(book),
    ]


def shrink(book: Book) -> list[bench.Measurement]:
    """Return the rows of recovery-3."""
    tuned, stock = ("torchft tuned kill", "torchft, heartbeat 0.3 s"), ("torchft kill", "torchft, defaults")
    tuned_three, stock_three = ("torchft three tuned kill", tuned[1]), ("torchft three kill", stock[1])
    one, three = "two ranks under one launcher, the lost one replaced", "three launchers (replicas), one lost → two"
    return [
        against(book, "recovery-3", one, "ours kill", tuned, target=">= 2"),
        against(book, "recovery-3", one, "ours kill", stock, target=">= 20"),
        against(book, "recovery-3", three, "ours pods launcher", tuned_three, target=">= 2"),
        against(book, "recovery-3", three, "ours pods launcher", stock_three, target=">= 20"),
    ]


def zygote(book: Book) -> list[bench.Measurement]:
    """Return the rows of recovery-4."""
    what, peer = "rank SIGKILLed, zygote and no standby process", ("torchrun kill", "torchrun, sharing off")
    if c.no_warm_option():
        return [bench.not_measured("recovery-4", what, c.no_warm_option())]
    return [against(book, "recovery-4", what, "ours zygote kill", peer, target=">= 6")]


def hang(book: Book) -> list[bench.Measurement]:
    """Return the rows of recovery-5."""
    bound = max(1.0, 5 * statistics.median(book.of("ours step") or [0.0]))
    rows = [row for kind, what in HANGS.items() for row in one_hang(book, "ours", kind, what, bound)]
    three = max(1.0, 5 * statistics.median(book.of("ours pods step") or [0.0]))
    return rows + one_hang(book, "ours pods", "mismatch", f"{HANGS['mismatch']}, three launchers", three)


def one_hang(book: Book, key: str, kind: str, what: str, bound: float) -> list[bench.Measurement]:
    seconds, detected = book.of(f"{key} {kind} seconds"), book.of(f"{key} {kind} detected")
    if not seconds or any(math.isnan(value) for value in detected):
        return [bench.not_measured("recovery-5", what, "not every one was detected" if seconds else "not in --quick")]
    after = [max(0.0, total - part) for total, part in zip(seconds, detected, strict=True)]
    other = "stop" if kind == "stop" else "sleep"
    peer = (f"torchft hang {other}", f"torchft, defaults, {HANGS[other]}")
    return [
        bench.measured("recovery-5", f"{what}: ended after", detected, "s", target=f"<= {bound:.2f}"),
        bench.measured("recovery-5", f"{what}: next step after that", after, "s", target="<= 0.5"),
        against(book, "recovery-5", what, f"{key} {kind}", peer, target=">= 40"),
    ]


def kept(book: Book) -> list[bench.Measurement]:
    """Return the rows of recovery-7."""
    lost = [value for key in OURS for value in book.of(f"{key} lost")]
    wrong = [1.0 - value for value in book.of("ours audit")]
    theirs = book.of("torchrun kill lost")
    return [
        bench.measured(
            "recovery-7",
            "completed steps lost to a fault, the maximum",
            lost,
            "steps",
            target="<= 0",
            at=1.0,
            peer=max(theirs, default=None),
            peer_name="torchrun, a checkpoint every step" if theirs else "torchrun: in the default run",
        ),
        bench.measured(
            "recovery-7", "sessions that missed a sample or saw one twice", [sum(wrong)], "", target="<= 0"
        )
        if wrong
        else bench.not_measured("recovery-7", "samples missed or seen twice", "no session came to its end"),
    ]


def goodput(book: Book) -> list[bench.Measurement]:
    """Return the rows of recovery-9."""
    what, ours = "steps with a kill every 30 s ÷ steps without", book.of("ours goodput")
    if not ours:
        return [bench.not_measured("recovery-9", what, "only with --goodput or --full")]
    rivals = {name: book.of(f"{name} goodput") for name in ("torchrun", "torchft")}
    told = [f"{name} {statistics.median(values):.2f}" for name, values in rivals.items() if values]
    return [bench.measured("recovery-9", what, ours, "", target=">= 0.97", peer_name=", ".join(told))]


def against(book: Book, bar: str, what: str, ours: str, peer: tuple[str, str], *, target: str) -> bench.Measurement:
    """Return the row of how many times faster Holdfast is, within each round; without the peer, it has the reason."""
    theirs, name = peer
    ratios = book.times_faster(f"{ours} seconds", f"{theirs} seconds")
    if not ratios:
        return bench.not_measured(bar, f"{what}, compared with {name}", book.without_torchft or "no trial")
    own, other = (statistics.median(book.of(f"{key} seconds")) for key in (ours, theirs))
    text = f"{what}: times faster than {name} ({bench.number(own)} s, {bench.number(other)} s)"
    return bench.measured(bar, text, ratios, "x", target=target)
