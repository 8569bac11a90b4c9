"""A valid safetensors header names every byte of the data once. Other headers are refused before the data is read."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.safetensors_header import LARGEST, Entry, parse
from holdfast.checkpoint.format.shard_layout import TensorSpec, plan_shard, whole
from holdfast.core.errors import CorruptCheckpointError

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}


def raw(header: Any, *, length: int | None = None, data: int = 11) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def read(content: bytes) -> dict[str, Entry]:
    return parse(content, len(content))


def test_a_header_as_it_should_be() -> None:
    content = raw({"a": A, "b": B, "__metadata__": {"format": "pt"}})
    begin = len(content) - 11
    assert read(content) == {
        "a": Entry(dtype="F32", shape=(2,), offset=begin, nbytes=8),
        "b": Entry(dtype="U8", shape=(3,), offset=begin + 8, nbytes=3),
    }


def test_our_own_headers_pass() -> None:
    specs = [TensorSpec(name=f"t{i}", dtype=d, shape=(i, 3)) for i, d in enumerate(("F64", "BF16", "BOOL", "U8"))]
    plan = plan_shard([whole(spec) for spec in specs], metadata={"format": "pt"})
    entries = parse(plan.header, plan.nbytes)
    assert {name: entry.offset for name, entry in entries.items()} == {
        piece.spec.name: offset for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "too few"),
        (b"\0" * 7, "too few"),
        (raw({"a": A, "b": B}, length=10**9), "header has 1000000000 bytes"),
        (raw({"a": A, "b": B}, length=2**64 - 1), "header has 18446744073709551615 bytes"),
        (raw(b"[]"), "not a JSON object"),
        (raw(b"{"), "cannot be read"),
        (raw(b"\xff\xfe{}"), "cannot be read"),
        (raw(b'{"a": ' + b"[" * 100_000), "cannot be read"),
        (raw(b'{"a":1' + b"0" * 5000 + b"}"), "cannot be read"),
        (raw(json.dumps({"a": A}).encode()[:-1] + b',"a":' + json.dumps(B).encode() + b"}"), "occurs twice"),
        (raw({"a": A, "b": B, "__metadata__": [[]]}), "does not map text to text"),
        (raw({"a": A, "b": B, "__metadata__": {"format": {}}}), "does not map text to text"),
        (raw({"a": {**A, "dtype": "F64"}, "b": B}), "8 bytes for F64"),
        (raw({"a": {**A, "dtype": "PICKLE"}, "b": B}), "PICKLE"),
        (raw({"a": {**A, "dtype": ["F32"]}, "b": B}), "cannot be read"),
        (raw({"a": {**A, "shape": [-2]}, "b": B}), "not a valid number"),
        (raw({"a": {**A, "shape": [2.0]}, "b": B}), "not a valid number"),
        (raw({"a": {**A, "shape": [True, 2]}, "b": B}), "not a valid number"),
        (raw({"a": {**A, "shape": "22"}, "b": B}), "cannot be read"),
        (raw({"a": {**A, "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}), "too large"),
        (raw({"a": {**A, "data_offsets": [8, 0]}, "b": B}), "-8 bytes"),
        (raw({"a": {**A, "data_offsets": [0, 8, 16]}, "b": B}), "cannot be read"),
        (raw({"a": {"dtype": "F32", "shape": [2]}, "b": B}), "data_offsets"),
        (raw({"a": A, "b": A}), "gap or an overlap"),
        (raw({"a": A, "b": {**B, "data_offsets": [7, 10]}}), "gap or an overlap"),
        (raw({"a": A, "b": {**B, "data_offsets": [9, 12]}}), "gap or an overlap"),
        (raw({"a": A}), "the file has"),
        (raw({"a": A, "b": B}, data=10), "the file has"),
        (raw({"a": {"dtype": "U8", "shape": [10**10], "data_offsets": [0, 10**10]}}), "the file has"),
    ],
)
def test_whatever_breaks_a_rule_is_damage_and_says_why(content: bytes, why: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=why):
        read(content)


def test_a_claim_costs_no_memory() -> None:
    claims = [
        (2**63).to_bytes(8, "little") + b"{" + b" " * 1000,
        raw({"a": {"dtype": "F64", "shape": [10**9], "data_offsets": [0, 8 * 10**9]}}),
        raw({f"t{i}": {"dtype": "U8", "shape": [10**9], "data_offsets": [0, 10**9]} for i in range(10)}),
    ]
    tracemalloc.start()
    for content in claims:
        with pytest.raises(CorruptCheckpointError):
            read(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(CorruptCheckpointError, match="its header has"):
        parse((LARGEST + 1).to_bytes(8, "little"), 10**12)


@pytest.mark.parametrize("junk", [b"[]", b"{}", b'"":{}', b'"\\"[[","":{}'])
def test_large_header_without_tensors_is_refused_without_memory(junk: bytes) -> None:
    open_, close = (b"{", b"}") if b":" in junk else (b"[", b"]")
    table = b",".join([junk] * ((2 << 20) // len(junk)))
    content = raw(b'{"__metadata__":' + open_ + table + close + b',"a":' + json.dumps(A).encode() + b"}", data=8)
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError, match="are not a table of tensors"):
        read(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * len(content)


def test_a_large_header_may_say_much_in_text() -> None:
    told = {"config": json.dumps([[{"[": "{"}]] * 200_000), 'a "quoted" one\\': "["}
    entries = {f"t{i}": {"dtype": "U8", "shape": [], "data_offsets": [i, i + 1]} for i in range(50_000)}
    content = raw({"__metadata__": told, **entries}, data=50_000)
    assert len(read(content)) == 50_000


@pytest.mark.parametrize("text", [b'"' + b'\\"' * (1 << 20), b'"' * (1 << 21), b"\\" * (1 << 21)])
def test_a_header_of_text_without_an_end_takes_no_longer(text: bytes) -> None:
    begun = time.monotonic()
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        read(raw(b'{"a":' + text))
    assert time.monotonic() - begun < 20


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=3)
)


@given(
    st.dictionaries(
        st.text(max_size=3),
        JUNK
        | st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F32", "U8", "BF16"]) | JUNK,
                "shape": st.lists(st.integers(-1, 4), max_size=3) | JUNK,
                "data_offsets": st.lists(st.integers(-1, 12), min_size=2, max_size=2) | JUNK,
            },
        ),
        max_size=3,
    ),
    st.integers(0, 12),
)
def test_any_header_is_taken_whole_or_refused(header: dict[str, Any], data: int) -> None:
    content = raw(header, data=data)
    try:
        entries = read(content)
    except CorruptCheckpointError:
        return
    assert sum(entry.nbytes for entry in entries.values()) == data
    assert all(entry.offset + entry.nbytes <= len(content) for entry in entries.values())
