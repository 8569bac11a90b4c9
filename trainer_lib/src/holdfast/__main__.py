"""The program `holdfast`, also `python -m holdfast`. The signal comes first, then the imports."""

import io
import os
import signal
import sys


def main() -> int:
    # The kernel drops a signal to PID 1 that is neither handled nor blocked, and the kubelet sends SIGTERM once. The
    # launcher lets it in when it can handle it, before it starts any process.
    if os.getpid() == 1 and sys.argv[1:2] == ["run"]:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 has no letter for many a name
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    from holdfast.cli import main as cli

    return cli.main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, which `-m` puts there: a user's `queue.py` must not be imported
    sys.exit(main())
