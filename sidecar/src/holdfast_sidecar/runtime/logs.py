"""JSON lines on standard error. Transitions are logged, ticks are not."""

import json
import logging
import sys
import threading
from datetime import UTC, datetime

from holdfast_sidecar.protocol.document import format_time
from holdfast_sidecar.protocol.report import Pod


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the pod in each."""

    def __init__(self, pod: Pod | None = None) -> None:
        super().__init__()
        self._pod = {} if pod is None else {"namespace": pod.namespace, "pod": pod.name, "node": pod.node}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": format_time(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._pod,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(pod: Pod | None = None) -> None:
    """Send all logs of the process to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(pod))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # else each odd answer is a warning, and a poll is a tick


class Transitions:
    """Logs a state when it differs from the one before it, so that a fault of hours is one line."""

    def __init__(self, logger: logging.Logger, state: str = "") -> None:
        self._logger = logger
        self._state = state
        self._lock = threading.Lock()

    def __call__(self, level: int, state: str, message: str | None = None) -> bool:
        """Log `message` (or the state itself) if the state is new; tells whether it was."""
        with self._lock:
            if state == self._state:
                return False
            self._state = state
        self._logger.log(level, "%s", message or state)
        return True
