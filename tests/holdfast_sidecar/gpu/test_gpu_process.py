"""The real process beside a node's exporter."""

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
