"""The child of the launcher that uploads checkpoints: `python -m holdfast.launcher.tiers.upload_worker FD`.

It receives one line of settings and then the name of each checkpoint over FD, and reports the result of each upload
there. When the launcher closes its side, it uploads the newest checkpoint and exits. It shares only the folder with
the ranks, and marks there what it uploads.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from holdfast.checkpoint.folder.upload_marker import held
from holdfast.checkpoint.format.file_names import CheckpointName, parse_commit
from holdfast.checkpoint.io.rate_limit import Pace
from holdfast.checkpoint.stores.open import open_store
from holdfast.checkpoint.tiers.uploader import (
    End,
    Outcome,
    Queue,
    Upload,
    Uploader,
    UploadSettings,
    Wait,
    decide,
    source_at,
)
from holdfast.core.errors import HoldfastError

# Number of tries of a last upload. The launcher ends this process when its grace period is over.
_LAST_TRIES = 5

_log = logging.getLogger("holdfast.launcher.upload_host")


class Host:
    """The queue. One thread receives names, another one uploads."""

    def __init__(self, line: IO[str], answers: socket.socket, uploader: Uploader) -> None:
        self._lines = line
        self._answers = answers
        self._uploader = uploader
        self._queue = Queue()
        self._changed = threading.Condition()

    def listen(self) -> None:
        """Receive names until the launcher closes its side."""
        for text in self._lines:
            name = parse_commit(text.strip())
            if name is not None and self._may_be_uploaded(name):
                self._become(replace(self._queue, newest=name, failures=0, retry_at=0.0))
        self._become(replace(self._queue, closing=True, failures=0, retry_at=0.0))

    def receive_until_end(self) -> None:
        """Run `listen` as a thread. A defect ends the process, so that the launcher restarts the uploads."""
        try:
            self.listen()
        except BaseException:  # noqa: BLE001 — ends the process
            _log.exception("the uploader's thread that listens to the launcher failed")
            os._exit(1)

    def _may_be_uploaded(self, name: CheckpointName) -> bool:
        """Whether a checkpoint may be in the folder.

        If no step was made since a restore, a requested checkpoint is that of an older attempt, which was passed to
        the uploader already. If the folder cannot be read now, the upload checks again and reports the error.
        """
        try:
            return name in self._uploader.source.commits()
        except OSError:
            return True

    def work(self) -> None:
        """Upload until everything is uploaded and the launcher closes its side."""
        while True:
            with self._changed:
                match decide(self._queue, self._uploader.settings, time.monotonic()):
                    case End():
                        return
                    case Wait(seconds=seconds):
                        self._changed.wait(seconds)
                        continue
                    case Upload(name=name):
                        self._queue = replace(self._queue, began=time.monotonic())
            if not self._finished(self._uploader.upload(name)):
                return

    def _finished(self, outcome: Outcome) -> bool:
        """Report an outcome. Return False if another try is useless."""
        with self._changed:
            if outcome.settled:
                over = self._queue.arrived if outcome.arrived else self._queue.given_up
                self._queue = over(outcome.name)
            else:
                self._queue = self._queue.failed(time.monotonic())
            last = self._queue.closing and self._queue.failures >= _LAST_TRIES
        deletion_error = self._uploader.delete_replaced(outcome.name) if outcome.arrived else ""
        self._answers.sendall(_message(outcome, deletion_error).encode())
        return not last

    def _become(self, queue: Queue) -> None:
        with self._changed:
            self._queue = queue
            self._changed.notify()


def _message(outcome: Outcome, deletion_error: str) -> str:
    document: dict[str, Any] = {
        "name": str(outcome.name),
        "bytes": outcome.nbytes,
        "seconds": round(outcome.seconds, 3),
        "cause": outcome.cause,
        "message": outcome.message,
        "gone": outcome.gone,
        "untidy": deletion_error,
    }
    return json.dumps(document) + "\n"


def main() -> int:
    """Upload until the launcher exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C on a terminal
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    line = connection.makefile("r", encoding="utf-8")
    order = json.loads(line.readline())
    settings = UploadSettings.from_json(order["settings"])
    try:
        target = open_store(settings.url, in_flight=settings.in_flight)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return 1
    folder = Path(order["folder"])
    uploader = Uploader(
        source=source_at(folder),
        target=target,
        settings=settings,
        pace=Pace(settings.bytes_per_second),
        hold=partial(held, folder),
    )
    host = Host(line, connection, uploader)
    threading.Thread(target=host.receive_until_end, daemon=True).start()
    host.work()
    return 0


if __name__ == "__main__":
    sys.exit(main())
