"""The images' files: linted, versions of the requirements, a context that suffices; what names the release agrees."""

import re
import subprocess
import tomllib
from importlib.metadata import distribution

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.config.device import DeviceKind
from tests.launch.shell import ROOT, tool

IMAGES = ["Dockerfile.cuda", "Dockerfile.npu"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def arguments(name: str) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(.*)$", text(name), re.M))


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "launch" / "requirements" / name).read_text().splitlines()
    return dict(line.replace("[default]", "").split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name: str) -> None:
    done = subprocess.run([tool("hadolint"), name], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_each_device_gets_every_requirement_of_the_application(kind: DeviceKind) -> None:
    """Images and `launch/setup.sh` install the application without its dependencies."""
    files = (ROOT / "launch" / "requirements").glob(f"{kind.name}*.txt")
    lines = [line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines()]
    # On a CPU SGLang is installed without its dependencies; on NPUs it is built, with those of its NPU edition.
    of_sglang = [] if kind is DeviceKind.cpu else distribution("sglang").requires or []
    installed = {canonicalize_name(Requirement(line).name) for line in [*lines, *of_sglang] if line}

    needed = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    brought = {"tokenizers": "transformers"}
    assert {name for name in needed if name not in installed and brought.get(name) not in installed} == set()


def test_versions_are_those_of_the_requirements() -> None:
    npu, cuda = arguments("Dockerfile.npu"), arguments("Dockerfile.cuda")
    assert cuda["SGLANG_VERSION"] == pins("cuda.txt")["sglang"]
    assert npu["TORCH_VERSION"] == pins("npu.txt")["torch"]
    assert npu["TORCH_NPU_VERSION"] == pins("npu.txt")["torch_npu"]
    assert npu["TRANSFORMERS_VERSION"] == pins("npu.txt")["transformers"]
    assert npu["SGLANG_TAG"] == f"v{cuda['SGLANG_VERSION']}"


@pytest.mark.parametrize("name", IMAGES)
def test_the_build_context_holds_what_is_copied(name: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text(name), re.M) for word in line.split()[:-1]]
    assert copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert path.split("/")[0] in allowed, path


def test_changelog_and_citation_are_of_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_labelled_with_name_version_and_license(name: str) -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', text(name)))
    assert labels == {label: PROJECT[key] for label, key in zip(labels, ("name", "version", "license"), strict=True)}
    assert list(labels) == ["title", "version", "licenses"]
