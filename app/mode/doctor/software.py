"""Checks of installed packages against the supported versions. Nothing is imported."""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import Device
from app.mode.doctor.finding import Check, CheckStatus, check
from app.model.architecture import architecture_of

PYTHON = SpecifierSet(">=3.11,<3.13")
DISTRIBUTION = "hydra-posttrain"
INSTALL = "install this package: pip install --no-deps --editable ."
PLATFORMS = "sglang.srt.platforms"  # entry points that this package registers with SGLang
MEMORY_SAVER = "torch_memory_saver"


def software(config: RunConfig, device: Device) -> Iterator[Check]:
    """Check Python, the dependencies, and the packages that the device needs."""
    python = ".".join(map(str, sys.version_info[:3]))
    hint = "create the environment with Python 3.11 or 3.12"
    yield check("python", PYTHON.contains(python), f"{python} ({PYTHON})", hint)

    supported = supported_versions()
    if not supported:
        yield Check(DISTRIBUTION, CheckStatus.warn, "not installed, so no versions are checked", INSTALL)
    for package, versions in supported.items():
        if package != "sglang" or not config.rollout.urls:
            yield _supported(package, versions)
    if not config.rollout.urls:
        yield from _platform(device)

    for package, purpose in device.packages.items():
        yield _installed(package, purpose)
    model = architecture_of(config.model)
    if model is not None and model.linear is not None and device.linear_attention is not None:
        purpose = "kernels of linear attention; without them it trains in a torch loop, more than ten times slower"
        yield _installed(device.linear_attention, purpose)
    if device.plugin is not None:
        yield _built_for_torch(device.plugin)
    colocate = config.placement.kind is PlacementKind.colocate and device.shares_memory
    if colocate and config.offload.engine and not config.rollout.urls:
        yield _installed(MEMORY_SAVER, "releases the engine's memory during training; else offload.engine=false")


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


def _supported(package: str, versions: SpecifierSet) -> Check:
    actual = installed(package)
    hint = f"install {package}{versions}"
    if actual is None:
        return Check(package, CheckStatus.fail, "not installed", hint)
    good = versions.contains(Version(actual).base_version, prereleases=True)
    return check(package, good, f"{actual} ({versions})", hint)


def _installed(package: str, purpose: str) -> Check:
    actual = installed(package)
    return check(package, actual is not None, actual or "not installed", f"install {package}: {purpose}")


def _built_for_torch(plugin: str) -> Check:
    """Check that a device plugin was built for the installed torch."""
    subject = f"{plugin} for torch"
    actual = installed(plugin)
    torch = installed("torch")
    if actual is None or torch is None:
        return Check(subject, CheckStatus.fail, "one of them is not installed", f"install both, {plugin} last")

    expected = Version(torch).base_version
    good = Version(actual).base_version == expected
    return check(subject, good, f"{actual} with torch {torch}", f"install {plugin}=={expected}")


def _platform(device: Device) -> Iterator[Check]:
    """Check that SGLang finds our CPU platform, an entry point of this installed package."""
    if device.shares_memory:  # SGLang's own platform serves accelerators
        return
    registered = any(point.value.startswith("app.") for point in entry_points(group=PLATFORMS))
    message = "registered" if registered else "SGLang does not find this package"
    yield check("SGLang platform", registered, message, INSTALL)


def installed(package: str) -> str | None:
    """Return the installed version of a package, or None. Dashes and underscores are equivalent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
