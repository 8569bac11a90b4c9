"""Reads the samples of a micro-batch. Samples that cannot be read are left out.

A sample is bad only if others can be read. If none can, the dataset itself has failed, and its error is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import torch

from holdfast.core.errors import UsageError
from holdfast.training.data.bad_samples import Unreadable, error_text

_RETRY_SECONDS: Final = 0.1
"""The wait before the first retry of a sample. Each further wait is longer by the same time."""
_MOST_RETRIED: Final = 8
"""The number of failing samples of a micro-batch that are retried. If more fail, waiting for each takes too long."""
_MOST_TRIED: Final = 8
"""The number of samples that are tried for a micro-batch without a readable sample."""
_RAISED: Final = (MemoryError, torch.OutOfMemoryError, UsageError)
"""Errors that no sample causes."""


@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """A collated batch, and the samples that it lacks. Without a readable sample, `data` is None."""

    data: Any
    samples: int
    unreadable: tuple[Unreadable, ...]
    error: Exception | None


@dataclass(frozen=True, kw_only=True)
class SampleReader:
    """Reads samples by their indices in the dataset. If it is not `tolerant`, each error is raised after the retries.

    `before` is called before each read of a sample.
    """

    get: Callable[[int], Any]
    collate: Callable[[list[Any]], Any]
    retries: int = 0
    tolerant: bool = False
    before: Callable[[int], object] = abs  # not a lambda, so that a worker process can receive it
    sleep: Callable[[float], object] = time.sleep

    def read(self, samples: Sequence[int]) -> ReadResult:
        """Read and collate samples."""
        values: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        for place, sample in enumerate(samples):
            value, error = self._tried(partial(self._one, sample, self.retries if len(errors) < _MOST_RETRIED else 0))
            if error is None:
                values[place] = value
            else:
                errors[place] = error
        data = self._collated(values, errors) if values else None
        return ReadResult(
            data=data,
            samples=len(values),
            unreadable=tuple(
                Unreadable(sample=samples[place], error=error_text(error)) for place, error in sorted(errors.items())
            ),
            error=errors[min(errors)] if errors else None,
        )

    def any_of(self, samples: Iterable[int], error: Exception | None) -> Any:
        """Return a batch of the first of a few samples that can be read.

        If none can, raise `error`, or the first error of these samples without it.
        """
        for sample in islice(samples, _MOST_TRIED):
            data, another = self._tried(partial(self._alone, sample))
            if another is None:
                return data
            error = error or another
        raise error or UsageError("there is no sample to read")

    def _one(self, sample: int, retries: int) -> Any:
        """Read a sample, again after an error."""
        for number in range(1, retries + 1):
            value, error = self._tried(partial(self._get, sample), retried=True)
            if error is None:
                return value
            self.sleep(_RETRY_SECONDS * number)
        return self._get(sample)

    def _get(self, sample: int) -> Any:
        self.before(sample)
        return self.get(sample)

    def _alone(self, sample: int) -> Any:
        return self.collate([self._get(sample)])

    def _tried(self, call: Callable[[], Any], *, retried: bool = False) -> tuple[Any, Exception | None]:
        """Return the result of a call, or its error if this reader tolerates it."""
        try:
            return call(), None
        except _RAISED:
            raise
        except Exception as error:
            if not (self.tolerant or retried):
                raise
            return None, error

    def _collated(self, values: dict[int, Any], errors: dict[int, Exception]) -> Any:
        """Collate the values. Those that do not fit become errors. Raise the error if it is not known which."""
        data, error = self._tried(partial(self.collate, [*values.values()]))
        if error is None:
            return data
        alone = [place for place, value in values.items() if not self._fits([value])]
        rest = {place: value for place, value in values.items() if place not in alone}
        odd = [] if not rest or self._fits([*rest.values()]) else self._odd_one(rest, error)
        for place in (*alone, *odd):
            errors[place] = error
            del values[place]
        return self.collate([*values.values()]) if values else None

    def _odd_one(self, values: dict[int, Any], error: Exception) -> list[int]:
        """Return the place of the only value without which the others fit. Raise the error if there is none."""
        if len(values) > 2:
            for place in values:
                if self._fits([value for other, value in values.items() if other != place]):
                    return [place]
        raise error

    def _fits(self, values: list[Any]) -> bool:
        return self._tried(partial(self.collate, values))[1] is None
