"""Set-up on a bare machine: `python3 -m holdfast_testbed.build.bootstrap`, with only the standard library.

It creates the Python environment and builds the cluster's programs at the same time. A second run changes nothing.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 — said before the imports below, which an older Python cannot read
    sys.exit("error: please install Python 3.11 or newer")

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast_testbed.build import debian_packages, go_tools, programs, venv
from holdfast_testbed.errors import MissingProgramError, TestbedError
from holdfast_testbed.locks import locked
from holdfast_testbed.settings import settings

EXTRAS = ("helm", "monitoring", "s3", "scale", "strace")
_UPSTREAMS = {"scale": "kwok", "s3": "versitygw"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up the requested parts. A failure is one message and status 1."""
    parser = argparse.ArgumentParser(prog="python3 -m holdfast_testbed.build.bootstrap", description=__doc__)
    parser.add_argument(
        "--only", choices=("venv", "cluster"), help="install only the Python environment or the programs"
    )
    parser.add_argument(
        "--with",
        dest="extras",
        action="append",
        default=[],
        choices=EXTRAS,
        help="with --only cluster",
    )
    options = parser.parse_args(arguments)
    jobs: list[Callable[[], None]] = []
    if options.only != "cluster":
        jobs.append(set_up_venv)
    if options.only != "venv":
        extras = EXTRAS if options.only is None else tuple(options.extras)
        try:
            check_machine()  # before anything that takes minutes
        except TestbedError as error:
            return _tell([error])
        jobs.append(lambda: set_up_cluster(extras))
    return _run_together(jobs)


def _run_together(jobs: Sequence[Callable[[], None]]) -> int:
    """Run all jobs. Each failure is reported, and none stops the others. Return the exit status."""
    failures = []
    with ThreadPoolExecutor() as pool:
        for running in [pool.submit(job) for job in jobs]:
            try:
                running.result()
            except TestbedError as error:
                failures.append(error)
    return _tell(failures)


def _tell(failures: Sequence[TestbedError]) -> int:
    for failure in failures:
        sys.stderr.write(f"error: {failure}\n")
    return 1 if failures else 0


def check_machine() -> None:
    """Raise an error if this machine cannot run a cluster."""
    if os.geteuid() != 0:
        raise MissingProgramError("the cluster creates namespaces and mounts: run as root")
    programs.check_assets()
    debian_packages.check_needed()


def set_up_venv() -> None:
    with locked(settings().cache / "venv.lock", what="the Python environment"):
        venv.make_venv()


def set_up_cluster(extras: Sequence[str]) -> None:
    """Install the programs of the cluster, and the requested extra ones."""
    with locked(settings().cache / "cluster.lock", what="the cluster's programs"):
        debian_packages.unpack_missing()
        debian_packages.unpack_for_tests(extras)
        go_tools.build_missing({_UPSTREAMS.get(extra, extra) for extra in extras})


if __name__ == "__main__":
    sys.exit(main())
