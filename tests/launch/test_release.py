"""What names the release names the same one."""

import re
import tomllib

import pytest
import yaml

from tests.folders import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_changelog_and_citation_are_of_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_images_are_labelled_with_name_version_and_license(device: str) -> None:
    text = (ROOT / f"Dockerfile.{device}").read_text()
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text))
    assert labels == {name: PROJECT[key] for name, key in zip(labels, ("name", "version", "license"), strict=True)}
    assert list(labels) == ["title", "version", "licenses"]
