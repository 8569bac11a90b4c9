"""Without ``processesPerWorker``: one process for each whole GPU of the trainer, or a message with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_operator.api.spec.spec import parse_spec
from holdfast_operator.errors import UnreadableError
from holdfast_operator.manifests.membership_document import settings


def spec_of(value: Any, resources: Any = None, *beside: dict[str, Any]) -> dict[str, Any]:
    trainer = {"name": "trainer", "image": "x", **({} if resources is None else {"resources": resources})}
    template = {"spec": {"containers": [*beside, trainer]}}
    given = {} if value is None else {"processesPerWorker": value}
    return {"workers": {"replicas": 2, "template": template, **given}}


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({}, 1),
        ({"cpu": "8"}, 1),
        ({"nvidia.com/gpu": 8}, 8),
        ({"nvidia.com/gpu": "8"}, 8),
        ({"nvidia.com/gpu": 0}, 1),
        ({"amd.com/gpu": 4, "rdma/hca": 1}, 4),
        ({"nvidia.com/gpu": 2, "nvidia.com/hostdev": 1}, 2),
        ({"nvidia.com/gpu": 64}, 64),
    ],
)
def test_one_process_for_each_gpu_in_the_settings_of_launchers(limits: dict[str, Any], count: int) -> None:
    spec = parse_spec(spec_of(None, {"limits": limits}))
    assert spec.processes_per_worker == count
    assert settings(spec)["processesPerWorker"] == count


def test_the_gpus_of_another_container_are_not_the_trainers() -> None:
    beside = {"name": "viewer", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert parse_spec(spec_of(None, {"limits": {"nvidia.com/gpu": 4}}, beside)).processes_per_worker == 4
    assert parse_spec(spec_of(None, None, beside)).processes_per_worker == 1


def test_a_number_is_taken_as_it_is_whatever_the_limits_say() -> None:
    assert parse_spec(spec_of(3, {"limits": {"nvidia.com/gpu": 8}})).processes_per_worker == 3
    assert parse_spec(spec_of(2, {"limits": {"nvidia.com/mig-1g.10gb": 2}})).processes_per_worker == 2


@pytest.mark.parametrize(
    ("value", "resources", "says"),
    [
        ("auto", None, "must be an integer from 1 to 64, not 'auto'"),
        ("8", None, "must be an integer"),
        (0, None, "must be an integer"),
        (65, None, "must be an integer"),
        (True, None, "must be an integer"),
        (None, {"limits": {"nvidia.com/gpu": "many"}}, "have 'many' nvidia.com/gpu"),
        (None, {"limits": {"nvidia.com/gpu": "1500m"}}, "expected an integer from 0 to 64"),
        (None, {"limits": {"nvidia.com/gpu": 65}}, "from 0 to 64; fix the limit, or set"),
        (None, {"limits": {"nvidia.com/gpu": 40, "amd.com/gpu": 40}}, "80 GPUs"),
        (
            None,
            {"limits": {"nvidia.com/mig-1g.10gb": 3}},
            "3 nvidia.com/mig-1g.10gb, which are parts of GPUs: set processesPerWorker",
        ),
        (None, {"claims": [{"name": "gpus"}]}, "resources.claims"),
    ],
)
def test_auto_without_a_number_of_gpus_is_refused(value: Any, resources: Any, says: str) -> None:
    """The error names the field and the remedy."""
    with pytest.raises(UnreadableError) as caught:
        parse_spec(spec_of(value, resources))
    assert "spec.workers.processesPerWorker" in str(caught.value)
    assert says in str(caught.value)
