"""Writes the chart's Grafana dashboards: `python3 tools/dashboards.py FOLDER`, or `make generate`.

tests/monitoring/test_dashboards.py runs every query against a real Prometheus.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana import Dashboard, Panel, Query, Row, one, render, stat

_THIS = '{namespace="$namespace", job_name="$job_name"}'
# Checkpoints in nodes' memory or on their own disks are lost with the nodes.
_DURABLE = '{tier!~"memory|local"}'
_DURABLE_OF_THIS = '{namespace="$namespace", job_name="$job_name", tier!~"memory|local"}'


def seconds(name: str, of: str = "", by: str = "") -> str:
    """Return a query for the rank seconds of a kind per second."""
    return f"sum{f' by ({by}) ' if by else ''}(rate(holdfast_{name}_seconds_total{of}[$__rate_interval]))"


def goodput(of: str = "", by: str = "") -> str:
    """Return a query for the productive share of all rank seconds."""
    return f"{seconds('productive', of, by)} / {seconds('rank', of, by)}"


def of_gpus(metric: str) -> str:
    """Return a query for the highest value of each GPU. dcgm-exporter has two labels for the node's name."""
    return f'max by (machine, gpu) (label_join({metric}, "machine", "", "Hostname", "hostname"))'


def badput(of: str = "") -> str:
    """Return a query for the share of each unproductive category."""
    return f"{seconds('badput', of, 'cause')} / on () group_left () {seconds('rank', of)}"


FLEET = Dashboard(
    uid="holdfast-fleet",
    title="Holdfast / Fleet",
    rows=[
        Row(
            title="Now",
            panels=[
                stat("Jobs in training", 'max(holdfast_jobs{state="Ready"})'),
                stat("Degraded or restarting", 'sum(max by (state) (holdfast_jobs{state=~"Restarting|Degraded"}))'),
                stat("Pending", 'max(holdfast_jobs{state="Pending"})'),
                stat("Failed", 'max(holdfast_jobs{state="Failed"})'),
                stat(
                    "Workers in training",
                    "sum(max by (namespace, job_name) (holdfast_job_workers_ready))"
                    " / sum(max by (namespace, job_name) (holdfast_job_workers_desired))",
                    "percentunit",
                ),
                stat("Goodput", goodput(), "percentunit"),
            ],
        ),
        Row(
            title="Jobs",
            panels=[
                one("Jobs by state", "max by (state) (holdfast_jobs)", "{{state}}", stacked=True),
                one(
                    "Goodput by job",
                    goodput(by="namespace, job_name"),
                    "{{namespace}}/{{job_name}}",
                    unit="percentunit",
                ),
                one(
                    "Missing workers",
                    "max by (namespace, job_name) (holdfast_job_workers_desired)"
                    " - max by (namespace, job_name) (holdfast_job_workers_ready)",
                    "{{namespace}}/{{job_name}}",
                    stacked=True,
                ),
                one(
                    "Use of time",
                    badput(),
                    "{{cause}}",
                    unit="percentunit",
                    stacked=True,
                ),
                one(
                    "Time since the last step",
                    "time() - max by (namespace, job_name) (holdfast_training_completed_step_timestamp_seconds)",
                    "{{namespace}}/{{job_name}}",
                    unit="s",
                ),
                one(
                    "Age of the newest checkpoint",
                    f"time() - max by (namespace, job_name) (holdfast_checkpoint_timestamp_seconds{_DURABLE})",
                    "{{namespace}}/{{job_name}}",
                    unit="s",
                ),
            ],
        ),
        Row(
            title="Failures",
            panels=[
                one(
                    "Incidents", "sum by (cause) (increase(holdfast_incidents_total[$__rate_interval]))", "{{cause}}"
                ),
                Panel(
                    title="From detection to the next step",
                    unit="s",
                    queries=[
                        Query(
                            expr=f"histogram_quantile({quantile}, sum by (le)"
                            " (rate(holdfast_incident_recovery_seconds_bucket[$__range])))",
                            legend=legend,
                        )
                        for quantile, legend in ((0.5, "median"), (0.9, "p90"))
                    ],
                ),
                one(
                    "Lost steps",
                    "sum by (cause) (increase(holdfast_incident_lost_steps_total[$__rate_interval]))",
                    "{{cause}}",
                ),
                one(
                    "Notices",
                    "sum by (source, action) (increase(holdfast_sidecar_notices_total[$__rate_interval]))",
                    "{{source}} {{action}}",
                ),
                one(
                    "Restart budgets spent",
                    "max by (namespace, job_name, cause) (holdfast_job_incidents_in_window)"
                    " / (max by (namespace, job_name, cause) (holdfast_job_restart_budget) > 0)",
                    "{{namespace}}/{{job_name}} {{cause}}",
                    unit="percentunit",
                ),
                one(
                    "Sidecars that do not respond",
                    'sum by (namespace, job_name) (up{container="holdfast-sidecar"} == bool 0)',
                    "{{namespace}}/{{job_name}}",
                ),
            ],
        ),
        Row(
            title="GPUs",
            panels=[
                one(
                    "Hottest",
                    f"topk(5, {of_gpus('DCGM_FI_DEV_GPU_TEMP')})",
                    "{{machine}} {{gpu}}",
                    unit="celsius",
                ),
                one(
                    "Last XID",
                    f"{of_gpus('DCGM_FI_DEV_XID_ERRORS')} > 0",
                    "{{machine}} {{gpu}}",
                ),
                one(
                    "Rows remapped for errors that could not be corrected",
                    of_gpus("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),
                    "{{machine}} {{gpu}}",
                ),
            ],
        ),
        Row(
            title="Node remediation",
            panels=[
                one("Nodes out of service", "max by (mode) (holdfast_remediation_nodes)", "{{mode}}"),
                one(
                    "Alerts",
                    "sum by (result) (increase(holdfast_remediation_alerts_total[$__rate_interval]))",
                    "{{result}}",
                ),
                one(
                    "Actions",
                    "sum by (action, result) (holdfast_remediation_actions_total)",
                    "{{action}}: {{result}}",
                ),
            ],
        ),
        Row(
            title="Operator",
            panels=[
                stat("Operators", "count(holdfast_build_info)"),
                stat("Jobs in the queue", "max(holdfast_workqueue_depth)"),
                stat("Open long polls", "sum(holdfast_agent_long_polls)"),
                stat("Until the CA expires", "min(holdfast_ca_expiration_timestamp_seconds) - time()", "s"),
                stat(
                    "Memory", "max(process_resident_memory_bytes and on (job, instance) holdfast_build_info)", "bytes"
                ),
                stat(
                    "CPU",
                    "max(rate(process_cpu_seconds_total[$__rate_interval])"
                    " and on (job, instance) holdfast_build_info)",
                ),
                one(
                    "Passes",
                    "sum by (result) (rate(holdfast_reconcile_duration_seconds_count[$__rate_interval]))",
                    "{{result}}",
                    unit="ops",
                ),
                Panel(
                    title="Reconcile pass: duration and queue time (p99)",
                    unit="s",
                    queries=[
                        Query(
                            expr=f"histogram_quantile(0.99, sum by (le) (rate({name}_bucket[$__rate_interval])))",
                            legend=legend,
                        )
                        for name, legend in (
                            ("holdfast_reconcile_duration_seconds", "pass"),
                            ("holdfast_workqueue_queue_duration_seconds", "wait"),
                        )
                    ],
                ),
                one(
                    "Requests from sidecars",
                    "sum by (route, code) (rate(holdfast_agent_requests_total[$__rate_interval]))",
                    "{{route}} {{code}}",
                    unit="reqps",
                ),
            ],
        ),
    ],
)

JOB = Dashboard(
    uid="holdfast-job",
    title="Holdfast / Job",
    variables=[
        ("namespace", "label_values(holdfast_job_workers_desired, namespace)"),
        ("job_name", 'label_values(holdfast_job_workers_desired{namespace="$namespace"}, job_name)'),
    ],
    rows=[
        Row(
            title="Now",
            panels=[
                stat("Step", f"max(holdfast_training_completed_step{_THIS})"),
                stat(
                    "Since the last step",
                    f"time() - max(holdfast_training_completed_step_timestamp_seconds{_THIS})",
                    "s",
                ),
                stat("Workers in training", f"max(holdfast_job_workers_ready{_THIS})"),
                stat("Desired workers", f"max(holdfast_job_workers_desired{_THIS})"),
                stat("Goodput", goodput(_THIS), "percentunit"),
                stat(
                    "Newest checkpoint", f"time() - max(holdfast_checkpoint_timestamp_seconds{_DURABLE_OF_THIS})", "s"
                ),
            ],
        ),
        Row(
            title="Training",
            panels=[
                one("Loss", f"max(holdfast_training_loss{_THIS})", "loss"),
                one("Samples per second", f"max(holdfast_training_samples_per_second{_THIS})", "samples/s"),
                one(
                    "Steps per second",
                    f"max(rate(holdfast_training_steps_total{_THIS}[$__rate_interval]))",
                    "steps/s",
                ),
                Panel(
                    title="Workers",
                    queries=[
                        Query(expr=f"max(holdfast_job_workers_desired{_THIS})", legend="desired"),
                        Query(expr=f"max(holdfast_world_workers{_THIS})", legend="in the world"),
                    ],
                ),
                Panel(
                    title="Generation and attempt",
                    queries=[
                        Query(expr=f"max(holdfast_world_generation{_THIS})", legend="generation"),
                        Query(expr=f"max(holdfast_world_attempt{_THIS})", legend="attempt"),
                    ],
                ),
                one("Completed step", f"max by (pod) (holdfast_training_completed_step{_THIS})", "{{pod}}"),
                one(
                    "Own time per step of each rank",
                    f"sum by (rank, pod, node) (holdfast_rank_step_seconds{_THIS})",
                    "{{rank}}: {{pod}} on {{node}}",
                    unit="s",
                    width=12,
                ),
                one(
                    "Slow ranks: own time relative to the median rank",
                    f"max by (rank, node, activity) (holdfast_job_slow_rank_ratio{_THIS})",
                    "{{rank}} on {{node}}: {{activity}}",
                    width=12,
                ),
            ],
        ),
        Row(
            title="Numbers that are not finite",
            panels=[
                one("Gradient norm", f"max(holdfast_training_gradient_norm{_THIS})", "norm"),
                one(
                    "Skipped steps",
                    f"max(increase(holdfast_training_skipped_steps_total{_THIS}[$__rate_interval]))",
                    "steps",
                ),
                Panel(
                    title="Responses since the start",
                    queries=[
                        Query(expr=f"max(holdfast_training_{name}_total{_THIS})", legend=legend)
                        for name, legend in (
                            ("learning_rate_changes", "lower learning rates"),
                            ("roll_backs", "roll-backs"),
                            ("skipped_samples", "excluded samples"),
                            ("bad_samples", "unreadable samples"),
                            ("spikes", "spikes"),
                        )
                    ]
                    + [
                        Query(
                            expr=f"sum(holdfast_training_out_of_memory_total{_THIS})",
                            legend="ranks out of GPU memory",
                        )
                    ],
                ),
            ],
        ),
        Row(
            title="Use of time",
            panels=[
                one(
                    "Goodput",
                    goodput(_THIS),
                    "goodput",
                    unit="percentunit",
                    width=12,
                ),
                one(
                    "Badput by cause",
                    badput(_THIS),
                    "{{cause}}",
                    unit="percentunit",
                    stacked=True,
                    width=12,
                ),
            ],
        ),
        Row(
            title="Failures",
            panels=[
                one(
                    "Recovery by phase (median)",
                    "histogram_quantile(0.5, sum by (le, phase)"
                    f" (rate(holdfast_recovery_seconds_bucket{_THIS}[$__range])))",
                    "{{phase}}",
                    unit="s",
                ),
                one("Steps lost", f"max(holdfast_training_lost_steps_total{_THIS})", "steps"),
                one(
                    "Expected time between failures", f"max(holdfast_mtbf_estimate_seconds{_THIS})", "MTBF", unit="s"
                ),
                Panel(
                    title="Incidents within the budget's window",
                    queries=[
                        Query(
                            expr=f"max by (cause) (holdfast_job_incidents_in_window{_THIS})",
                            legend="{{cause}}",
                        ),
                        Query(
                            expr=f"max by (cause) (holdfast_job_restart_budget{_THIS})",
                            legend="{{cause}}: allowed",
                        ),
                    ],
                ),
                one(
                    "Replicas that differed",
                    "sum by (node, repaired)"
                    f" (increase(holdfast_training_replica_divergences_total{_THIS}[$__rate_interval]))",
                    "{{node}}, repaired: {{repaired}}",
                ),
                one(
                    "Notices",
                    "sum by (pod, source, action)"
                    f" (increase(holdfast_sidecar_notices_total{_THIS}[$__rate_interval]))",
                    "{{pod}} {{source}} {{action}}",
                ),
                one("Standby processes", f"max by (pod) (holdfast_warm_processes{_THIS})", "{{pod}}"),
            ],
        ),
        Row(
            title="Checkpoints",
            panels=[
                one(
                    "Age by tier",
                    f"time() - max by (tier) (holdfast_checkpoint_timestamp_seconds{_THIS})",
                    "{{tier}}",
                    unit="s",
                    width=12,
                ),
                one(
                    "Step by tier",
                    f"max by (tier) (holdfast_checkpoint_step{_THIS})",
                    "{{tier}}",
                    width=12,
                ),
            ],
        ),
        Row(
            title="Workers",
            panels=[
                one(
                    "Phase",
                    f"max by (pod, node, phase) (holdfast_launcher_phase{_THIS}) == 1",
                    "{{pod}} on {{node}}: {{phase}}",
                    kind="state-timeline",
                ),
                one(
                    "Time since the launcher's last status",
                    f"time() - min by (pod) (holdfast_launcher_last_status_timestamp_seconds{_THIS})",
                    "{{pod}}",
                    unit="s",
                ),
                one(
                    "Time since the last accepted report",
                    f"time() - min by (pod) (holdfast_sidecar_last_report_timestamp_seconds{_THIS})",
                    "{{pod}}",
                    unit="s",
                ),
            ],
        ),
        Row(
            title="GPUs",
            panels=[
                one(
                    "Utilization",
                    f"max by (pod, gpu) (holdfast_gpu_utilization_ratio{_THIS})",
                    "{{pod}} {{gpu}}",
                    unit="percentunit",
                ),
                one(
                    "Memory in use",
                    f"max by (pod, gpu) (holdfast_gpu_memory_used_bytes{_THIS})"
                    f" / max by (pod, gpu) (holdfast_gpu_memory_bytes{_THIS})",
                    "{{pod}} {{gpu}}",
                    unit="percentunit",
                ),
                one(
                    "Temperature",
                    f"max by (pod, gpu) (holdfast_gpu_temperature_celsius{_THIS})",
                    "{{pod}} {{gpu}}",
                    unit="celsius",
                ),
            ],
        ),
    ],
)

DASHBOARDS = {"fleet": FLEET, "job": JOB}


def main(folder: Path) -> None:
    """Write all dashboards into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (folder / f"{name}.json").write_text(json.dumps(render(dashboard), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
