"""A real S3 server over a folder, for tests and benchmarks, on loopback or where pods reach it. It ends with its
`with`.

```python
with s3_server(folder) as server:
    boto3.client("s3", endpoint_url=server.url, **server.credentials)
```
It compares checksums, supports If-None-Match, and rejects wrong secrets. It stores objects in a file system,
so it rejects a key `x` if there is a key `x/y`.
"""

from __future__ import annotations

import secrets
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast_testbed.build.programs import program
from holdfast_testbed.errors import NotReadyError
from holdfast_testbed.node.processes import stop, tail
from holdfast_testbed.ports import free_port
from holdfast_testbed.settings import child_environment
from holdfast_testbed.waiting import wait_for

REGION: Final = "us-east-1"
_HEALTH: Final = "/healthz"
_READY_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A running server. `credentials` are boto3's arguments; each folder in `folder` is a bucket."""

    url: str
    folder: Path
    log: Path
    credentials: Mapping[str, str] = field(repr=False)
    region: str
    _program: _Program = field(repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of an S3 client for this server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_REGION": self.region,
            **{name.upper(): value for name, value in self.credentials.items()},
        }

    def make_bucket(self, name: str) -> str:
        (self.folder / name).mkdir()
        return name

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stop the server meanwhile, so that connections are refused. Afterwards it runs again with all its data."""
        self._program.stop()
        try:
            yield
        finally:
            self._program.start()


@contextmanager
def s3_server(folder: Path, *, address: str = "127.0.0.1", region: str = REGION) -> Iterator[S3Server]:
    """Start a server with random credentials, its data and log in the folder."""
    data, notes, log = folder / "buckets", folder / "notes", folder / "versitygw.log"
    for made in (data, notes):
        made.mkdir(parents=True)
    port = free_port(address)
    access, secret = secrets.token_hex(10), secrets.token_hex(20)
    words = ["--port", f"{address}:{port}", "--region", region, "--health", _HEALTH, "--quiet", "--keep-alive"]
    server = _Program(
        # Metadata next to the data, because not every file system has extended attributes.
        argv=(program("versitygw"), *words, "posix", "--sidecar", notes, data),
        environment=child_environment(ROOT_ACCESS_KEY=access, ROOT_SECRET_KEY=secret),
        url=f"http://{address}:{port}",
        log=log,
    )
    credentials = {"aws_access_key_id": access, "aws_secret_access_key": secret}
    try:
        server.start()
        yield S3Server(url=server.url, folder=data, log=log, credentials=credentials, region=region, _program=server)
    finally:
        server.stop()


@dataclass
class _Program:
    """The server's process, which can be restarted."""

    argv: Sequence[str | Path]
    environment: Mapping[str, str] = field(repr=False)
    url: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                list(self.argv), stdout=output, stderr=output, cwd=self.log.parent, env=dict(self.environment)
            )
        _wait_ready(self.url, self.process, self.log)

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def ready() -> bool:
        if process.poll() is not None:
            raise NotReadyError(f"versitygw ended with {process.returncode}: {tail(log)}")
        try:
            with urllib.request.urlopen(f"{url}{_HEALTH}", timeout=5) as answer:  # noqa: S310 - loopback
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_for(ready, what="versitygw answers", seconds=_READY_SECONDS, explain=lambda: tail(log))
