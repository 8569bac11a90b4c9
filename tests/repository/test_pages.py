"""What the repository's own texts say is true of the repository."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"operator": "holdfast-operator", "sidecar": "holdfast-sidecar", "trainer_lib": "holdfast-trainer"}
FOREIGN_INSTALL = re.compile(r"\binstall\b[^\n`]*?[\s'\"`](holdfast)(?![-\w./])(?!\s+(?:charts/|oci:))", re.ASCII)
"""`pip install holdfast` and `pip install 'holdfast[s3]'`; `helm install holdfast charts/holdfast` is ours."""
CAMEL = re.compile(r"(?<![\w/.-])[a-z]+(?:[A-Z][a-z0-9]*)+\b")
WIRE = ("protocol.md", "checkpoint-format.md", "sidecar.md", "metrics.md", "benchmarks.md")
"""Pages about documents that users do not write."""
OTHERS = {
    *("completionMode", "fsGroup", "holderIdentity", "renewTime", "resourceVersion", "runAsUser", "limitRange"),
    *("podMonitorNamespaceSelector", "groupLabels", "heldBack", "leftOut", "notCopied", "worldSize"),
    *("manifestDigest", "medianSeconds", "microBatch", "runID"),
}
"""Fields of other projects' resources, and of what `--json` prints."""


def texts() -> Iterator[tuple[Path, str]]:
    """Every text file that git tracks, but this one and the changelog of what was."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            yield path, path.read_text()
        except UnicodeDecodeError:
            continue


def test_distributions_have_names_that_are_ours() -> None:
    """`holdfast` on the public index is another project."""
    found = {
        folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"]
        for folder in PACKAGES
    }
    assert found == PACKAGES


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        ("pip install holdfast", True),
        ("pip install 'holdfast[s3]'", True),
        ("brings torch and `pip install holdfast`", True),
        ("RUN uv pip install --no-cache-dir holdfast==0.1", True),
        ("pip install holdfast-trainer", False),
        ("pip install ./trainer_lib", False),
        ("helm upgrade --install holdfast charts/holdfast", False),
    ],
)
def test_the_other_projects_name_is_recognized(line: str, foreign: bool) -> None:
    assert bool(FOREIGN_INSTALL.search(line)) is foreign


def test_nothing_installs_the_other_project() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path, text in texts()
        for line in text.splitlines()
        if FOREIGN_INSTALL.search(line) and "helm" not in line
    ]
    assert found == []


def test_fields_in_pages_exist() -> None:
    """A word in camelCase that a page for users shows as code is a field of the resource or a value of the chart."""
    sources = ("crds/holdfast.dev_faulttolerantjobs.yaml", "charts/holdfast/values.yaml")
    known = OTHERS | {word for name in sources for word in CAMEL.findall((ROOT / name).read_text())}
    pages = [ROOT / "README.md", ROOT / "charts/holdfast/README.md", *(ROOT / "docs").glob("*/**/*.md")]
    missing = [
        f"{page.relative_to(ROOT)}: {word}"
        for page in pages
        if page.name not in WIRE and page.parent.name != "decisions"
        for code in re.findall(r"`([^`\n]+)`", page.read_text())
        for word in CAMEL.findall(code)
        if word not in known
    ]
    assert missing == []


def test_images_install_one_version_of_everything() -> None:
    """Two builds of one commit are the same. Dependencies of dependencies are in the list, but not looked up here."""
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints-images.txt").read_text()))
    for folder in PACKAGES:
        assert "--constraint /src/constraints-images.txt" in (ROOT / folder / "Dockerfile").read_text()
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        for line in (*project["dependencies"], *(line for extra in extras for line in extra)):
            wanted = Requirement(line)
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), line
