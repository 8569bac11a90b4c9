"""The metrics of the pod's GPUs. `docs/reference/metrics.md` documents their names."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast_sidecar.gpu import rules
from holdfast_sidecar.gpu.detector import GpuState, throttle_reasons
from holdfast_sidecar.gpu.exposition import Gpu
from holdfast_sidecar.gpu.monitor import View
from holdfast_sidecar.metrics.families import state_set
from holdfast_sidecar.runtime.clock import Clock

_GPU: Final = ["gpu", "uuid"]
_MIB: Final = 1 << 20


def _memory_total(gpu: Gpu) -> float | None:
    """Return used plus free memory, plus reserved memory if the exporter reports it separately."""
    used, free = gpu.values.get(rules.MEMORY_USED), gpu.values.get(rules.MEMORY_FREE)
    if used is None or free is None:
        return None
    return (used + free + gpu.values.get(rules.MEMORY_RESERVED, 0.0)) * _MIB


def _scaled(field: str, factor: float = 1.0) -> Callable[[Gpu], float | None]:
    def value(gpu: Gpu) -> float | None:
        shown = gpu.values.get(field)
        return None if shown is None else shown * factor

    return value


_GAUGES: Final[dict[str, tuple[str, Callable[[Gpu], float | None]]]] = {
    "holdfast_gpu_utilization_ratio": (
        "Share of the time with a running kernel",
        _scaled(rules.UTILIZATION, 0.01),
    ),
    "holdfast_gpu_memory_used_bytes": ("Memory in use", _scaled(rules.MEMORY_USED, _MIB)),
    "holdfast_gpu_memory_bytes": ("Memory of the GPU", _memory_total),
    "holdfast_gpu_temperature_celsius": ("Temperature of the GPU", _scaled(rules.TEMPERATURE)),
    "holdfast_gpu_memory_temperature_celsius": ("Temperature of its memory", _scaled(rules.MEMORY_TEMPERATURE)),
    "holdfast_gpu_power_watts": ("Power draw", _scaled(rules.POWER)),
    "holdfast_gpu_row_remap_failure": ("1 if a memory row could not be remapped", _scaled(rules.REMAP_FAILURE)),
    "holdfast_gpu_row_remap_pending": (
        "1 if the next reset remaps a memory row",
        _scaled(rules.REMAP_PENDING),
    ),
}


def metrics(view: View, clock: Clock) -> Iterator[Metric]:
    """Yield all families. Stale readings have no samples."""
    now = clock.monotonic()
    yield from _exporter(view, clock.now().timestamp() - now)
    live = [gpu for gpu in view.sample.gpus if view.answers and gpu.uuid in view.gpus]
    live = [gpu for gpu in live if not view.gpus[gpu.uuid].readings_frozen(now)]
    yield from _gauges(live)
    yield _throttled(live)
    yield _hardware(view.gpus.values())
    yield _errors(view)


def _exporter(view: View, started_at: float) -> Iterator[Metric]:
    """Yield the exporter's state. `started_at` is the Unix time at which the monotonic clock was 0."""
    if view.answers is not None:
        text = "1 if the GPU exporter's last response was valid, otherwise 0"
        yield GaugeMetricFamily("holdfast_gpu_exporter_up", text, value=float(view.answers))
    changed = GaugeMetricFamily(
        "holdfast_gpu_data_timestamp_seconds", "Unix time at which the GPU's readings last changed", labels=_GPU
    )
    for track in view.gpus.values():
        changed.add_metric(_labels(track), round(started_at + track.moved_at, 2))
    yield changed


def _gauges(gpus: list[Gpu]) -> Iterator[Metric]:
    for name, (text, value) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=_GPU)
        for gpu in gpus:
            if (shown := value(gpu)) is not None:
                family.add_metric(_labels(gpu), shown)
        yield family


def _throttled(gpus: list[Gpu]) -> Metric:
    family = GaugeMetricFamily(
        "holdfast_gpu_throttled",
        "1 for each active throttle reason, otherwise 0",
        labels=[*_GPU, "reason"],
    )
    for gpu in gpus:
        bits = next((gpu.values[field] for field in rules.THROTTLE if field in gpu.values), 0.0)
        state_set(family, _labels(gpu), rules.THROTTLE_REASONS.values(), throttle_reasons(int(bits)))
    return family


def _hardware(tracks: Iterable[GpuState]) -> Metric:
    family = CounterMetricFamily(
        "holdfast_gpu_hardware_errors",
        "Errors that the GPU counted since its first reading",
        labels=[*_GPU, "type"],
    )
    for track in tracks:
        for name, count in track.counted.items():
            family.add_metric([*_labels(track), name], count)
    return family


def _errors(view: View) -> Metric:
    family = CounterMetricFamily(
        "holdfast_gpu_errors",
        "GPU errors by the sidecar's rules, as reported to the operator",
        labels=[*_GPU, "kind", "xid", "action"],
    )
    for error in view.errors:
        index = "" if error.index is None else str(error.index)
        xid = "" if error.xid is None else str(error.xid)
        family.add_metric([index, error.gpu, error.kind, xid, error.action], error.count)
    return family


def _labels(gpu: Gpu | GpuState) -> list[str]:
    return ["" if gpu.index is None else str(gpu.index), gpu.uuid]
