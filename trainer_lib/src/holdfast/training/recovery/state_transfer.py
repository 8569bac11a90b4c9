"""The transfer of a survivor's state from memory to newcomers, in verified chunks and into new tensors.

A chunk is a part of the bytes of all tensors in order. Its part of a large tensor is sent directly from that tensor's
memory into the newcomer's tensor. Its parts of small tensors are sent in one last message, which ends with the digest
of the chunk. The digest also covers the layout and the chunk's place in it, so that no bytes can arrive in another
tensor's place. One chunk is transferred while the next one is read, or the previous one verified. For a large state,
each donor sends a share, because survivors hold the same bits. Receivers write into new tensors, so a failure leaves
their objects unchanged.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import xxhash

from holdfast.checkpoint.format.records import CHUNK_BYTES
from holdfast.checkpoint.format.shard_layout import TensorSpec
from holdfast.checkpoint.state.dtypes import empty
from holdfast.checkpoint.state.flatten import Flat
from holdfast.core.attempt import Json
from holdfast.core.errors import CorruptCheckpointError

# A smaller state has one donor, because a second one would only share the copying.
SHARED_ABOVE_BYTES: Final = 4 * CHUNK_BYTES
# Concurrent chunks for each donor and each receiver. More were not faster.
WINDOW: Final = 2
# Smaller parts share a message: a separate message would cost more than two copies.
OWN_BYTES: Final = 64 << 10
# The limit of memory that is touched early: a standby process may never receive a state.
PREPARED_BYTES: Final = 1 << 30
_DIGEST_BYTES: Final = 16
_LENGTH_BYTES: Final = 8
# Gloo matches messages by their tags. `MESSAGES` is the most that one chunk has.
_LENGTH, _HEADER, _FIRST_CHUNK = range(3)
MESSAGES: Final = CHUNK_BYTES // OWN_BYTES + 1


class ReceiveBuffers:
    """Memory for a state that will be received. Faulting in its pages takes as long as the copy into them."""

    def __init__(self) -> None:
        self._ready: dict[tuple[torch.dtype, tuple[int, ...]], list[torch.Tensor]] = {}

    @property
    def held(self) -> int:
        """The bytes that are held."""
        return sum(tensor.nbytes for ready in self._ready.values() for tensor in ready)

    def prepare(self, kinds: Iterable[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Fault in memory for tensors of these dtypes and shapes, up to the limit."""
        self.close()
        held = 0
        for dtype, shape in kinds:
            held += math.prod(shape) * dtype.itemsize
            if held > PREPARED_BYTES:
                return
            self._ready.setdefault((dtype, shape), []).append(torch.empty(shape, dtype=dtype, device="cpu").zero_())

    def take(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor with its own memory, which is faulted in if possible."""
        tensor = empty(spec)
        ready = self._ready.get((tensor.dtype, spec.shape))
        return ready.pop() if ready else tensor

    def close(self) -> None:
        """Free the memory that no message will use."""
        self._ready.clear()


class Pending(Protocol):
    """A message that is being transferred."""

    def wait(self) -> None:
        """Wait for the message. Raise `PeerLostError` if it cannot arrive."""


class Channel(Protocol):
    """The operations of a process group that the transfer needs."""

    @property
    def rank(self) -> int: ...

    def launch_send(self, tensors: Sequence[torch.Tensor], to: int, tag: int = 0) -> Pending:
        """Begin to send each tensor as a message."""

    def launch_receive(self, tensors: Sequence[torch.Tensor], frm: int, tag: int = 0) -> Pending:
        """Begin to receive the same number of messages in place."""


def send(group: Channel, to: Sequence[int], donors: Sequence[int], flat: Flat, side: Json) -> None:
    """Send this rank's part of the state to newcomers. Each of `donors` calls it; only the first one sends `side`."""
    layout = Layout(flat.here)
    sharing = layout.sharing(donors)
    if not to or group.rank not in sharing:
        return
    if group.rank == donors[0]:
        header = json.dumps({"tree": flat.tree, "side": side, "tensors": layout.table}).encode()
        length = len(header).to_bytes(_LENGTH_BYTES, "little")
        _send(group, to, _LENGTH, [_sealed(length)]).wait()
        _send(group, to, _HEADER, [_sealed(header)]).wait()
    else:
        _send(group, to, _HEADER, [_sealed(layout.digest)]).wait()
    _send_chunks(group, to, layout, flat.tensors, layout.share_of(group.rank, sharing))


def receive(
    group: Channel, donors: Sequence[int], receive_buffers: ReceiveBuffers
) -> tuple[Any, dict[str, torch.Tensor], Any]:
    """Return the tree, its tensors and the side in new memory.

    Raise `CorruptCheckpointError` if any bytes differ from those sent.
    """
    first = donors[0]
    length = int.from_bytes(_fetch(group, first, _LENGTH, _LENGTH_BYTES), "little")
    header = json.loads(bytes(_fetch(group, first, _HEADER, length)))
    layout = Layout.read(header["tensors"])
    sharing = layout.sharing(donors)
    for donor in sharing[1:]:  # gloo ends the process if a message is longer than its target
        if _fetch(group, donor, _HEADER, len(layout.digest)) != layout.digest:
            raise CorruptCheckpointError(f"ranks {first} and {donor} do not hold the same tensors")
    tensors = {spec.name: receive_buffers.take(spec) for spec in layout.specs}
    _receive_chunks(group, layout, tensors, sharing)
    return header["tree"], tensors, header["side"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a tensor's bytes."""

    name: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Segments that are verified together."""

    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    @property
    def own(self) -> list[Segment]:
        """The segments that have separate messages."""
        return [segment for segment in self.segments if segment.nbytes >= OWN_BYTES]

    @property
    def packed(self) -> list[Segment]:
        """The segments that are packed into one message."""
        return [segment for segment in self.segments if segment.nbytes < OWN_BYTES]


class Layout:
    """The bytes of all tensors in order, divided into chunks. Ranks with the same specs have the same layout."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = tuple(specs)
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        self.table = [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]
        self.chunks = tuple(Chunk(segments=segments) for segments in _cut(self.specs))
        self.digest = xxhash.xxh3_64_digest(json.dumps(self.table).encode())
        self._seed = int.from_bytes(self.digest, "big")

    @classmethod
    def read(cls, table: Iterable[Sequence[Any]]) -> Layout:
        return cls(TensorSpec(name=name, dtype=dtype, shape=tuple(shape)) for name, dtype, shape in table)

    def sharing(self, donors: Sequence[int]) -> Sequence[int]:
        """Return the donors that send chunks."""
        return donors if self.nbytes > SHARED_ABOVE_BYTES else donors[:1]

    def share_of(self, rank: int, sharing: Sequence[int]) -> range:
        """Return the chunks that one donor sends."""
        return range(sharing.index(rank), len(self.chunks), len(sharing))

    def seed(self, index: int) -> int:
        """Return the seed that binds a chunk's digest to its place."""
        return (self._seed + index) & 0xFFFF_FFFF_FFFF_FFFF


def _cut(specs: Iterable[TensorSpec]) -> Iterator[tuple[Segment, ...]]:
    chunk: list[Segment] = []
    filled = 0
    for spec in specs:
        begin = 0
        while begin < spec.nbytes:
            end = min(spec.nbytes, begin + CHUNK_BYTES - filled)
            chunk.append(Segment(name=spec.name, begin=begin, end=end))
            filled += end - begin
            begin = end
            if filled == CHUNK_BYTES:
                yield tuple(chunk)
                chunk, filled = [], 0
    if chunk:
        yield tuple(chunk)


# Sending


def _send_chunks(
    group: Channel, to: Sequence[int], layout: Layout, tensors: Mapping[str, torch.Tensor], share: Iterable[int]
) -> None:
    buffers = [_buffer(CHUNK_BYTES) for _ in range(WINDOW)]
    on_the_way: deque[Pending] = deque()
    raw = _Raw(tensors)
    for turn, index in enumerate(share):
        if len(on_the_way) == WINDOW:
            on_the_way.popleft().wait()
        own = [raw[segment] for segment in layout.chunks[index].own]
        last = _pack([raw[segment] for segment in layout.chunks[index].packed], buffers[turn % WINDOW])
        _seal(last, layout.seed(index), own)
        on_the_way.append(_send(group, to, _tag(index), [*own, last]))
    for pending in on_the_way:
        pending.wait()


class _Raw:
    """The bytes of tensors.

    A tensor that is not contiguous is copied once, and the copy is kept while chunks need it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._name = ""
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __getitem__(self, segment: Segment) -> torch.Tensor:
        if segment.name != self._name:
            self._name, self._bytes = segment.name, _bytes(self._tensors[segment.name].detach().contiguous())
        return self._bytes[segment.begin : segment.end].cpu()


def _pack(parts: Sequence[torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    message = buffer[: sum(part.numel() for part in parts) + _DIGEST_BYTES]
    if parts:
        torch.cat(list(parts), out=message[:-_DIGEST_BYTES])
    return message


class _All:
    """Several messages as one."""

    def __init__(self, messages: Sequence[Pending]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()


def _send(group: Channel, to: Sequence[int], tag: int, messages: Sequence[torch.Tensor]) -> Pending:
    return _All([group.launch_send(messages, rank, tag) for rank in to])


# Receiving


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """A chunk that is being received into its tensors."""

    own: Sequence[torch.Tensor]
    packed: Sequence[torch.Tensor]
    message: torch.Tensor
    pending: Pending

    def land(self, seed: int) -> bool:
        """Wait for the chunk, and return whether it is valid."""
        self.pending.wait()
        if not _intact(self.message, seed, self.own):
            return False
        sizes = [place.numel() for place in self.packed]
        for part, place in zip(torch.split(self.message[:-_DIGEST_BYTES], sizes), self.packed, strict=True):
            place.copy_(part)
        return True


def _receive_chunks(
    group: Channel, layout: Layout, tensors: Mapping[str, torch.Tensor], sharing: Sequence[int]
) -> None:
    raw = {name: _bytes(tensor) for name, tensor in tensors.items()}
    buffers = [_buffer(CHUNK_BYTES) for _ in range(WINDOW)]

    def places(segments: Iterable[Segment]) -> list[torch.Tensor]:
        return [raw[segment.name][segment.begin : segment.end] for segment in segments]

    def donor(index: int) -> int:
        return sharing[index % len(sharing)]

    def launch(index: int) -> _Arrival:
        own, packed = places(layout.chunks[index].own), places(layout.chunks[index].packed)
        message = buffers[index % WINDOW][: sum(place.numel() for place in packed) + _DIGEST_BYTES]
        pending = group.launch_receive([*own, message], donor(index), _tag(index))
        return _Arrival(own=own, packed=packed, message=message, pending=pending)

    ahead = deque(launch(index) for index in range(min(WINDOW, len(layout.chunks))))
    for index in range(len(layout.chunks)):
        if not ahead.popleft().land(layout.seed(index)):
            raise CorruptCheckpointError(
                f"chunk {index} of the state from rank {donor(index)} is not what this rank requested"
            )
        if index + WINDOW < len(layout.chunks):
            ahead.append(launch(index + WINDOW))


def _fetch(group: Channel, donor: int, tag: int, nbytes: int) -> memoryview:
    message = _buffer(nbytes)
    group.launch_receive([message], donor, tag).wait()
    if not _intact(message, 0):
        raise CorruptCheckpointError(f"the description of the state from rank {donor} is not what that rank sent")
    return _view(message)[:-_DIGEST_BYTES]


# Messages


def _tag(index: int) -> int:
    return _FIRST_CHUNK + index * MESSAGES


def _sealed(data: bytes) -> torch.Tensor:
    message = _buffer(len(data))
    _view(message)[: len(data)] = data
    return _seal(message, 0)


def _seal(message: torch.Tensor, seed: int, own: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    _view(message)[-_DIGEST_BYTES:] = _digest(message, seed, own)
    return message


def _intact(message: torch.Tensor, seed: int, own: Sequence[torch.Tensor] = ()) -> bool:
    return _digest(message, seed, own) == _view(message)[-_DIGEST_BYTES:]


def _digest(message: torch.Tensor, seed: int, own: Sequence[torch.Tensor]) -> bytes:
    """Return the digest of the separate messages and of this one."""
    whole = xxhash.xxh3_128(seed=seed)
    for part in own:
        whole.update(_view(part))
    whole.update(_view(message)[:-_DIGEST_BYTES])
    return whole.digest()


def _buffer(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes + _DIGEST_BYTES, dtype=torch.uint8, device="cpu")


def _view(message: torch.Tensor) -> memoryview:
    return message.numpy().data


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
