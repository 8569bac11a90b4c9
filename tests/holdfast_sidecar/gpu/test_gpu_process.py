"""The real process beside a node's exporter."""


def test_what_is_wrong_with_a_gpu_reaches_the_operator_and_prometheus(sidecar, operator, exporter, wait):
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
    assert exporter.asked == ["/metrics"]
    _, text = sidecar.get("/metrics")
    assert 'kind="RowRemapFailure"' in text
    assert 'holdfast_gpu_utilization_ratio{gpu="0"' in text
    sidecar.kill()
    sidecar.start()
    wait(lambda: len(exporter.asked) == 2, "the question of the next process")
    seen = len(operator.reports)
    wait(lambda: len(operator.reports) > seen, "its next report")
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
    assert sidecar.says("the launcher has said nothing for 5 s") == 1
