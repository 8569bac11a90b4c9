"""What each check says about which facts. No answer in time is a failure; nothing to look at is none."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from holdfast_sidecar.gpu.detector import GpuState
from holdfast_sidecar.gpu.exposition import Gpu, Sample
from holdfast_sidecar.gpu.monitor import View
from holdfast_sidecar.main import gpu_health
from holdfast_sidecar.preflight.checks import GpuHealth, Inputs, Reachability, Skew, judge
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.protocol.preflight import Check, Peer
from holdfast_sidecar.settings import PreflightSettings

NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)


def check(name: str, facts: Inputs, **asked: Any) -> Check:
    wanted = {"seconds": 60.0, "gpus": 2, "skew_seconds": 5.0, **asked}
    (found,) = judge(PreflightSettings(checks=(name,), **wanted), facts).checks
    return found


def shown(*values: dict[str, float], errors: tuple[GpuError, ...] = (), answers: bool | None = True) -> GpuHealth:
    """An exporter that shows GPUs with these fields."""
    gpus = tuple(Gpu(uuid=f"GPU-{n}", index=n, values=fields) for n, fields in enumerate(values))
    tracks = {gpu.uuid: GpuState(uuid=gpu.uuid, index=gpu.index) for gpu in gpus}
    view = View(answers=answers, sample=Sample(gpus=gpus), gpus=tracks, errors=errors)
    return gpu_health(view)


def error(action: str) -> GpuError:
    return GpuError(
        gpu="GPU-0",
        index=0,
        kind="RowRemapFailure",
        xid=None,
        count=1,
        cause="Infrastructure",
        action=action,
        message="GPU 0: bad rows of memory cannot be replaced any more",
        first=NOON,
        last=NOON,
    )


SILENT = GpuHealth()
GPUS = [
    ("none asked for", Inputs(elapsed=0), {"gpus": 0}, "Skipped", "asks for no GPU"),
    ("all there", Inputs(elapsed=1, gpus=shown({}, {})), {}, "Passed", "2 of 2 GPUs are there, and none shows"),
    ("one is missing yet", Inputs(elapsed=59, gpus=shown({})), {}, "Running", "counted"),
    ("one is missing", Inputs(elapsed=60, gpus=shown({})), {}, "Failed", "1 of 2 GPUs are there"),
    ("none is shown", Inputs(elapsed=60, gpus=shown()), {}, "Failed", "0 of 2 GPUs are there"),
    ("the launcher sees them", Inputs(elapsed=1, gpus=shown(), visible={"a", "b"}), {}, "Passed", "2 of 2"),
    (
        "the exporter is silent yet",
        Inputs(elapsed=1, gpus=SILENT, visible={"a", "b"}),
        {},
        "Running",
        "exporter",
    ),
    (
        "the exporter is silent",
        Inputs(elapsed=60, gpus=SILENT, visible={"a", "b"}),
        {},
        "Passed",
        "nothing is known",
    ),
    ("there is no exporter", Inputs(elapsed=1, visible={"a", "b"}), {}, "Passed", "nothing is known of their health"),
    (
        "a fault for which a node is left",
        Inputs(elapsed=1, gpus=shown({}, {}, errors=(error("ReplaceNode"),))),
        {},
        "Failed",
        "GPU 0: bad rows of memory cannot be replaced",
    ),
    ("a lesser fault", Inputs(elapsed=1, gpus=shown({}, {}, errors=(error("Ignore"),))), {}, "Passed", "2 of 2"),
    (
        "memory errors before the job came",
        Inputs(elapsed=1, gpus=shown({}, {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2.0})),
        {},
        "Failed",
        "GPU 1: 2 uncorrectable memory errors since its driver was loaded",
    ),
]


@pytest.mark.parametrize(
    ("facts", "asked", "result", "says"), [row[1:] for row in GPUS], ids=[row[0] for row in GPUS]
)
def test_gpus(facts: Inputs, asked: dict[str, Any], result: str, says: str) -> None:
    found = check("GPU", facts, **asked)
    assert found.result == result
    assert says in found.message


def told(result: str, message: str = "its words", name: str = "Storage", **more: str) -> dict[str, Any]:
    return {"version": 1, "checks": [{"name": name, "result": result, "message": message, **more}]}


STORAGE = [
    ("no launcher yet", Inputs(elapsed=0), "Running", "not started"),
    ("an old launcher", Inputs(elapsed=1, launcher=True), "Skipped", "too old"),
    ("it is at it", Inputs(elapsed=59, launcher=True, told=told("Running")), "Running", "its words"),
    ("the disk hangs", Inputs(elapsed=60, launcher=True, told=told("Running")), "Failed", "not answered within 60 s"),
    ("well", Inputs(elapsed=90, launcher=True, told=told("Passed")), "Passed", "its words"),
    ("full", Inputs(elapsed=1, launcher=True, told=told("Failed")), "Failed", "its words"),
    ("no volume", Inputs(elapsed=1, launcher=True, told=told("Skipped")), "Skipped", "its words"),
    ("another check", Inputs(elapsed=1, launcher=True, told=told("Failed", name="x")), "Skipped", "reports nothing"),
    ("no result", Inputs(elapsed=1, launcher=True, told=told("Perhaps")), "Skipped", "reports nothing"),
    ("rubbish", Inputs(elapsed=1, launcher=True, told={"checks": [1, None]}), "Skipped", "reports nothing"),
]


@pytest.mark.parametrize(("facts", "result", "says"), [row[1:] for row in STORAGE], ids=[row[0] for row in STORAGE])
def test_the_checkpoint_volume(facts: Inputs, result: str, says: str) -> None:
    found = check("Storage", facts)
    assert found.result == result
    assert says in found.message


STORE = [
    ("it is at it", told("Running", name="ObjectStore"), 59.0, "Running", "its words", ""),
    ("it hangs", told("Running", name="ObjectStore"), 60.0, "Failed", "object store has not answered", ""),
    ("out of reach", told("Failed", name="ObjectStore"), 1.0, "Failed", "its words", ""),
    ("refused", told("Failed", name="ObjectStore", blame="Job"), 1.0, "Failed", "its words", "Job"),
    ("rubbish", told("Failed", name="ObjectStore", blame="everybody"), 1.0, "Failed", "its words", ""),
    ("an older launcher", told("Passed"), 1.0, "Skipped", "the launcher reports nothing about the object store", ""),
]


@pytest.mark.parametrize(
    ("said", "elapsed", "result", "says", "blame"), [row[1:] for row in STORE], ids=[row[0] for row in STORE]
)
def test_the_object_store(said: dict[str, Any], elapsed: float, result: str, says: str, blame: str) -> None:
    found = check("ObjectStore", Inputs(elapsed=elapsed, launcher=True, told=said))
    assert (found.result, found.blame) == (result, blame)
    assert says in found.message


@pytest.mark.parametrize(
    ("skew", "result", "says"),
    [
        (None, "Running", "is asked"),
        (Skew(seconds=0.3, error=0.5), "Passed", "within 5 s"),
        (Skew(seconds=5.4, error=0.5), "Passed", "within 5 s"),
        (Skew(seconds=5.6, error=0.5), "Failed", "6 s ahead of the operator's, 5 s are allowed"),
        (Skew(seconds=-90.0, error=0.5), "Failed", "90 s behind the operator's"),
        (Skew(seconds=9.0, error=4.5), "Passed", "within 5 s"),
    ],
)
def test_the_clock_is_judged_only_as_far_as_it_is_known(skew: Skew | None, result: str, says: str) -> None:
    found = check("Clock", Inputs(elapsed=1, skew=skew))
    assert found.result == result
    assert says in found.message


PEERS = tuple(Peer(pod=f"gpt-w{n}", uid=f"uid-w{n}", ip=f"10.0.0.{n}", port=29401) for n in range(6))


def lost(*numbers: int, seconds: float) -> dict[str, tuple[str, float]]:
    return {f"uid-w{n}": ("no answer within 2 s", seconds) for n in numbers}


NETWORK = [
    ("not ready itself", None, "Running", "the launcher is not ready"),
    ("an old operator", Reachability(told=False), "Skipped", "too old"),
    ("the first one", Reachability(), "Passed", "reaches all 0 other workers"),
    (
        "all",
        Reachability(peers=PEERS, reached=frozenset(p.uid for p in PEERS)),
        "Passed",
        "reaches all 6 other workers",
    ),
    ("not all yet", Reachability(peers=PEERS, reached=frozenset({"uid-w0"})), "Running", "are tried"),
    ("one is late", Reachability(peers=PEERS[:1], errors=lost(0, seconds=14.9)), "Running", "are tried"),
    (
        "one is out of reach",
        Reachability(peers=PEERS[:1], errors=lost(0, seconds=15)),
        "Failed",
        "gpt-w0 (10.0.0.0:29401,",
    ),
    (
        "many are",
        Reachability(peers=PEERS, errors=lost(*range(6), seconds=15)),
        "Failed",
        "gpt-w3 (10.0.0.3:29401, no",
    ),
]


@pytest.mark.parametrize(("reach", "result", "says"), [row[1:] for row in NETWORK], ids=[row[0] for row in NETWORK])
def test_the_network(reach: Reachability | None, result: str, says: str) -> None:
    found = check("Network", Inputs(elapsed=1, reach=reach))
    assert found.result == result
    assert says in found.message
    assert bool(found.unreached) == (result == "Failed")


def test_a_check_of_a_later_version_is_skipped() -> None:
    assert check("Moon", Inputs(elapsed=1)).result == "Skipped"
