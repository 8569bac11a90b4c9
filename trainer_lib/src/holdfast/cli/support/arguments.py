"""Options of the command line, with this package's own messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from holdfast.core.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one place says what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before the first `--` is ours, what follows is the command."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def add_option(
    parser: argparse.ArgumentParser, name: str, read: Callable[[str], object], default: object, text: str
) -> None:
    """An option under torchrun's two spellings, with - and with _."""
    other = "--" + name[2:].replace("-", "_")
    names = [name] if other == name else [name, other]
    parser.add_argument(*names, dest=name[2:].replace("-", "_"), type=checked(read), default=default, help=text)


def checked(read: Callable[[str], object]) -> Callable[[str], object]:
    """Keep our own words for what is wrong; argparse puts the option's name before them."""

    def parse(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def whole_number(name: str, *, least: int = 1, words: tuple[str, ...] = ()) -> Callable[[str], int]:
    """A whole number of at least `least`; of `words`, the number of processes that each stands for."""

    def read(text: str) -> int:
        if text in words:
            return _local_processes(text)
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            choices = "".join(f", or {word}" for word in words)
            raise ValueError(f"{text!r} does not do: give a whole number of at least {least}{choices}")
        return int(text)

    return read


def _local_processes(word: str) -> int:
    """As torchrun counts: one a GPU, else one a CPU."""
    import os

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if word == "cpu":
        return cpus
    import torch

    gpus = torch.cuda.device_count()
    if word == "gpu" and not gpus:
        raise ValueError("there is no GPU here: give a number, or cpu")
    return gpus or cpus
