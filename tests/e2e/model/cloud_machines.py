"""Nodes that are machines of a cloud, each with a sidecar of its own in its network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from holdfast_testbed.cluster.cluster import Cluster
from holdfast_testbed.constants import METADATA_ADDRESS
from holdfast_testbed.fakes.metadata import CLOUDS, PREEMPTION
from holdfast_testbed.node import network
from holdfast_testbed.node.processes import die_with_parent
from holdfast_testbed.waiting import wait_for

DEADLINE = 120.0
"""Only what fails takes so long."""
NEAR_SECONDS = 28.0
"""Near enough for each kind of notice to be acted upon, and far enough not to be over before it is."""
CLOCK_AHEAD_SECONDS = (-1200.0, 1200.0)
EVENTS = f"http://{METADATA_ADDRESS}/metadata/scheduledevents?api-version=2020-07-01"

Document = dict[str, Any]


class Sidecar:
    """The real process in a node's network, in the place of a pod's."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine = machine
        self._run_dir = folder / "run"
        self._run_dir.mkdir(parents=True)
        self._log = folder / "sidecar.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Sidecar:
        plan = self._machine.cluster.node(self._machine.number).plan
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        environment |= {
            "HOLDFAST_RUN_DIR": str(self._run_dir),
            "HOLDFAST_POD_UID": "uid-of-the-pod",
            "HOLDFAST_POD_NAME": "gpt-w0",
            "HOLDFAST_POD_NAMESPACE": "ml",
            "HOLDFAST_NODE_NAME": plan.name,
            "HOLDFAST_OPERATOR_URL": "https://127.0.0.1:1",  # away; what is noticed does not wait for it
            "HOLDFAST_NOTICE_PROVIDERS": ",".join(CLOUDS),
            "HOLDFAST_SIDECAR_ADDRESS": plan.address,
            "HOLDFAST_SIDECAR_PORT": "0",
        }
        command = ["nsenter", f"--net=/run/netns/{plan.namespace}", sys.executable, "-m", "holdfast_sidecar"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into libc
            )
        try:
            self.hears("metrics on port")
        except BaseException:
            self.__exit__()
            raise
        port = next(line for line in self._lines() if "metrics on port" in line).rpartition(" ")[2]
        self._url = f"http://{plan.address}:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _lines(self) -> list[str]:
        whole = self._log.read_text().rpartition("\n")[0]
        return [str(json.loads(line)["message"]) for line in whole.splitlines()]

    def says(self, words: str) -> int:
        """How many lines of its log hold the words."""
        return sum(words in line for line in self._lines())

    def hears(self, words: str, times: int = 1) -> None:
        """Returns when its log says so."""
        wait_for(
            lambda: self.says(words) >= times,
            what=f"the sidecar on a machine of {self._machine.cloud} says {words!r}",
            seconds=DEADLINE,
            explain=self._log.read_text,
        )

    def request(self) -> Document | None:
        """What waits for the launcher."""
        with suppress(FileNotFoundError):
            found: Document = json.loads((self._run_dir / "emergency_checkpoint").read_text())
            return found
        return None

    def asked(self) -> Document:
        """The request, when it is there."""
        wait_for(
            lambda: self.request() is not None,
            what=f"the touch-file on a machine of {self._machine.cloud}",
            seconds=DEADLINE,
            explain=self._log.read_text,
        )
        return self.request() or {}

    def take(self) -> Document:
        """As the launcher takes it."""
        taken = self.asked()
        (self._run_dir / "emergency_checkpoint").unlink()
        return taken

    def acknowledge(self, request: Document) -> None:
        """As the launcher says that the commit is made."""
        (self._run_dir / "emergency_checkpoint.ack").write_text(
            json.dumps({"version": 1, "id": request["id"], "result": "Committed"})
        )

    def passed_on(self, number: int = 1) -> list[str]:
        """The actions of the notices so far, once there are so many."""

        def remembered() -> list[Document]:
            with suppress(FileNotFoundError):
                notices: list[Document] = json.loads((self._run_dir / "sidecar-notices.json").read_text())["notices"]
                return notices
            return []

        wait_for(lambda: len(remembered()) >= number, what=f"{number} notices", seconds=DEADLINE)
        return [str(notice["action"]) for notice in remembered()]

    def failed_polls(self) -> Counter[str]:
        """By its metrics, for each source."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=DEADLINE) as answer:  # noqa: S310 - http, to a node
            families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        failed = [sample for sample in samples if sample.name == "holdfast_sidecar_poll_errors_total"]
        return Counter({sample.labels["source"]: int(sample.value) for sample in failed})

    def healthy(self) -> bool:
        """By its probe."""
        try:
            with urllib.request.urlopen(f"{self._url}/healthz", timeout=DEADLINE) as answer:  # noqa: S310 - the same
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return False


@dataclass
class Machine:
    """A node as an instance of a cloud."""

    cluster: Cluster
    number: int
    cloud: str
    folder: Path
    begun: int = 0

    def sidecar(self) -> Sidecar:
        """A new one, for a `with`."""
        self.begun += 1
        return Sidecar(self, self.folder / f"{self.cloud}-{self.begun}")

    def announce(self, kind: str = "", seconds: float | None = None, **more: Any) -> None:
        kind = kind or PREEMPTION[self.cloud]
        self.cluster.notice(self.number, cloud=self.cloud, action=kind, seconds=seconds, **more)

    def withdraw(self) -> None:
        self.cluster.clear_notice(self.number)

    def spoil(self, fault: str = "", **more: Any) -> None:
        self.cluster.spoil_metadata(self.number, fault, **more)

    def hide(self, *, silent: bool) -> None:
        network.hide(self.cluster.node(self.number).plan, METADATA_ADDRESS, silent=silent)

    def mend(self) -> None:
        """No fault any more; what is announced stays."""
        self.spoil()
        network.show(self.cluster.node(self.number).plan, METADATA_ADDRESS)

    def events(self) -> list[Document]:
        """What Azure tells of its events, to any program on the machine."""

        def fetch() -> bytes:
            question = urllib.request.Request(EVENTS, headers={"Metadata": "true"})
            with urllib.request.urlopen(question, timeout=DEADLINE) as answer:  # noqa: S310 - the same
                body: bytes = answer.read()
                return body

        found: list[Document] = json.loads(network.inside(self.cluster.node(self.number).plan, fetch))["Events"]
        return found


Play = Callable[[Machine], Any]


def at_once(machines: tuple[Machine, ...], play: Play) -> Mapping[str, Future[Any]]:
    """Play on each machine, and leave it as it was."""

    def once(machine: Machine) -> Any:
        machine.cluster.clear_notice(machine.number, cloud=machine.cloud)
        try:
            return play(machine)
        finally:
            machine.mend()
            machine.withdraw()

    with ThreadPoolExecutor(len(machines)) as pool:
        return {machine.cloud: pool.submit(once, machine) for machine in machines}
