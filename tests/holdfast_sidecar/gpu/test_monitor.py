"""The exporter over HTTP: what is kept, told and exported, and what its faults do."""

import errno
import json
import logging
import re
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast_sidecar import constants as c
from holdfast_sidecar.gpu.error_log import notice_of
from holdfast_sidecar.gpu.monitor import GpuWatch
from holdfast_sidecar.gpu.rules import REPLACE_NODE, XID_RULES
from holdfast_sidecar.metrics import gpu as gpu_metrics
from holdfast_sidecar.metrics.exporter import Metrics
from holdfast_sidecar.protocol.gpu_error import GpuError
from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher
from holdfast_sidecar.runtime.http import Connection


class Watched:
    """A watch of the exporter under a clock of the test's."""

    def __init__(self, exporter, pod, run_dir, clock) -> None:
        self.exporter, self.clock, self.news, self.errors = exporter, clock, 0, 0
        self._pod, self._run_dir = pod, run_dir
        self.told: set[str] = set()
        self.serious: list[GpuError] = []
        self.full_disk = False
        self.restart()

    def restart(self) -> None:
        connection = Connection(f"{self.exporter.url}/metrics", self.clock.monotonic, max_bytes=c.MAX_EXPORTER_BYTES)
        self.watch = GpuWatch(
            connection,
            self._pod,
            self._run_dir,
            self.clock,
            lambda _low, high: high,
            launcher_gpus=lambda: self.told,
            on_serious=self._on_serious,
            on_news=self._on_news,
            on_error=self._on_error,
        )

    def tick(self, seconds: float = 10.0) -> float:
        self.clock.forward(seconds)
        for gpu in self.exporter.node.gpus:
            gpu.live()
        return self.watch.tick()

    def found(self) -> list[tuple[str, int | None, int]]:
        return [(error.kind, error.xid, error.count) for error in self.watch.view().errors]

    def metrics(self) -> dict[str, float]:
        """Name with labels → value, without the UUID."""

        def families():
            return gpu_metrics.metrics(self.watch.view(), self.clock)

        text = (
            Metrics(self.clock, LauncherStatusWatcher(self._run_dir, self.clock).current, gpus=families)
            .render()
            .decode()
        )
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "uuid")
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def _on_serious(self, error: GpuError) -> None:
        if self.full_disk:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.serious.append(error)

    def _on_news(self) -> None:
        self.news += 1

    def _on_error(self, name: str) -> None:
        assert name == "DCGM"
        self.errors += 1


@pytest.fixture
def watched(exporter, pod, run_dir, clock) -> Watched:
    return Watched(exporter, pod, run_dir, clock)


def test_an_error_is_kept_for_the_operator_with_its_times(watched, exporter, clock):
    watched.tick()
    assert (watched.found(), watched.news, exporter.asked) == ([], 0, ["/metrics"])
    exporter.node.gpus[0].set(XID_ERRORS=79)
    watched.tick()
    (error,) = watched.watch.view().errors
    assert (error.kind, error.xid, error.count, error.cause) == ("Xid", 79, 1, "Infrastructure")
    assert (error.gpu, error.index, error.action) == (exporter.node.gpus[0].uuid, 0, "ReplaceNode")
    assert error.message == "GPU 0: XID 79, the GPU has fallen off the bus"
    assert error.first == error.last == clock.now()
    assert watched.news == 1
    watched.tick()
    assert watched.news == 1


def test_what_comes_again_raises_the_count(watched, exporter):
    for xid in (0, 31, 94, 31):
        exporter.node.gpus[0].set(XID_ERRORS=xid)
        watched.tick()
    assert watched.found() == [("Xid", 94, 1), ("Xid", 31, 2)]
    _, error = watched.watch.view().errors
    assert (error.last - error.first).total_seconds() == 20


@pytest.mark.parametrize("rule", XID_RULES, ids=lambda rule: min(rule.xids))
def test_an_xid_is_serious_if_its_advice_is_to_leave_the_node(watched, exporter, rule):
    watched.tick()
    exporter.node.gpus[0].set(XID_ERRORS=min(rule.xids))
    watched.tick()
    assert len(watched.serious) == (rule.action == REPLACE_NODE)


def test_a_serious_error_is_passed_on_once(watched, exporter):
    exporter.node.gpus[0].set(XID_ERRORS=79, ECC_DBE_VOL_TOTAL=3)
    watched.tick()
    assert watched.serious == [], "they are older than the sidecar"
    exporter.node.gpus[0].set(XID_ERRORS=48, ECC_DBE_VOL_TOTAL=4)
    watched.tick()
    assert [(error.kind, error.xid) for error in watched.serious] == [("Xid", 48), ("DoubleBitEcc", None)]
    exporter.node.gpus[0].set(ECC_DBE_VOL_TOTAL=5)
    watched.tick()
    watched.restart()
    exporter.node.gpus[0].set(ECC_DBE_VOL_TOTAL=6)
    watched.tick()
    assert watched.found() == [("Xid", 48, 1), ("DoubleBitEcc", None, 3)]
    assert len(watched.serious) == 2


def test_a_serious_error_is_passed_on_again_until_it_is_stored(watched, exporter, run_dir):
    watched.tick()
    stored = (run_dir / c.GPU_FILE).read_bytes()
    exporter.node.gpus[0].set(XID_ERRORS=79)
    watched.tick()
    (run_dir / c.GPU_FILE).write_bytes(stored)  # as if the sidecar was killed before it stored the error
    watched.restart()
    watched.tick()
    first, again = watched.serious
    within = timedelta(seconds=25)
    assert notice_of(first, within).id == notice_of(again, within).id, "so the launcher receives one request"
    assert not notice_of(first, within).drain


def test_a_request_that_cannot_be_written_is_repeated_and_the_error_is_reported(watched, exporter):
    watched.tick()
    exporter.node.gpus[0].set(XID_ERRORS=79)
    watched.full_disk = True
    watched.tick()
    assert (watched.found(), watched.news, watched.serious) == ([("Xid", 79, 1)], 1, [])
    watched.full_disk = False
    watched.tick()
    watched.tick()
    assert (watched.found(), watched.news, len(watched.serious)) == ([("Xid", 79, 1)], 1, 1)


def test_another_pods_errors_are_not_ours(watched, exporter):
    watched.tick()
    exporter.node.gpus[1].set(XID_ERRORS=79, ECC_DBE_VOL_TOTAL=4)
    watched.tick()
    assert watched.found() == []


def test_a_restarted_sidecar_neither_forgets_nor_repeats(watched, exporter):
    watched.tick()
    exporter.node.gpus[0].set(XID_ERRORS=79, ECC_DBE_VOL_TOTAL=2, ROW_REMAP_FAILURE=1)
    watched.tick()
    before = watched.watch.view().errors
    watched.restart()
    assert watched.watch.view().errors == before
    watched.tick()
    assert watched.watch.view().errors == before
    exporter.node.gpus[0].set(ECC_DBE_VOL_TOTAL=3)
    watched.restart()
    watched.tick()
    assert ("DoubleBitEcc", None, 3) in watched.found(), "what came while the sidecar was away is seen"


@pytest.mark.parametrize("content", ["", "{", '{"version": 2}', '{"version": 1, "errors": [3], "gpus": {}}'])
def test_a_memory_that_is_not_ours_starts_anew(watched, run_dir, content):
    (run_dir / c.GPU_FILE).write_text(content)
    watched.restart()
    watched.tick()
    assert watched.found() == []
    assert json.loads((run_dir / c.GPU_FILE).read_text())["gpus"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"status": 500}, "answered 500"),
        ({"body": b"<html>log in to the network</html>"}, "shows no GPU"),
        ({"body": b""}, "shows no GPU"),
        ({"body": b"x" * (c.MAX_EXPORTER_BYTES + 1)}, "larger than"),
    ],
)
def test_a_fault_of_the_exporter_is_one_line_and_ends_by_itself(watched, exporter, caplog, fault, says):
    caplog.set_level(logging.INFO)
    watched.tick()
    for name, value in fault.items():
        setattr(exporter, name, value)
    for _ in range(3):
        assert watched.tick() <= c.GPU_POLL_SECONDS
    assert (caplog.text.count(says), watched.errors) == (1, 3)
    assert watched.metrics()["holdfast_gpu_exporter_up"] == 0
    exporter.status, exporter.body = 200, None
    watched.tick()
    assert watched.metrics()["holdfast_gpu_exporter_up"] == 1
    assert watched.found() == []


def test_an_exporter_that_is_not_there_is_asked_ever_more_rarely(watched, exporter):
    exporter.stop()
    assert [watched.tick() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_without_a_mapping_the_launchers_gpus_count(watched, exporter, caplog):
    for gpu in exporter.node.gpus:
        gpu.pod = ""
    watched.tick()
    assert "shows none of ours" in caplog.text
    watched.told = {exporter.node.gpus[1].uuid}
    watched.tick()
    exporter.node.gpus[1].set(XID_ERRORS=79)
    watched.tick()
    assert watched.found() == [("Xid", 79, 1)]


def test_readings_are_exported(watched, exporter):
    exporter.node.gpus[0].set(CLOCK_THROTTLE_REASONS=0x44)
    watched.tick()
    found = watched.metrics()
    assert found["holdfast_gpu_utilization_ratio{gpu=0}"] == pytest.approx(0.97)
    assert found["holdfast_gpu_memory_used_bytes{gpu=0}"] == 20000 << 20
    assert found["holdfast_gpu_memory_bytes{gpu=0}"] == 81000 << 20
    assert found["holdfast_gpu_temperature_celsius{gpu=0}"] == 48
    assert found["holdfast_gpu_throttled{gpu=0,reason=hw_thermal}"] == 1
    assert found["holdfast_gpu_throttled{gpu=0,reason=power_cap}"] == 1
    assert found["holdfast_gpu_throttled{gpu=0,reason=hw_power_brake}"] == 0
    assert found["holdfast_gpu_row_remap_failure{gpu=0}"] == 0
    assert found["holdfast_gpu_hardware_errors_total{gpu=0,type=ecc_double_bit}"] == 0
    assert not any("gpu=1" in name for name in found)


def test_errors_are_exported_as_counters(watched, exporter):
    watched.tick()
    exporter.node.gpus[0].set(XID_ERRORS=79, ECC_DBE_VOL_TOTAL=2, NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL=9)
    watched.tick()
    found = watched.metrics()
    assert found["holdfast_gpu_errors_total{action=ReplaceNode,gpu=0,kind=Xid,xid=79}"] == 1
    assert found["holdfast_gpu_errors_total{action=ReplaceNode,gpu=0,kind=DoubleBitEcc,xid=}"] == 2
    assert found["holdfast_gpu_hardware_errors_total{gpu=0,type=ecc_double_bit}"] == 2
    assert found["holdfast_gpu_hardware_errors_total{gpu=0,type=nvlink_crc_flit}"] == 9


def test_stale_readings_are_not_exported(watched, exporter):
    """The time of their last change stays."""
    watched.tick()
    watched.clock.forward(400)
    watched.watch.tick()  # the same energy as before
    found = watched.metrics()
    assert found["holdfast_gpu_data_timestamp_seconds{gpu=0}"] == watched.clock.now().timestamp() - 400
    assert "holdfast_gpu_temperature_celsius{gpu=0}" not in found
    assert found["holdfast_gpu_exporter_up"] == 1
    watched.tick()
    assert watched.metrics()["holdfast_gpu_temperature_celsius{gpu=0}"] == 48


def test_an_exporter_that_hangs_costs_five_seconds_at_most(watched, exporter, clock, monkeypatch):
    monkeypatch.setattr(c, "EXPORTER_TIMEOUT_SECONDS", 0.2)
    exporter.hangs = True
    watched.tick()
    assert watched.errors == 1


def test_the_series_are_those_of_the_page(watched, exporter):
    gpu = exporter.node.gpus[0]
    gpu.set(ROW_REMAP_PENDING=1, CLOCK_THROTTLE_REASONS=0x40)
    watched.tick()
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text().partition("\n## GPUs\n")[2]
    rows = re.findall(r"^\| `(holdfast_gpu_\w+)` \| \w+ ?(.*?) \|", page, re.MULTILINE)
    documented = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    found: dict[str, set[str]] = {}
    for family in gpu_metrics.metrics(watched.watch.view(), watched.clock):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    assert found == documented
