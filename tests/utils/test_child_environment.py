"""What the processes of a run inherit from the environment that it was started in."""

import json
import os
import subprocess
import sys
import urllib.request

import psutil
import pytest

from app.utils.child_environment import for_children

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK")
LAUNCHERS = dict.fromkeys((*TORCHRUN, *MPI, "SLURM_PROCID", "SLURM_STEP_ID"), "3")
OF_THE_JOB = dict.fromkeys(("SLURM_JOB_ID", "MPI_HOME", "SLURM_TMPDIR", "CUDA_VISIBLE_DEVICES", "WANDB_API_KEY"), "7")


def test_a_launchers_place_of_a_process_is_not_inherited_and_the_job_is() -> None:
    made = for_children({**LAUNCHERS, **OF_THE_JOB})
    assert not made.keys() & LAUNCHERS.keys()
    assert {name: made[name] for name in OF_THE_JOB} == OF_THE_JOB


@pytest.mark.parametrize(
    "present", [{}, {"no_proxy": "intern.example, 10.0.0.0/8"}, {"NO_PROXY": "intern.example"}, {"no_proxy": "*"}]
)
def test_this_machine_is_outside_of_proxies(present: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's urllib and requests decide. What was outside before still is."""
    made = for_children({**present, "http_proxy": "http://127.0.0.1:9"})
    for name in ("no_proxy", "NO_PROXY", "http_proxy"):
        monkeypatch.setenv(name, made[name])
    requests, httpx = pytest.importorskip("requests.utils"), pytest.importorskip("httpx")
    httpx.Client().close()  # reads all entries
    own = {each.address for card in psutil.net_if_addrs().values() for each in card if each.family.name == "AF_INET"}
    for host in ("127.0.0.1", "localhost", *own, *("intern.example" for _ in present)):
        assert urllib.request.proxy_bypass(host), host
        assert requests.should_bypass_proxies(f"http://{host}:30000", None), host
    elsewhere = present.get("no_proxy") == "*"
    assert bool(urllib.request.proxy_bypass("hub.example")) is elsewhere


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "zh_CN.GB18030"}, {"LANG": "en_US.ISO-8859-1", "PYTHONIOENCODING": "latin-1"}, {"LANG": "C"}]
)
def test_a_child_has_utf8_for_files_streams_and_names_in_any_locale(locale: dict[str, str]) -> None:
    code = (
        "import json, locale, sys; "
        "print(json.dumps([sys.stdout.encoding, open('/dev/null').encoding, sys.getfilesystemencoding(), "
        "locale.setlocale(locale.LC_CTYPE, '')]))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    done = subprocess.run([sys.executable, "-c", code], env=for_children({**kept, **locale}), capture_output=True)
    *encodings, ctype = json.loads(done.stdout)
    assert {each.lower() for each in encodings} == {"utf-8"}
    assert ctype == "C.UTF-8"
