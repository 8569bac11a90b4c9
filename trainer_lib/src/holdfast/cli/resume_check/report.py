"""What `holdfast resume-check` prints at the end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from holdfast.cli.checkpoints.diff import Difference

_MOST_NAMES = 10
_NOT_OF_SCRIPT = ("state.failures", "state.rank-", "state.streams.")
_EXACT = "equal: {steps} steps, and {half} steps, a restart and {rest} steps, end with the same {tensors} tensors"


class Diagnosis(Enum):
    """Why two runs differ, and what to check."""

    NOT_DETERMINISTIC = """\
the script is not deterministic: two runs without a restart differ. Check, in this order:
  1. random generators without a seed: call torch.manual_seed, numpy.random.seed and random.seed with a fixed number
     before the model is built
  2. kernels whose results vary: call holdfast.init(deterministic=True) before the script uses a GPU
  3. the order of the data: sets, os.listdir without sorted(), threads, the clock"""
    NOT_RESUMED = """\
the restart is not exact: runs without a restart agree, and the restarted run differs. Check, in this order:
  1. state that is not in job.manage(): a moving average, a GradScaler, a counter, a buffer with persistent=False
  2. state that the script changes after job.step(), such as scheduler.step(): the checkpoint of a step is made in
     job.step(). Pass the scheduler to job.manage(scheduler=…), which calls it
  3. the position in the data: use job.batches(), or pass an object with state_dict() to job.manage()
  4. random generators of your own (numpy.random.Generator, torch.Generator): Holdfast restores only the global ones
     of Python, NumPy and torch
  5. code that runs at each start and changes managed state"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first step at which two runs differ."""

    diagnosis: Diagnosis
    step: int
    difference: Difference
    largest: float | None
    """Maximum absolute difference of the first changed tensor; None if no tensor changed, or if it is not finite."""


def of_script(found: Difference) -> Difference:
    """Leave out what Holdfast measures, and the states of random generators.

    A script that seeds only the generators that it uses is exact, and the others show in no tensor.
    """
    return replace(found, state=tuple(path for path in found.state if not path.startswith(_NOT_OF_SCRIPT)))


def equal(*, steps: int, half: int, tensors: int) -> str:
    """Return the line of success."""
    return _EXACT.format(steps=steps, half=half, rest=steps - half, tensors=tensors)


def differs(finding: Finding) -> str:
    """Return the first step and tensor, the other names, and the likely causes."""
    found = finding.difference
    names = _names(found)
    by = "" if finding.largest is None else f", by at most {finding.largest:.3g}"
    lines = [f"differs: first at step {finding.step}, in {names[0]}{by}"]
    if len(names) > 1:
        others = ", ".join(names[1:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
        lines.append(f"also different at this step ({len(names) - 1}): {others}")
    lines.append(f"{found.same} tensors are the same")
    return "\n".join([*lines, str(finding.diagnosis.value)])


def _names(found: Difference) -> list[str]:
    """Return what differs: tensors before other state."""
    return [*found.changed, *found.shapes, *found.dtypes, *found.added, *found.missing, *found.state]
