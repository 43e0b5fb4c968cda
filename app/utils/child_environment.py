"""The environment of a run's processes: UTF-8, own servers outside of proxies, no rendezvous of a launcher.

The driver has this environment while a run lasts (`app/cluster/process_reaper.py`), and all that it starts inherits it.
In a cluster that a run joined, engines and ranks descend from `ray start`, and make the changes again.
"""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

# Where a launcher (torchrun, mpirun, srun) says which of its processes this one is. With TORCHELASTIC_USE_AGENT_STORE
# an engine waits for a store that nobody serves (torch 2.13); SGLang reads LOCAL_RANK and MASTER_ADDR, accelerate and
# mpi4py those of MPI. The rest of Slurm's (SLURM_JOB_ID, SLURM_TMPDIR) is about the job, and stays.
LAUNCHER = re.compile(
    r"(TORCHELASTIC|OMPI|PMI|PMIX|MV2_COMM_WORLD)_.*|MPI_LOCALN?RANK.*|GROUP_RANK|ROLE_(RANK|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|(LOCAL_|GROUP_)?WORLD_SIZE|(LOCAL_)?RANK|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|GTIDS|STEP_.*|SRUN_COMM_.*)"
)
HOME_FOLDERS = (".cache", ".config", ".ray", ".triton", ".tilelang", ".nv")  # that libraries of a run write to


def for_children(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that inherits `inherited`. For the result it is the same one."""
    addresses = [each for of_interface in psutil.net_if_addrs().values() for each in of_interface]
    own = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
    own = [each for each in own if "%" not in each]  # no URL of httpx 0.28 may have the interface in it: fe80::1%eth0
    hosts = re.split(r"[\s,]+", f"{inherited.get('no_proxy', '')},{inherited.get('NO_PROXY', '')}")
    outside = dict.fromkeys(filter(None, [*hosts, "localhost", "127.0.0.1", "::1", socket.gethostname(), *own]))
    no_proxy = "*" if "*" in outside else ",".join(outside)  # Python's urllib knows * alone, and not in a list
    return {
        **{name: value for name, value in inherited.items() if not LAUNCHER.fullmatch(name)},
        **dict.fromkeys(("no_proxy", "NO_PROXY"), no_proxy),  # programs read either
        "PYTHONUTF8": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",  # else one that is inherited would win
        **({} if "utf8" in encoding(inherited) else {"LC_ALL": "C.UTF-8"}),
    }


def replace_environment(environment: Mapping[str, str]) -> None:
    """Give this process these variables and no others."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def encoding(environment: Mapping[str, str]) -> str:
    """Return the locale of an environment, in a form that shows whether it has UTF-8.

    >>> encoding({"LANG": "de_DE.UTF-8"}), encoding({"LANG": "en_US.utf8", "LC_ALL": "zh_CN.GB18030"}), encoding({})
    ('de_de.utf8', 'zh_cn.gb18030', 'c')
    """
    locales = (environment.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next(filter(None, locales), "C").lower().replace("-", "")


def home_is_writable() -> bool:
    """Whether the home folder, and what libraries have made there, can be written."""
    home = Path("~").expanduser()
    folders = [home, *(each for name in HOME_FOLDERS if (each := home / name).exists())]
    return all(os.access(folder, os.W_OK | os.X_OK) for folder in folders)


def make_home(folder: Path) -> None:
    """Make a home folder that can be written, with links to what is in the real one, except caches of kernels."""
    home = Path("~").expanduser()
    for name in HOME_FOLDERS:
        (folder / name).mkdir(parents=True)
    for entry in (*home.glob("*"), *home.glob(".config/*"), *home.glob(".ray/*"), home / ".cache" / "huggingface"):
        if entry.exists() and entry.name not in HOME_FOLDERS:
            (folder / entry.relative_to(home)).symlink_to(entry)
