"""Each row of the drill matrix on real nodes, once. `make drill` keeps them too, and times them."""

from __future__ import annotations

import pytest

from holdfast_testbed.drill.faults import DrillJob
from holdfast_testbed.drill.matrix import CASES, Case
from holdfast_testbed.drill.trial import run
from holdfast_testbed.errors import UnplaceableError

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

NAMESPACE = "matrix"
PROMISES = "tests/e2e/test_promises.py: the same fault, cause and lost steps; only `make drill` compares the weights"
ELSEWHERE = {
    "node-power": PROMISES,
    "operator-killed": PROMISES,
    "pod-deleted": PROMISES,
    "disk-full": "tests/holdfast: test_full_disk.py, test_storage_outage.py; here it would fill the machine's disk",
}
HERE = [case for case in CASES if case.name not in ELSEWHERE]


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_a_fault_costs_no_more_than_the_matrix_says(case: Case, stage: DrillJob) -> None:
    try:
        trial = run(case, stage)
    except UnplaceableError as error:
        pytest.skip(str(error))
    assert trial.held(case), trial


def test_each_row_is_kept_here_or_named_where_it_is() -> None:
    assert ELSEWHERE.keys() <= {case.name for case in CASES}
