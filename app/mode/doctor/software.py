"""The doctor on software: installed versions against what is supported, without importing any of it."""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from app.config import RunConfig
from app.config.placement import PlacementKind
from app.device import Device
from app.mode.doctor.finding import Finding, Verdict, judged

PYTHON = SpecifierSet(">=3.11,<3.13")
SUPPORTED = {
    "torch": SpecifierSet(">=2.9,<2.15"),
    "transformers": SpecifierSet(">=5.12"),
    "ray": SpecifierSet(">=2.50"),
    "hydra-core": SpecifierSet(">=1.3.8,<1.4"),
    "omegaconf": SpecifierSet(">=2.3.1,<2.4"),
}
SGLANG = SpecifierSet(">=0.5.17,<0.5.24")
PLATFORMS = "sglang.srt.platforms"  # entry points of SGLang that this package brings
MEMORY_SAVER = "torch_memory_saver"


def software(config: RunConfig, device: Device) -> Iterator[Finding]:
    running = ".".join(map(str, sys.version_info[:3]))
    advice = "make the environment with Python 3.11 or 3.12"
    yield judged("python", PYTHON.contains(running), f"{running} ({PYTHON})", advice)
    for package, wanted in SUPPORTED.items():
        yield _package(package, wanted)
    if not config.rollout.urls:
        yield _package("sglang", SGLANG)
        yield from _plugin(device)
    for package, purpose in device.packages.items():
        yield _present(package, purpose)
    if device.plugin is not None:
        yield _built_for_torch(device.plugin)
    shared = config.placement.kind is PlacementKind.colocate and device.shares_memory
    if shared and config.offload.engine and not config.rollout.urls:
        purpose = "releases the engine's memory while the trainer trains; else offload.engine=false"
        yield _present(MEMORY_SAVER, purpose)


def _package(package: str, wanted: SpecifierSet) -> Finding:
    found = installed(package)
    if found is None:
        return Finding(package, Verdict.fail, "not installed", f"install {package}{wanted}")
    good = wanted.contains(Version(found).base_version, prereleases=True)
    return judged(package, good, f"{found} ({wanted})", f"install {package}{wanted}")


def _present(package: str, purpose: str) -> Finding:
    found = installed(package)
    told = found if found is not None else "not installed"
    return judged(package, found is not None, told, f"install {package}: {purpose}")


def _built_for_torch(plugin: str) -> Finding:
    """A device plugin is built for one version of torch."""
    found, torch = installed(plugin), installed("torch")
    if found is None or torch is None:
        return Finding(
            f"{plugin} for torch", Verdict.fail, "one of them is not installed", f"install both, {plugin} last"
        )
    same = Version(found).base_version == Version(torch).base_version
    told = f"{found} beside torch {torch}"
    return judged(f"{plugin} for torch", same, told, f"install {plugin}=={Version(torch).base_version}")


def _plugin(device: Device) -> Iterator[Finding]:
    """Our platform for plain-torch CPUs, which SGLang finds as an entry point of this installed package."""
    if device.shares_memory:  # an accelerator: SGLang's own platform serves it
        return
    registered = any(point.value.startswith("app.") for point in entry_points(group=PLATFORMS))
    told = "registered" if registered else "SGLang does not see this package"
    yield judged("SGLang platform", registered, told, "install this package: pip install --no-deps --editable .")


def installed(package: str) -> str | None:
    """The version, or None; dashes and underscores are the same."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
