"""What was read of an object is not read again until it is another one."""

from __future__ import annotations

from holdfast_operator.cluster.memo import Memo


def test_each_object_is_read_once() -> None:
    read: list[list[int]] = []

    def total(source: list[int]) -> int:
        read.append(source)
        return sum(source)

    memo = Memo(total)
    first, equal = [1, 2], [1, 2]
    assert [memo("a", first), memo("a", first), memo("b", first)] == [3, 3, 3]
    assert memo("a", equal) == 3
    assert [source is equal for source in read] == [False, False, True]
    memo.clear()
    assert memo("a", equal) == 3
    assert len(read) == 4
