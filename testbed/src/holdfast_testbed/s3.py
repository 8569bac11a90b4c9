"""A real S3 server on loopback over a folder, for tests and benchmarks. It ends with its `with`.

```python
with s3_server(folder) as server:
    boto3.client("s3", endpoint_url=server.url, **server.credentials)
```
It compares checksums, honours If-None-Match, and refuses wrong secrets. Below it is a file system: it refuses a key
`x` beside a key `x/y`.
"""

from __future__ import annotations

import secrets
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast_testbed.errors import NotReadyError
from holdfast_testbed.ports import free_port
from holdfast_testbed.processes import stop, tail
from holdfast_testbed.programs import program
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

    @property
    def environment(self) -> dict[str, str]:
        """What tells any S3 client of it."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_REGION": REGION,
            **{name.upper(): value for name, value in self.credentials.items()},
        }

    def make_bucket(self, name: str) -> str:
        """A new bucket's name."""
        (self.folder / name).mkdir()
        return name


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """A server with random credentials, its data and log in the folder."""
    data, notes, log = folder / "buckets", folder / "notes", folder / "versitygw.log"
    for made in (data, notes):
        made.mkdir(parents=True)
    port = free_port()
    access, secret = secrets.token_hex(10), secrets.token_hex(20)
    words = ["--port", f"127.0.0.1:{port}", "--region", REGION, "--health", _HEALTH, "--quiet", "--keep-alive"]
    # Notes beside the data: not every file system has extended attributes.
    argv: list[str | Path] = [program("versitygw"), *words, "posix", "--sidecar", notes, data]
    environment = child_environment(ROOT_ACCESS_KEY=access, ROOT_SECRET_KEY=secret)
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, cwd=folder, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process, log)
        credentials = {"aws_access_key_id": access, "aws_secret_access_key": secret}
        yield S3Server(url=url, folder=data, log=log, credentials=credentials)
    finally:
        stop(process)


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
