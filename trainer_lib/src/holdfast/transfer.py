"""The state of a survivor, from its memory to newcomers: in chunks, each verified, staged beside what they have.

Every message ends in its digest. A chunk's also covers the layout and its place in it, so that nothing arrives in
another tensor's place. One chunk is on its way while the next is packed, or the last verified. Of a large state each
donor sends its share: survivors hold the same bits. Receivers put everything into fresh tensors, so whatever fails
here leaves the objects that they train with as they were.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import xxhash

from holdfast.checkpoint.manifest import CHUNK_BYTES
from holdfast.checkpoint.shard import TensorSpec
from holdfast.checkpoint.state import Flat, empty
from holdfast.errors import DamagedError
from holdfast.worlds import Json

# Below this one donor does it: a second one would only take part in the copying.
SHARED_ABOVE_BYTES: Final = 4 * CHUNK_BYTES
# Chunks on their way at once, for each donor and each receiver. More were no faster.
WINDOW: Final = 2
_DIGEST_BYTES: Final = 16
_LENGTH_BYTES: Final = 8
# Gloo matches messages by their tags.
_LENGTH, _HEADER, _FIRST_CHUNK = range(3)


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Until it is there; PeerLostError if it cannot be."""


class Channel(Protocol):
    """What is needed of a group."""

    @property
    def rank(self) -> int:
        """This rank."""

    def launch_send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Begin to send."""

    def launch_receive(self, tensor: torch.Tensor, frm: int, tag: int = 0) -> Pending:
        """Begin to receive in place."""


def give(group: Channel, to: Sequence[int], donors: Sequence[int], flat: Flat, side: Json) -> None:
    """Send this rank's part of the state to newcomers; each of `donors` calls it. `side` is the first one's."""
    layout = Layout(flat.here)
    sharing = layout.sharing(donors)
    if not to or group.rank not in sharing:
        return
    if group.rank == donors[0]:
        header = json.dumps({"tree": flat.tree, "side": side, "tensors": layout.table}).encode()
        length = len(header).to_bytes(_LENGTH_BYTES, "little")
        _send(group, to, _LENGTH, _sealed(length, 0)).wait()
        _send(group, to, _HEADER, _sealed(header, 0)).wait()
    _send_chunks(group, to, layout, flat.tensors, layout.share_of(group.rank, sharing))


def receive(group: Channel, donors: Sequence[int]) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """The tree, its tensors and the side, in memory of their own. DamagedError if bytes differ from what was sent."""
    first = donors[0]
    length = int.from_bytes(_fetch(group, first, _LENGTH, _LENGTH_BYTES), "little")
    header = json.loads(bytes(_fetch(group, first, _HEADER, length)))
    layout = Layout.read(header["tensors"])
    tensors = {spec.name: empty(spec) for spec in layout.specs}
    _receive_chunks(group, layout, tensors, layout.sharing(donors))
    return header["tree"], tensors, header["side"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Part of a tensor's bytes, and where in its chunk it lies."""

    name: str
    begin: int
    end: int
    at: int


class Layout:
    """All tensors' bytes, one after the other, cut into chunks. The same on whoever has the same specs."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        self.table = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        self.chunks: tuple[tuple[Segment, ...], ...] = tuple(_cut(self.specs))
        self._seed = xxhash.xxh3_64_intdigest(json.dumps(self.table).encode())

    @classmethod
    def read(cls, table: Iterable[Sequence[Any]]) -> Layout:
        """From its wire form."""
        return cls(TensorSpec(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in table)

    def sharing(self, donors: Sequence[int]) -> Sequence[int]:
        """Those of the donors that send chunks."""
        return donors if self.nbytes > SHARED_ABOVE_BYTES else donors[:1]

    def share_of(self, rank: int, sharing: Sequence[int]) -> range:
        """The chunks that one of them sends."""
        return range(sharing.index(rank), len(self.chunks), len(sharing))

    def seed(self, index: int) -> int:
        """What ties a chunk's digest to its place."""
        return (self._seed + index) & 0xFFFF_FFFF_FFFF_FFFF

    def size(self, index: int) -> int:
        """Bytes of a chunk."""
        last = self.chunks[index][-1]
        return last.at + last.end - last.begin


def _cut(specs: Iterable[TensorSpec]) -> Iterator[tuple[Segment, ...]]:
    chunk: list[Segment] = []
    filled = 0
    for spec in specs:
        begin = 0
        while begin < spec.nbytes:
            end = min(spec.nbytes, begin + CHUNK_BYTES - filled)
            chunk.append(Segment(name=spec.name, begin=begin, end=end, at=filled))
            filled += end - begin
            begin = end
            if filled == CHUNK_BYTES:
                yield tuple(chunk)
                chunk, filled = [], 0
    if chunk:
        yield tuple(chunk)


# Giving


def _send_chunks(
    group: Channel, to: Sequence[int], layout: Layout, tensors: Mapping[str, torch.Tensor], share: Iterable[int]
) -> None:
    buffers = [_buffer(CHUNK_BYTES) for _ in range(WINDOW)]
    on_the_way: deque[Pending] = deque()
    raw = _Raw(tensors)
    for turn, index in enumerate(share):
        if len(on_the_way) == WINDOW:
            on_the_way.popleft().wait()
        message = buffers[turn % WINDOW][: layout.size(index) + _DIGEST_BYTES]
        for segment in layout.chunks[index]:
            message[segment.at :][: segment.end - segment.begin].copy_(raw[segment.name][segment.begin : segment.end])
        on_the_way.append(_send(group, to, _FIRST_CHUNK + index, _seal(message, layout.seed(index))))
    for pending in on_the_way:
        pending.wait()


class _Raw:
    """Tensors as bytes. One that is not contiguous is copied once, and the copy is kept while chunks need it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._name = ""
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != self._name:
            self._name, self._bytes = name, _bytes(self._tensors[name].contiguous())
        return self._bytes


class _All:
    """Several messages as one."""

    def __init__(self, messages: Sequence[Pending]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()


def _send(group: Channel, to: Sequence[int], tag: int, message: torch.Tensor) -> Pending:
    return _All([group.launch_send(message, rank, tag) for rank in to])


# Receiving


def _receive_chunks(
    group: Channel, layout: Layout, tensors: Mapping[str, torch.Tensor], sharing: Sequence[int]
) -> None:
    raw = {name: _bytes(tensor) for name, tensor in tensors.items()}
    for index, message in _arrivals(group, layout, sharing):
        if not _intact(message, layout.seed(index)):
            donor = sharing[index % len(sharing)]
            raise DamagedError(f"chunk {index} of the state from rank {donor} is not what this rank asked for")
        for segment in layout.chunks[index]:
            raw[segment.name][segment.begin : segment.end].copy_(message[segment.at :][: segment.end - segment.begin])


def _arrivals(group: Channel, layout: Layout, sharing: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Chunks as they arrive, the next ones on their way meanwhile. Each is good until the next is asked for."""
    buffers = [_buffer(CHUNK_BYTES) for _ in range(min(WINDOW, len(layout.chunks)))]

    def launch(index: int) -> tuple[torch.Tensor, Pending]:
        message = buffers[index % WINDOW][: layout.size(index) + _DIGEST_BYTES]
        return message, group.launch_receive(message, sharing[index % len(sharing)], _FIRST_CHUNK + index)

    ahead = deque(launch(index) for index in range(len(buffers)))
    for index in range(len(layout.chunks)):
        message, pending = ahead.popleft()
        pending.wait()
        yield index, message
        if index + WINDOW < len(layout.chunks):
            ahead.append(launch(index + WINDOW))


def _fetch(group: Channel, donor: int, tag: int, nbytes: int) -> memoryview:
    message = _buffer(nbytes)
    group.launch_receive(message, donor, tag).wait()
    if not _intact(message, 0):
        raise DamagedError(f"the description of the state from rank {donor} is not what that rank sent")
    return _view(message)[:-_DIGEST_BYTES]


# Messages


def _sealed(data: bytes, seed: int) -> torch.Tensor:
    message = _buffer(len(data))
    _view(message)[: len(data)] = data
    return _seal(message, seed)


def _seal(message: torch.Tensor, seed: int) -> torch.Tensor:
    view = _view(message)
    view[-_DIGEST_BYTES:] = xxhash.xxh3_128_digest(view[:-_DIGEST_BYTES], seed)
    return message


def _intact(message: torch.Tensor, seed: int) -> bool:
    view = _view(message)
    return xxhash.xxh3_128_digest(view[:-_DIGEST_BYTES], seed) == view[-_DIGEST_BYTES:]


def _buffer(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes + _DIGEST_BYTES, dtype=torch.uint8)


def _view(message: torch.Tensor) -> memoryview:
    return message.numpy().data


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
