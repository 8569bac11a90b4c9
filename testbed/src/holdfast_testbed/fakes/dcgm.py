"""A node's dcgm-exporter and the text that it serves.

Names, labels, their order and their absence are those of the real versions 3 and 4, from its sources and from
published texts. `old_names`: as if configured with the names of version 2. The GPUs are fictitious.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

PORT = 9400
# A healthy GPU with load, as an exporter shows it with a usual counters file.
USUAL: Mapping[str, float] = {
    "DCGM_FI_DEV_SM_CLOCK": 1980,
    "DCGM_FI_DEV_MEM_CLOCK": 2619,
    "DCGM_FI_DEV_MEMORY_TEMP": 55,
    "DCGM_FI_DEV_GPU_TEMP": 48,
    "DCGM_FI_DEV_POWER_USAGE": 412.979,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 455497156,
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 0,
    "DCGM_FI_DEV_GPU_UTIL": 97,
    "DCGM_FI_DEV_MEM_COPY_UTIL": 31,
    "DCGM_FI_DEV_XID_ERRORS": 0,
    "DCGM_FI_DEV_FB_FREE": 60000,
    "DCGM_FI_DEV_FB_USED": 20000,
    "DCGM_FI_DEV_FB_RESERVED": 1000,
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 0,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 0,
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 0,
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": 0,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": 0,
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": 0,
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": 0,
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0,
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.913,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.402,
}
_XID = "DCGM_FI_DEV_XID_ERRORS"
_COUNTED_XIDS = "DCGM_EXP_XID_ERRORS_COUNT"
_MESSAGES = {0: "No Error", 31: "GPU memory page fault", 79: "GPU has fallen off the bus"}
_COUNTERS = ("_TOTAL", "_COUNTER", "_ROWS", "_CONSUMPTION")


@dataclass(kw_only=True)
class FakeGpu:
    """One GPU of the node and its pod. With an empty `pod`, the exporter maps it to none."""

    index: int
    uuid: str
    pod: str = ""
    namespace: str = "ml"
    pod_uid: str = ""
    instance: str = ""
    values: dict[str, float] = field(default_factory=lambda: dict(USUAL))
    xid_counts: dict[int, int] | None = None  # None: the exporter does not count XIDs

    def set(self, **values: float) -> None:
        """Change readings, by their names without `DCGM_FI_DEV_`."""
        self.values.update({f"DCGM_FI_DEV_{name}": value for name, value in values.items()})

    def live(self) -> None:
        """Increase the energy counter, as a real GPU always does."""
        self.values["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] += 4000


@dataclass(kw_only=True)
class FakeNode:
    """The state that the exporter shows."""

    gpus: list[FakeGpu] = field(default_factory=list)
    old_names: bool = False

    def text(self) -> bytes:
        lines: list[str] = []
        for name in sorted({name for gpu in self.gpus for name in gpu.values}):
            lines += _head(name, "counter" if name.endswith(_COUNTERS) else "gauge")
            lines += [self._line(gpu, name, gpu.values[name], {}) for gpu in self.gpus if name in gpu.values]
        if any(gpu.xid_counts is not None for gpu in self.gpus):
            lines += [*_head(_COUNTED_XIDS, "gauge"), *self._counted()]
        return ("\n".join(lines) + "\n").encode()

    def _counted(self) -> Iterator[str]:
        """Yield one line for each recent XID, and one without an XID if there was none."""
        window = {"window_size_in_ms": "300000"}
        for gpu in self.gpus:
            if gpu.xid_counts is None:
                continue
            for xid, count in gpu.xid_counts.items():
                yield self._line(gpu, _COUNTED_XIDS, count, {**window, "xid": str(xid)})
            if not gpu.xid_counts:
                yield self._line(gpu, _COUNTED_XIDS, 0, window)

    def _line(self, gpu: FakeGpu, name: str, value: float, more: Mapping[str, str]) -> str:
        labels = {
            "gpu": str(gpu.index),
            "uuid" if self.old_names else "UUID": gpu.uuid,
            "pci_bus_id": f"00000000:{gpu.index + 2:02d}:00.0",
            "device": f"nvidia{gpu.index}",
            "modelName": "NVIDIA H100 80GB HBM3",
        }
        if gpu.instance:
            labels |= {"GPU_I_PROFILE": "1g.10gb", "GPU_I_ID": gpu.instance}
        labels |= {"Hostname": "node-1", "DCGM_FI_DRIVER_VERSION": "580.95.05", **more}
        labels |= self._mapping(gpu)
        if name == _XID:
            labels |= {"err_code": f"{value:.0f}", "err_msg": _MESSAGES.get(int(value), "Unknown Error")}
        inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
        shown = f"{value:f}" if isinstance(value, float) and not value.is_integer() else f"{value:.0f}"
        return f"{name}{{{inside}}} {shown}"

    def _mapping(self, gpu: FakeGpu) -> dict[str, str]:
        if not gpu.pod:
            return {}
        if self.old_names:
            return {"container_name": "trainer", "pod_namespace": gpu.namespace, "pod_name": gpu.pod}
        return {"container": "trainer", "namespace": gpu.namespace, "pod": gpu.pod, "pod_uid": gpu.pod_uid}


def _head(name: str, kind: str) -> list[str]:
    return [f"# HELP {name} As in the counters file.", f"# TYPE {name} {kind}"]


class ExporterServer:
    """The exporter on a socket. `status`, `body` and `hangs` are its faults."""

    def __init__(self, node: FakeNode, *, address: str = "127.0.0.1", port: int = 0) -> None:
        self.node = node
        self.status = 200
        self.body: bytes | None = None
        self.hangs = False
        self.asked: list[str] = []
        self._release = threading.Event()
        self._server = _Server((address, port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The URL, without a path."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def answer(self, path: str) -> tuple[int, bytes]:
        """Return status and body for a request."""
        self.asked.append(path)
        if self.hangs:
            self._release.wait(60)
        return self.status, self.node.text() if self.body is None else self.body

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._release.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> ExporterServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the host's name, which may hang without DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def _handler(exporter: ExporterServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = exporter.answer(self.path)
            try:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                self.close_connection = True  # the client disconnected, on purpose

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Log nothing."""

    return Handler
