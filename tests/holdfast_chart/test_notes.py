"""The text that `helm install` prints at its end. It names objects that the same release installs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from charted import all_of, container, environment, one

from holdfast_testbed.fakes.chart import CHART, render

pytestmark = pytest.mark.integration  # needs the Helm CLI


def notes(folder: Path, *values: str) -> str:
    """The text for these values. `helm template` prints no notes, so the file is rendered as part of a document."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    lines = (chart / "templates/NOTES.txt").read_text().splitlines()
    (chart / "templates/notes.yaml").write_text("text: |\n" + "".join(f"  {line}\n" for line in lines))
    documents = render(*values, namespace="team-ns", release="rel", chart=chart)
    text: str = next(document["text"] for document in documents if "text" in document)
    return text


def test_notes_name_the_deployment_and_the_address_of_the_operator(tmp_path: Path) -> None:
    documents = render(namespace="team-ns", release="rel")
    text = notes(tmp_path)
    (deployment,) = all_of(documents, "Deployment")
    assert f"kubectl -n team-ns rollout status deployment/{deployment['metadata']['name']}" in text
    assert "helm -n team-ns test rel" in text
    assert environment(documents)["HOLDFAST_AGENTS_URL"] in text
    short = one(documents, "CustomResourceDefinition")["spec"]["names"]["shortNames"]
    assert set(re.findall(r"kubectl (?:explain|get|describe) (\w+)", text)) == set(short)
    assert container(documents)["image"].endswith(re.findall(r"Holdfast (\S+) is installed", text)[0])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("crds.keep=true", "the Secrets holdfast-ca and holdfast-key exist."),
        ("tls.existingSecret=certificate", "the Secret holdfast-key exists."),
        ("crds.keep=false", "deletes it with ALL JOBS of the cluster"),
        ("crds.enabled=false", "This release does not install the FaultTolerantJob resource"),
    ],
)
def test_notes_say_what_an_uninstallation_keeps(tmp_path: Path, value: str, says: str) -> None:
    assert says in notes(tmp_path, value)
