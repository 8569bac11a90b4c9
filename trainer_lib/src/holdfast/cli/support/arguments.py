"""Options of the command line, with this package's own messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from holdfast.core.errors import UsageError
from holdfast.core.linux import processors


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one place prints the error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def split_command(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split Holdfast's options from the command after the first `--`."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def checked(read: Callable[[str], object]) -> Callable[[str], object]:
    """Report the text and what the parser expected; argparse puts the option's name before it."""

    def parse(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"invalid value {text!r}: {error}") from error

    return parse


def local_processes(word: str) -> int:
    """Return the number of devices as torchrun does: GPUs, or else CPUs."""
    if word == "cpu":
        return processors()
    import torch

    gpus = torch.cuda.device_count()
    if word == "gpu" and not gpus:
        raise UsageError("holdfast run: --nproc-per-node gpu: this host has no GPU; use a number, or cpu")
    return gpus or processors()
