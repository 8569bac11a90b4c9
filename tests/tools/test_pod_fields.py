"""The CRD lists every field of a pod that Kubernetes has, so that the rule of immutability covers each of them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from holdfast_testbed.constants import KUBERNETES

TOOL = Path(__file__).resolve().parents[2] / "tools" / "pod_fields.py"
_spec = importlib.util.spec_from_file_location("pod_fields", TOOL)
assert _spec is not None
assert _spec.loader is not None
pod_fields = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pod_fields)

RECORD = json.loads(pod_fields.RECORD.read_text())
CRD = yaml.safe_load(pod_fields.CRD.read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
POD = SCHEMA["workers"]["properties"]["template"]["properties"]["spec"]["properties"]
CONTAINER = POD["containers"]["items"]["properties"]
LISTED = {
    "PodSpec": POD,
    "Container": CONTAINER,
    "EnvVar": CONTAINER["env"]["items"]["properties"],
    "Volume": POD["volumes"]["items"]["properties"],
}


def test_the_record_is_of_the_testbeds_kubernetes() -> None:
    assert RECORD["kubernetes"] == KUBERNETES, f"python {TOOL} --record {KUBERNETES}"


@pytest.mark.parametrize("kind", pod_fields.TYPES)
def test_every_field_of_a_pod_is_listed(kind: str) -> None:
    assert set(RECORD[kind]) <= set(LISTED[kind])


def test_the_blocks_are_those_that_the_generator_makes() -> None:
    text = pod_fields.CRD.read_text()
    assert pod_fields.filled(text, RECORD) == text, "run 'make generate'"


def test_a_field_by_hand_is_not_listed_again_and_others_are_exchanged() -> None:
    before = "a:\n  # Fields of Volume\n  old: " + pod_fields._FIELD + "\n  name:\n    csi: {}\nb: {}\n"
    after = pod_fields.filled(before, {"Volume": ["csi", "name", "nfs"]})
    listed = yaml.safe_load(after)["a"]
    assert list(listed) == ["csi", "nfs", "name"]
    assert after.endswith("  name:\n    csi: {}\nb: {}\n")
