"""What our code, settings and pages claim about other packages, in claims.toml, is read again in the versions that run.

A row names the place of a claim and the versions that it was read in, newest last. A pin that moves past them fails
here, until the claim was read in the new version. `source` with `has` and `lacks` reads it in the package; `test` names
the test that runs it; `again` says how to read it where neither can.
"""

import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.device.packages import installed, wheel
from tests.folders import ROOT
from tests.launch.test_images import arguments, pins
from tests.real_stack.record import same

FILE = ROOT / "tests" / "device" / "claims.toml"
# Build arguments of Dockerfile.npu and the packages whose versions they are.
BUILT = {
    "CANN_VERSION": "cann",
    "KERNELS_TAG": "sgl-kernel-npu",
    "SGLANG_TAG": "sglang",
    "TORCHVISION_VERSION": "torchvision",
    "TORCH_NPU_VERSION": "torch-npu",
    "TORCH_VERSION": "torch",
    "TRANSFORMERS_VERSION": "transformers",
    "TRITON_VERSION": "triton-ascend",
}
NAMED = r"(?:SGLang|Ray|torch|torch_npu|transformers|FSDP2|fla|CANN|vLLM|verl|Hydra|omegaconf|memfabric-zbal)"
VERSIONED = re.compile(rf"(?:#|\"\"\"|^\s+).*\b{NAMED}(?:'s)?(?: is older than| from| before)? v?\d+\.\d+")
NEAR = 3  # lines between a version in a comment and the words of its claim


@dataclass(frozen=True)
class Claim:
    """A row. `words` are found once the line breaks of the file are spaces; so are `has` and `lacks` in `source`."""

    place: str
    words: str
    says: str
    package: str
    read_in: tuple[str, ...]
    source: str | None = None
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    test: str | None = None
    again: str | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.words}"

    def check(self, text: str) -> None:
        """Fail if the text of the source contradicts the claim."""
        flat = " ".join(text.split())
        assert [each for each in self.has if each not in flat] == [], self
        assert [each for each in self.lacks if each in flat] == [], self


def row(values: dict[str, str | list[str]]) -> Claim:
    return Claim(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})  # type: ignore[arg-type]


CLAIMS = [row(values) for values in tomllib.loads(FILE.read_text())["claim"]]
READ = [claim for claim in CLAIMS if claim.source is not None]


def pinned() -> dict[str, set[str]]:
    """Package → its versions in the requirements, the images and pyproject.toml."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "launch" / "requirements").glob("*.txt"):
        for name, pin in pins(file.name).items():
            found[canonicalize_name(name)].add(pin)
    for argument, name in BUILT.items():
        found[name].add(arguments("Dockerfile.npu")[argument].removeprefix("v"))
    found["sglang"].add(arguments("Dockerfile.cuda")["SGLANG_VERSION"])
    return found


def upper_ends() -> dict[str, str]:
    """Package → the version that pyproject.toml excludes as too new."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    bounds = [(Requirement(line).name, bound) for line in lines for bound in Requirement(line).specifier]
    return {canonicalize_name(name): bound.version for name, bound in bounds if bound.operator == "<"}


PINS, ENDS = pinned(), upper_ends()


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_a_claim_stands_where_its_row_says_and_can_be_read_again(claim: Claim) -> None:
    assert " ".join(claim.words.split()) in flat_text(ROOT / claim.place), f"{claim}: correct or remove the row"
    assert sum(each is not None for each in (claim.source, claim.test, claim.again)) == 1
    assert (claim.source is None) == (not claim.has and not claim.lacks)
    assert [Version(each) for each in claim.read_in] == sorted(Version(each) for each in claim.read_in)
    if claim.test is not None:
        file, _, name = claim.test.partition("::")
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.M), claim


def flat_text(path: Path) -> str:
    """A file as one line, without the comment signs at the beginnings of its lines."""
    return " ".join(re.sub(r"^\s*#:?", "", path.read_text(encoding="utf-8"), flags=re.M).split())


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_no_pin_has_moved_past_the_versions_that_a_claim_was_read_in(claim: Claim) -> None:
    name, newest = canonicalize_name(claim.package), claim.read_in[-1]
    assert name in PINS, f"{claim}: {claim.package} is pinned nowhere"
    later = [pin for pin in PINS[name] if Version(pin) > Version(newest) and not same(pin, newest)]
    assert later == [], f"{claim}: read it in {later}, then add the version to read_in"


@pytest.mark.parametrize("package", sorted({canonicalize_name(each.package) for each in CLAIMS} & set(ENDS)))
def test_claims_were_read_in_the_newest_line_that_pyproject_accepts(package: str) -> None:
    end = Version(ENDS[package]).release
    missing = [
        str(claim)
        for claim in CLAIMS
        if canonicalize_name(claim.package) == package
        and (*end[:-1], end[-1] - 1) > Version(claim.read_in[-1]).release[: len(end)]
    ]
    assert missing == [], f"read them in the newest {package} below {ENDS[package]}"


@pytest.mark.parametrize("claim", READ, ids=str)
def test_the_installed_package_is_as_claimed(claim: Claim) -> None:
    try:
        present = version(claim.package).partition("+")[0]
    except PackageNotFoundError:
        pytest.skip(f"{claim.package} is not installed: the slow test reads its wheel")
    if present not in claim.read_in:
        pytest.skip(f"{claim.package} {present} is none of {claim.read_in}")
    assert claim.source is not None
    module = canonicalize_name(claim.package).replace("-", "_")
    package = installed({"hydra_core": "hydra"}.get(module, module))
    claim.check(package.read(claim.source.format(version=present)))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # torch has half a gigabyte
@pytest.mark.parametrize(("package", "read_in"), sorted({(each.package, one) for each in READ for one in each.read_in}))
def test_the_wheels_are_as_claimed(package: str, read_in: str) -> None:
    contents = wheel(f"{package}=={read_in}")
    for claim in READ:
        if claim.package == package and read_in in claim.read_in:
            assert claim.source is not None
            claim.check(contents.read(claim.source.format(version=read_in)))


FOLDERS = {"app": "*.py", "conf": "*.yaml", "launch": "*.sh"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_comment_that_names_a_version_of_another_package_has_a_row(folder: str) -> None:
    missing = []
    for path in sorted((ROOT / folder).rglob(FOLDERS[folder])):
        place = str(path.relative_to(ROOT))
        lines = path.read_text(encoding="utf-8").splitlines()
        words = [claim.words for claim in CLAIMS if claim.place == place]
        for number, line in enumerate(lines):
            near = lines[max(0, number - NEAR) : number + NEAR + 1]
            text = " ".join(" ".join(each.strip(" #") for each in near).split())
            if VERSIONED.search(line) and not any(each in text for each in words):
                missing.append(f"{place}:{number + 1}: {line.strip()}")
    assert missing == [], "add a row to tests/device/claims.toml"
