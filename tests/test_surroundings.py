"""A run in surroundings that a shell, a cluster or an administrator made: each alone, and most of them together."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEAD = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY", "HTTP_PROXY"), DEAD)
LAUNCHER = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.9.9.9",
    "MASTER_PORT": "29500",
    "OMPI_COMM_WORLD_SIZE": "8",
    "PMI_RANK": "3",
    "SLURM_PROCID": "3",
    "RAY_ADDRESS": "10.9.9.9:6379",
}
LOCALES = {"GB18030": ("zh_CN", "GB18030"), "ISO-8859-1": ("en_US", "ISO-8859-1")}
NOBODY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")  # without the rights of root
ALONE = ("space", "proxies", "launcher", "locale GB18030", "locale ISO-8859-1", "read-only home", "long TMPDIR")
TOGETHER = ("space", "proxies", "launcher", "locale GB18030", "read-only home", "long TMPDIR")


def surround(folder: Path, names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Make the surroundings in a folder: the start of a command line, and an environment."""
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    start: list[str] = []
    python = Path(sys.prefix, "bin", "python")
    if "space" in names:
        (folder / "my project").symlink_to(sys.prefix)
        python = folder / "my project" / "bin" / "python"
    if "proxies" in names:
        environment |= PROXIES
    if "launcher" in names:
        environment |= LAUNCHER
    for name, (language, charset) in LOCALES.items():
        if f"locale {name}" in names:
            if shutil.which("localedef") is None:
                pytest.skip("locales need localedef")
            locale = f"{language}.{charset}".lower().replace("-", "")
            subprocess.run(["localedef", "-i", language, "-f", charset, folder / locale], capture_output=True)
            environment |= {"LOCPATH": str(folder), "LC_ALL": locale}
    if "read-only home" in names:
        (folder / "home").mkdir()
        (folder / "home").chmod(0o555)
        environment["HOME"] = str(folder / "home")
        start = [*NOBODY] if os.geteuid() == 0 else []
    if "long TMPDIR" in names:
        environment["TMPDIR"] = str(folder / ("x" * 140))
        Path(environment["TMPDIR"]).mkdir()
    return [*start, str(python)], {**environment, "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize("names", [*([each] for each in ALONE), TOGETHER], ids=" and ".join)
def test_a_run_trains_and_exports(names: tuple[str, ...], tmp_path: Path) -> None:
    start, environment = surround(tmp_path, tuple(names))
    words = ["steps=2", "eval.before_train=false", "trainer.timeout_s=120", f"hydra.run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*start, "-m", "app", *words], env=environment, cwd=tmp_path, capture_output=True, timeout=280
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert "2 steps" in done.stdout.decode("gb18030" if "locale GB18030" in names else "latin-1")
    if "long TMPDIR" in names:
        assert list(Path(environment["TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize("option", ["--help", "mode=plan"])
def test_characters_that_the_terminal_lacks_end_nothing(option: str) -> None:
    """With `→` in what is printed."""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-m", "app", option], env=environment, cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("latin-1")
