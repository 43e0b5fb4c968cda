"""Checks of installed packages against the supported versions. Nothing is imported."""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from app.config import RunConfig
from app.config.command_line import DISTRIBUTION
from app.device import Device
from app.start.inputs import CheckStatus, Finding, outcome

PYTHON = SpecifierSet(">=3.11,<3.13")
INSTALL = "install this package: pip install --no-deps --editable ."
PLATFORMS = "sglang.srt.platforms"  # entry points that this package registers with SGLang
MEMORY_SAVER = "torch_memory_saver"


def software(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Check Python, the dependencies, and the packages that the device needs."""
    python = ".".join(map(str, sys.version_info[:3]))
    hint = "create the environment with Python 3.11 or 3.12"
    yield outcome("python", PYTHON.contains(python), f"{python} ({PYTHON})", hint)

    supported = supported_versions()
    if not supported:
        yield Finding(DISTRIBUTION, "not installed, so no versions are checked", CheckStatus.warn, INSTALL)
    for package, versions in supported.items():
        if package != "sglang" or not config.rollout.urls:
            yield _installed(package, f"install {package}{versions}", versions)
    if not config.rollout.urls and not device.shares_memory:  # SGLang's own platform serves accelerators
        registered = any(point.value.startswith("app.") for point in entry_points(group=PLATFORMS))
        message = "registered" if registered else "SGLang does not find this package"
        yield outcome("SGLang platform", registered, message, INSTALL)

    for package, purpose in device.packages.items():
        yield _installed(package, f"install {package}: {purpose}")
    if device.plugin is not None:
        yield _built_for_torch(device.plugin)
    if uses_memory_saver(config, device) and not config.rollout.urls:
        purpose = "releases the engine's memory during training; else offload.engine=false"
        yield _installed(MEMORY_SAVER, f"install {MEMORY_SAVER}: {purpose}")


def uses_memory_saver(config: RunConfig, device: Device) -> bool:
    """Whether engines release device memory while the trainer trains."""
    return config.placement.colocated and config.offload.engine and device.shares_memory


def supported_versions() -> dict[str, SpecifierSet]:
    """Read the version ranges from this package's metadata; SGLang's is in an extra. Empty if not installed."""
    try:
        requirements = [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return {}
    return {
        requirement.name: requirement.specifier
        for requirement in requirements
        if requirement.specifier and (requirement.marker is None or requirement.name == "sglang")
    }


def _installed(package: str, hint: str, versions: SpecifierSet | None = None) -> Finding:
    actual = installed(package)
    if actual is None or versions is None:
        return outcome(package, actual is not None, actual or "not installed", hint)
    good = versions.contains(Version(actual).base_version, prereleases=True)
    return outcome(package, good, f"{actual} ({versions})", hint)


def _built_for_torch(plugin: str) -> Finding:
    """Check that a device plugin was built for the installed torch."""
    subject = f"{plugin} for torch"
    actual = installed(plugin)
    torch = installed("torch")
    if actual is None or torch is None:
        return Finding(subject, "one of them is not installed", CheckStatus.fail, f"install both, {plugin} last")

    expected = Version(torch).base_version
    good = Version(actual).base_version == expected
    return outcome(subject, good, f"{actual} with torch {torch}", f"install {plugin}=={expected}")


def installed(package: str) -> str | None:
    """Return the installed version of a package, or None. Dashes and underscores are equivalent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
