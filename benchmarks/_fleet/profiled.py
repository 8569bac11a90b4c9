"""Runs the operator and samples its threads, except those that wait: ``python -m _fleet.profiled FILE``."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from holdfast_operator.main import main

EVERY_SECONDS = 0.01
SHOWN = 60
WAITS = frozenset({"wait", "select", "poll", "_wait_for_tstate_lock", "accept", "recv_into", "read", "_sample"})


def _stack(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(f"{Path(code.co_filename).name}:{code.co_name}")
        frame = frame.f_back
    return found


def _sample(stop: threading.Event, selves: Counter[str], totals: Counter[str]) -> None:
    while not stop.wait(EVERY_SECONDS):
        for frame in sys._current_frames().values():
            if frame.f_code.co_name in WAITS:
                continue
            stack = _stack(frame)
            selves[stack[0]] += 1
            totals.update(set(stack))


def _shown(title: str, counter: Counter[str]) -> list[str]:
    return [f"# {title}", *(f"{count:7d} {name}" for name, count in counter.most_common(SHOWN))]


def run(file: Path) -> int:
    """Run the operator and write the samples. Return the operator's exit status."""
    stop, selves, totals = threading.Event(), Counter[str](), Counter[str]()
    sampler = threading.Thread(target=_sample, args=(stop, selves, totals), daemon=True)
    sampler.start()
    try:
        return main()
    finally:
        stop.set()
        sampler.join()
        parts = [*_shown("where", selves), *_shown("under", totals)]
        file.write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
