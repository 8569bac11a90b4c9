"""The real process beside a node's exporter."""

import json
import re


def test_gpu_error_reaches_the_operator_and_prometheus(sidecar, operator, exporter, run_dir, wait):
    exporter.node.gpus[0].set(ROW_REMAP_FAILURE=1)
    exporter.node.gpus[1].set(ROW_REMAP_FAILURE=1)
    sidecar.environment["HOLDFAST_DCGM_URL"] = exporter.url
    sidecar.start()
    (error,) = wait(lambda: operator.latest().get("gpu"), "a report with what is wrong")
    assert (error["gpu"], error["kind"], error["action"]) == (
        exporter.node.gpus[0].uuid,
        "RowRemapFailure",
        "ReplaceNode",
    )
    assert set(exporter.asked) == {"/metrics"}
    _, text = sidecar.get("/metrics")
    assert 'kind="RowRemapFailure"' in text
    assert 'holdfast_gpu_utilization_ratio{gpu="0"' in text
    memory = run_dir / "sidecar-gpus.json"
    wait(lambda: memory.exists() and "RowRemapFailure" in memory.read_text(), "what is remembered")
    sidecar.kill()
    before, said = operator.latest()["sidecar"]["startId"], len(sidecar.lines())
    sidecar.start()
    shows = "the GPU exporter shows 1 GPU(s) of this pod"
    wait(lambda: any(shows in line["message"] for line in sidecar.lines()[said:]), "the next process's answer")
    seen = len(operator.reports)
    wait(lambda: operator.reports[seen:] and operator.latest()["sidecar"]["startId"] != before, "its next report")
    assert operator.latest()["gpu"] == [error], "what was found is the pod's, not the process's"


def test_serious_error_requests_a_checkpoint_without_the_operator(sidecar, operator, exporter, run_dir, wait):
    operator.close()
    touch, stored, gpu = run_dir / "emergency_checkpoint", run_dir / "sidecar-gpus.json", exporter.node.gpus[0]
    sidecar.environment["HOLDFAST_DCGM_URL"] = exporter.url
    sidecar.start()
    wait(lambda: sidecar.says("the GPU exporter shows 1 GPU(s) of this pod"), "the first sample")
    assert not touch.exists()
    gpu.set(XID_ERRORS=79)
    wait(touch.exists, "the request")
    request = json.loads(touch.read_text())
    assert (request["id"], request["drain"]) == (f"gpu-Xid-79-{gpu.uuid}", False)
    assert request["reason"] == "GPU 0: XID 79, the GPU has fallen off the bus"
    counted = 'holdfast_sidecar_notices_total{action="checkpoint",source="DCGM"} 1.0'
    wait(lambda: counted in sidecar.get("/metrics")[1], "the request's count")
    wait(lambda: stored.exists() and "79" in stored.read_text(), "the stored error")
    touch.unlink()  # as the launcher does
    sidecar.kill()
    stored.unlink()
    gpu.set(XID_ERRORS=0)
    before = len(sidecar.lines())
    sidecar.start()
    shows = "the GPU exporter shows 1 GPU(s) of this pod"
    wait(lambda: any(shows in line["message"] for line in sidecar.lines()[before:]), "the next process's sample")
    gpu.set(XID_ERRORS=79)
    wait(lambda: stored.exists() and "79" in stored.read_text(), "the error, found again")
    assert not touch.exists(), "its checkpoint was requested before"


def test_without_an_exporter_the_pod_is_watched_all_the_same(sidecar, operator, wait):
    sidecar.environment["HOLDFAST_DCGM_URL"] = "http://127.0.0.1:9"
    sidecar.write_status()
    sidecar.start()
    wait(lambda: operator.reports, "a report")
    wait(lambda: sidecar.says("nothing is known of the GPUs"), "the line that says so")
    assert sidecar.get("/readyz")[0] == 200
    assert operator.latest()["gpu"] == []


def test_a_launcher_that_stops_is_reported(sidecar, operator, wait):
    sidecar.write_status()
    sidecar.start()
    wait(lambda: operator.latest().get("launcherSilentSeconds", 0) >= 5, "the report of its silence")
    said = re.compile(r"the launcher has written no status for \d+ s")
    wait(lambda: any(said.fullmatch(line["message"]) for line in sidecar.lines()), "the line that says so")
    assert sum(said.fullmatch(line["message"]) is not None for line in sidecar.lines()) == 1
