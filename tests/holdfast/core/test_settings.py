"""Settings are declared once, and read from an option or a variable in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.run_options import parse
from holdfast.core.environment import SETTINGS, Environment, read_environment, variables
from holdfast.core.errors import UsageError
from holdfast.core.settings import Volume, volume
from holdfast.launcher.options import OPTIONS, RunOptions
from holdfast.launcher.rendezvous.roster import RunRequest

EVERY = (*OPTIONS, *SETTINGS)
VALUES = {
    "checkpoint_interval": "30s",
    "checkpoint_keep": "7",
    "checkpoint_full_every": "4",
    "checkpoint_delta_threshold": "1e-5",
    "checkpoint_retention": "daily=7",
    "resume": "Never",
    "object_url": "s3://b/p",
    "memory_tier": "/dev/shm:1Gi",
    "memory_interval": "2",
    "peer_interval": "4",
    "local_tier": "/mnt",
    "local_interval": "20",
}
"""A value for each setting that has an option and a variable."""


def with_option(name: str, text: str, environ: dict[str, str] | None = None) -> Environment:
    option = next(one.option for one in SETTINGS if one.name == name)
    more = ["--checkpoint-full-every", "4"] if name == "checkpoint_delta_threshold" else []
    return read_environment(environ or {}).with_options(parse(["run", option, text, *more, "--", "x"]).given)


def test_names_options_and_variables_are_unique_and_explained() -> None:
    for names in ([one.name for one in EVERY], [one.flag for one in EVERY if one.flag]):
        assert len(set(names)) == len(names)
    assert len({one.variable for one in SETTINGS}) == len(SETTINGS)
    assert all(one.meaning and one.help for one in EVERY)
    assert {one.name for one in SETTINGS if one.flag} == set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_an_option_and_its_variable_are_read_alike(name: str) -> None:
    variable = next(one.variable for one in SETTINGS if one.name == name)
    read = read_environment({variable: VALUES[name]})
    assert read.given == {name}
    assert getattr(with_option(name, VALUES[name]), name) == getattr(read, name) != getattr(Environment(), name)


@pytest.mark.parametrize("name", VALUES)
def test_option_overrides_its_variable_unless_operator_sets_it(name: str) -> None:
    one = next(one for one in SETTINGS if one.name == name)
    read = with_option(name, VALUES[name], {one.variable: "s3://other"} if name == "object_url" else {})
    assert getattr(read, name) == ("s3://other" if one.variable_wins else one.read(VALUES[name]))
    assert one.variable_wins is (name == "object_url")


def test_a_run_passes_on_its_settings_to_every_rank() -> None:
    environment = read_environment({"HOLDFAST_CHECKPOINT_BYTES_PER_SECOND": "1000"})
    checkpoint = RunRequest(run_id="r", options=RunOptions(), environment=environment).settings()["checkpoint"]
    assert checkpoint == {
        "interval": "50",
        "keepLast": 3,
        "fullEvery": 1,
        "resume": "Always",
        "bytesPerSecond": 1000,
        "deadlineSeconds": 25.0,
    }
    timed = with_option("checkpoint_interval", "5m")
    assert RunRequest(run_id="r", environment=timed).settings()["checkpoint"]["interval"] == "5m"


def test_variables_without_a_value_are_left_out() -> None:
    values = variables(slot=0, publication="", run_dir=None, rank=3)
    assert values == {"HOLDFAST_SLOT": "0", "RANK": "3"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/dev/shm", Volume(root=Path("/dev/shm"))),
        ("/a:5", Volume(root=Path("/a"), limit=5)),
        ("/a:2Gi", Volume(root=Path("/a"), limit=2 << 30)),
    ],
)
def test_a_volume_has_a_path_and_a_size(text: str, expected: Volume) -> None:
    assert volume(text) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LOCAL_TIER", "mnt:1Gi"),
        ("LOCAL_TIER", "/mnt:1GB"),
        ("LOCAL_TIER", "/mnt:0"),
        ("SLOT", "-1"),
        ("GRACE_SECONDS", "long"),
        ("RESUME", "Sometimes"),
        ("CHECKPOINT_INTERVAL", "1.5h"),
    ],
)
def test_a_bad_variable_is_named_with_what_was_expected(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"HOLDFAST_{name}: invalid value '{text}': expected "):
        read_environment({f"HOLDFAST_{name}": text})
