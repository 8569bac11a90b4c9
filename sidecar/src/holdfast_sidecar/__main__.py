"""Starts the sidecar. Signals come first, then the imports."""

import signal
import sys


def main() -> int:
    # The kernel drops a signal to PID 1 that is neither handled nor blocked, and the kubelet sends SIGTERM once: when
    # the trainer cannot be started, it comes while the imports below are still running.
    stopping = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    from holdfast_sidecar.main import run

    return run(stopping)


if __name__ == "__main__":
    sys.exit(main())
