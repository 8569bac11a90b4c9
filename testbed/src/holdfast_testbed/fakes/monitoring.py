"""Prometheus and Alertmanager on loopback, for tests and drills. They end with their `with`.

```python
with prometheus(folder, {"scrape_configs": […], "rule_files": […]}) as server:
    server.query("up")
```
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_testbed.build.programs import program
from holdfast_testbed.errors import CommandFailedError, NotReadyError
from holdfast_testbed.node.processes import stop, tail
from holdfast_testbed.settings import child_environment
from holdfast_testbed.waiting import wait_for

_LISTENS = re.compile(r'msg="Listening on" address="?(127\.0\.0\.1:\d+)(?=\D)')
_TEMPLATES = Path("/usr/share/prometheus/alertmanager/default.tmpl")
_READY_SECONDS = 60.0
_ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One element of a query's result."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    log: Path

    def get(self, path: str, **parameters: str) -> Any:
        """Return the parsed answer to a GET. An error answer raises with its message."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(f"{self.url}{path}{query}", timeout=30) as answer:  # noqa: S310 - loopback
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise CommandFailedError(f"{path}: {error.read().decode(errors='replace')}") from error


@dataclass(frozen=True, kw_only=True)
class Prometheus(Server):
    def query(self, expression: str, at: float | None = None) -> list[Sample]:
        """Return the value of the expression, now or at a time, as a vector."""
        when = {} if at is None else {"time": str(at)}
        data = self.get("/api/v1/query", query=expression, **when)["data"]
        if data["resultType"] == "scalar":
            return [Sample(labels={}, value=float(data["result"][1]))]
        return [Sample(labels=found["metric"], value=float(found["value"][1])) for found in data["result"]]

    def alerts(self) -> list[dict[str, Any]]:
        """Return the pending and firing alerts."""
        found: list[dict[str, Any]] = self.get("/api/v1/alerts")["data"]["alerts"]
        return found


@dataclass(frozen=True, kw_only=True)
class Alertmanager(Server):
    def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/api/v2/alerts")
        return found


@contextmanager
def prometheus(folder: Path, config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Start a Prometheus with this configuration, its data and log in the folder."""
    # Alertmanagers are discovered seconds after the start. An earlier alert would be sent again a minute later.
    words = [f"--storage.tsdb.path={folder / 'prometheus-data'}", "--rules.alert.resend-delay=1s"]
    with _running("prometheus", folder, config, words) as (url, log):
        yield Prometheus(url=url, log=log)


@contextmanager
def alertmanager(folder: Path, config: Mapping[str, Any]) -> Iterator[Alertmanager]:
    """Start an Alertmanager with this configuration and without peers."""
    words = [f"--storage.path={folder / 'alertmanager-data'}", "--cluster.listen-address="]
    with _running("prometheus-alertmanager", folder, config, words, _with_templates()) as (url, log):
        yield Alertmanager(url=url, log=log)


def _with_templates() -> list[str | Path]:
    """Return a prefix that mounts unpacked templates, as Alertmanager opens them by an absolute path."""
    if _TEMPLATES.is_file():
        return []
    share = program("prometheus-alertmanager").resolve().parents[1] / "share"
    script = 'mount --bind "$0" /usr/share && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, share]


@contextmanager
def _running(
    name: str, folder: Path, config: Mapping[str, Any], words: Sequence[str], prefix: Sequence[str | Path] = ()
) -> Iterator[tuple[str, Path]]:
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / f"{name}.json", folder / f"{name}.log"
    file.write_text(json.dumps(config))  # JSON is valid YAML
    argv = [*prefix, program(name), f"--config.file={file}", f"--web.listen-address={_ANY_PORT}", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, cwd=folder, env=child_environment())
    try:
        yield _url(name, process, log), log
    finally:
        stop(process)


def _url(name: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the server's address from its log, once it is ready."""
    found: list[str] = []

    def ready() -> bool:
        if process.poll() is not None:
            raise NotReadyError(f"{name} ended with {process.returncode}. {tail(log)}")
        if not found:
            found.extend(_LISTENS.findall(log.read_text(errors="replace")))
        return bool(found) and _answers(f"http://{found[0]}/-/ready")

    wait_for(ready, what=f"{name} is ready", seconds=_READY_SECONDS, explain=lambda: tail(log))
    return f"http://{found[0]}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - loopback
            return int(answer.status) == 200
    except OSError:
        return False
