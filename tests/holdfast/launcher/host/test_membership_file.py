"""Documents that the launcher reads from its run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import DocumentError
from holdfast.launcher.host.membership_file import MembershipFile
from holdfast.launcher.host.run_dir import read_json


def test_a_membership_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, object]] = []
    file = MembershipFile(tmp_path, seen.append)
    assert not file.read_if_changed()
    (tmp_path / "membership.json").write_text("{")
    assert not file.read_if_changed()
    assert "membership.json is not JSON" in file.problem
    (tmp_path / "new").write_text('{"version": 1}')
    (tmp_path / "new").rename(tmp_path / "membership.json")
    assert file.read_if_changed()
    assert seen == [{"version": 1}]
    assert not file.read_if_changed()


def test_a_document_nested_beyond_reason_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "membership.json").write_text("[" * 200_000)
    with pytest.raises(DocumentError, match=r"membership\.json is not JSON"):
        read_json(tmp_path / "membership.json")
