"""Each failed checkpoint has one cause, whichever code wraps the error of the operating system."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from holdfast.checkpoint.format.failure_causes import FailureCause, cause_of, of_errno
from holdfast.checkpoint.saving.rank_results import NONE, SaveFailure
from holdfast.checkpoint.stores.objects.errors import ADVICE
from holdfast.core.errors import (
    CheckpointError,
    ClaimError,
    CorruptCheckpointError,
    NoCapacityError,
    UnavailableError,
)

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "Full"),
        (errno.EDQUOT, "Full"),
        (errno.EROFS, "ReadOnly"),
        (errno.EACCES, "Denied"),
        (errno.EPERM, "Denied"),
        (errno.EIO, "IO"),
        (errno.ENOENT, "Gone"),
        (errno.ENOMEM, "Memory"),
        (errno.ETIMEDOUT, "Timeout"),
        (errno.ESTALE, "Network"),
        (errno.ECONNREFUSED, "Network"),
        (errno.EINVAL, "Other"),
        (None, "Other"),
    ],
)
def test_each_trouble_of_the_operating_system_has_its_word(number: int | None, cause: str) -> None:
    assert of_errno(number) == cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OSError(errno.EIO, "Input/output error"), "IO"),
        (TimeoutError("it took too long"), "Timeout"),
        (ConnectionError("the other side closed the connection"), "Network"),
        (MemoryError(), "Memory"),
        (NoCapacityError("too small"), "Full"),
        (CorruptCheckpointError("torn"), "Damaged"),
        (ClaimError("taken"), "Claim"),
        (UnavailableError("the store is slow", cause="Throttled"), "Throttled"),
        (CheckpointError("rank 1 saves other tensors"), "Other"),
    ],
)
def test_an_error_has_a_word_and_keeps_it_when_it_is_wrapped(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause
    wrapped = CheckpointError("a neighbour is in trouble")
    wrapped.__cause__ = error
    assert cause_of(wrapped) == cause


def test_of_several_ranks_the_lowest_ones_cause_is_told() -> None:
    told = [NONE, SaveFailure.of(OSError(errno.ENOSPC, "full"), 1), SaveFailure.of(OSError(errno.EIO, "broken"), 2)]
    among = SaveFailure.among(told)
    assert (among.error, among.cause) == ("rank 1: [Errno 28] full; rank 2: [Errno 5] broken", "Full")
    assert SaveFailure.among(told[:1]) == NONE
    assert not NONE


def test_copies_to_an_object_store_have_no_words_of_their_own() -> None:
    assert {str(kind) for kind in ADVICE} <= set(FailureCause)


def test_the_page_of_metrics_has_every_word() -> None:
    section = (
        (DOCS / "reference" / "metrics.md").read_text().split("### Why a checkpoint failed\n")[1].split("\n## ")[0]
    )
    assert set(FailureCause) <= set(re.findall(r"`(\w+)`", section))
