"""What the sidecar exports of its launcher and of itself."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast_sidecar.metrics.exporter import Metrics
from holdfast_sidecar.metrics.launcher import PHASES
from holdfast_sidecar.metrics.server import metrics_page
from holdfast_sidecar.protocol.notice import Notice
from holdfast_sidecar.run_dir.launcher_status import LauncherStatusWatcher


@pytest.fixture
def heartbeat(run_dir, clock) -> LauncherStatusWatcher:
    return LauncherStatusWatcher(run_dir, clock)


@pytest.fixture
def metrics(heartbeat, clock) -> Metrics:
    return Metrics(clock, heartbeat.current)


def samples(metrics: Metrics) -> dict[str, float]:
    """Name with labels → value, parsed as Prometheus would."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_where_no_launcher_is_to_be_heard_none_is_silent(heartbeat, clock):
    clock.forward(600)
    assert not [name for name in samples(Metrics(clock, heartbeat.current, launched=False)) if "launcher" in name]


def test_the_launchers_state_is_exported(metrics, heartbeat, run_dir, golden, clock):
    (run_dir / "status.json").write_text(json.dumps(golden("status.json")))
    heartbeat.poll()
    written = clock.now().timestamp()
    clock.forward(60)
    found = samples(metrics)
    assert found["holdfast_training_step"] == 412
    assert found["holdfast_training_completed_step"] == 412
    assert found["holdfast_training_completed_step_timestamp_seconds"] == written
    assert found["holdfast_training_loss"] == 2.125
    assert found["holdfast_training_samples_per_second"] == 1536
    assert found["holdfast_training_gradient_norm"] == 1.25
    assert found["holdfast_training_replica_divergences_total{repaired=true}"] == 1
    assert found["holdfast_training_replica_divergences_total{repaired=false}"] == 0
    assert found["holdfast_training_step_seconds"] == 0.16
    assert found["holdfast_training_skipped_steps_total"] == 10
    assert found["holdfast_training_learning_rate_changes_total"] == 1
    assert found["holdfast_training_roll_backs_total"] == 1
    assert found["holdfast_training_bad_samples_total"] == 3
    assert found["holdfast_training_out_of_memory_total"] == 2
    assert found["holdfast_training_skipped_samples_total"] == 80
    assert found["holdfast_rank_step_seconds{activity=data,rank=0}"] == 0.01
    assert found["holdfast_rank_step_seconds{activity=compute,rank=0}"] == 0.11
    assert found["holdfast_training_spikes_total"] == 2
    phases = {phase: found[f"holdfast_launcher_phase{{phase={phase}}}"] for phase in PHASES}
    assert phases == {phase: float(phase == "Running") for phase in PHASES}
    assert found["holdfast_checkpoint_step{tier=shared}"] == 400
    assert found["holdfast_checkpoint_timestamp_seconds{tier=shared}"] == written
    assert found["holdfast_checkpoint_failing_since_timestamp_seconds{cause=Full,tier=shared}"] == written
    assert found["holdfast_checkpoint_writes_total{tier=shared}"] == 4
    assert found["holdfast_checkpoint_written_bytes_total{tier=shared}"] == 8388608
    assert found["holdfast_checkpoint_write_seconds_total{tier=shared}"] == 1.25
    assert found["holdfast_restores_total{origin=survivor}"] == 2
    assert found["holdfast_restores_total{origin=shared}"] == 1
    assert found["holdfast_checkpoint_fallbacks_total"] == 1
    assert found["holdfast_uploads_total"] == 3
    assert found["holdfast_uploaded_bytes_total"] == 3072
    assert found["holdfast_upload_seconds_total"] == 4.5
    assert found["holdfast_upload_failures_total{cause=Throttled}"] == 1
    assert found["holdfast_refused_peers_total"] == 2
    assert found["holdfast_launcher_last_status_timestamp_seconds"] == written


def test_failed_checkpoints_are_exported_by_cause(metrics, heartbeat, run_dir, golden):
    """Launchers without causes are covered, too."""
    status = golden("status.json")
    (run_dir / "status.json").write_text(json.dumps(status))
    heartbeat.poll()
    assert samples(metrics)["holdfast_checkpoint_failures_total{cause=Full,tier=local}"] == 2
    assert samples(metrics)["holdfast_checkpoint_failures_total{cause=IO,tier=local}"] == 1
    del status["checkpointFailureCauses"]
    (run_dir / "status.json").write_text(json.dumps(status))
    heartbeat.poll()
    assert samples(metrics)["holdfast_checkpoint_failures_total{cause=Unknown,tier=local}"] == 3


def test_the_launchers_books_are_exported(metrics, heartbeat, run_dir, golden):
    (run_dir / "status.json").write_text(json.dumps(golden("status.json")))
    heartbeat.poll()
    found = samples(metrics)
    assert found["holdfast_productive_seconds_total"] == 100
    assert found["holdfast_rank_seconds_total"] == 120
    assert found["holdfast_standby_seconds_total"] == 12
    assert found["holdfast_training_activity_seconds_total{activity=average}"] == 14
    badput = {name: value for name, value in found.items() if name.startswith("holdfast_badput_seconds_total")}
    assert badput.pop("holdfast_badput_seconds_total{cause=idle}") == 6
    assert sum(badput.values()) + 6 + 100 == pytest.approx(119.5)
    assert not any("productive" in name for name in badput)
    labels = "cause=Infrastructure,phase=restart"
    assert found[f"holdfast_recovery_seconds_count{{{labels}}}"] == 1
    assert found[f"holdfast_recovery_seconds_sum{{{labels}}}"] == 0.15
    assert found["holdfast_recovery_seconds_bucket{cause=Infrastructure,le=0.1,phase=restart}"] == 0
    assert found["holdfast_recovery_seconds_bucket{cause=Infrastructure,le=+Inf,phase=restart}"] == 1
    assert found["holdfast_training_steps_total"] == 412
    assert found["holdfast_training_lost_steps_total"] == 12
    assert found["holdfast_mtbf_estimate_seconds"] == 43260


def test_a_phase_that_the_sidecar_does_not_know_is_exported(metrics, heartbeat, run_dir, golden):
    (run_dir / "status.json").write_text(json.dumps({**golden("status.json"), "phase": "Later"}))
    heartbeat.poll()
    found = samples(metrics)
    assert found["holdfast_launcher_phase{phase=Later}"] == 1
    assert found["holdfast_launcher_phase{phase=Running}"] == 0


def test_a_launcher_that_falls_silent_is_seen(metrics, heartbeat, run_dir, golden, clock):
    assert samples(metrics)["holdfast_launcher_silent"] == 0
    (run_dir / "status.json").write_text(json.dumps(golden("status.json")))
    heartbeat.poll()
    clock.forward(6)
    heartbeat.poll()
    assert samples(metrics)["holdfast_launcher_silent"] == 1


def test_a_launcher_without_books_has_no_metrics_of_them(metrics, heartbeat, run_dir, golden):
    (run_dir / "status.json").write_text(json.dumps({**golden("status.json"), "accounting": None}))
    heartbeat.poll()
    found = samples(metrics)
    assert found["holdfast_training_step"] == 412
    assert not any("badput" in name or "goodput" in name for name in found)


def test_what_happens_is_counted(metrics, golden, clock):
    metrics.report(ok=True)
    metrics.report(ok=False)
    metrics.notice(Notice.from_report(golden("report.json")["notices"][0]))
    metrics.poll_error("AWS")
    metrics.stored(7)
    reported = clock.now().timestamp()
    clock.forward(3)
    found = samples(metrics)
    assert found["holdfast_sidecar_reports_total{result=ok}"] == 1
    assert found["holdfast_sidecar_reports_total{result=failed}"] == 1
    assert found["holdfast_sidecar_notices_total{action=terminate,source=AWS}"] == 1
    assert found["holdfast_sidecar_poll_errors_total{source=AWS}"] == 1
    assert found["holdfast_membership_revision"] == 7
    assert found["holdfast_sidecar_last_report_timestamp_seconds"] == reported


@pytest.mark.parametrize(
    "status",
    [
        '{"version": 1}',
        '{"version": 1, "ranks": 5, "checkpoints": [], "phase": 3, "committedStep": "x", "loss": true}',
        '{"version": 1, "refusedPeers": "two"}',
        '{"version": 1, "committedAt": 7}',
        '{"version": 1, "ranks": [3, {"step": null}], "checkpoints": {"shared": 4, "local": {"time": "soon"}}}',
        '{"version": 1, "checkpointFailures": {"shared": 1, "local": {}}, "checkpointFailureCauses": {"shared": 3}}',
        '{"version": 1, "checkpointFailures": {"shared": 1}, "checkpointFailureCauses": {"shared": {"IO": "x"}}}',
        '{"version": 1, "checkpointsFailing": {"shared": 3, "local": {"since": "soon"}, "peer": {"cause": 5}}}',
        '{"version": 1, "ranks": [{"dataSeconds": "x"}], "slowRanks": [3, {"seconds": 1, "medianSeconds": 0}, {}]}',
        '{"version": 1, "ranks": {"rank": 1}, "slowRanks": {"rank": 1}}',
        '{"version": 1, "phase": "\\ud800\\n\\"", "checkpoints": {"\\ud800": {"step": 1}}}',
        '{"version": 1, "accounting": {"seconds": {"data": "x", "idle": true, "\\ud800": -1}, "recoveries": [3]}}',
        '{"version": 1, "stepSeconds": -1, "committedAt": "soon", "accounting": {"activities": {"data": "x"}}}',
        '{"version": 1, "stepSeconds": 1, "committedAt": "soon", "accounting": {"activities": [1]}}',
        '{"version": 1, "stepSeconds": 1, "committedAt": "0001-01-01T00:00:00+14:00"}',
        '{"version": 1, "accounting": {"seconds": [], "recoveries": {"count": 1}, "wallSeconds": null}}',
        '{"version": 1, "accounting": {"recoveries": [{"count": 1, "sum": 1, "buckets": [[1], 2, ["a", 1]]}]}}',
        '{"version": 1, "loss": NaN, "throughput": 1e999, "committedStep": 1' + "0" * 400 + "}",
    ],
)
def test_a_strange_status_leaves_out_what_it_does_not_say(metrics, heartbeat, run_dir, status):
    (run_dir / "status.json").write_text(status)
    heartbeat.poll()
    found = samples(metrics)
    assert "holdfast_launcher_last_status_timestamp_seconds" in found
    assert "holdfast_training_loss" not in found
    assert not any("completed_step" in name for name in found)


def test_metrics_are_served_in_prometheus_text(metrics):
    page = metrics_page(metrics.render)()
    assert page.status == 200
    assert page.content_type.startswith("text/plain")
    assert b"holdfast_sidecar_info" in page.body
