"""What the processes of a run inherit: UTF-8, own servers outside of proxies, no rendezvous of a launcher.

The driver makes these changes to its own environment while a run lasts (`app/cluster/process_reaper.py`), and all that
it starts inherits them. In a cluster that a run joined, engines and ranks descend from `ray start` and make them again.
"""

import codecs
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import psutil

UTF8, LOCALE = "C.UTF-8", ("LC_ALL", "LC_CTYPE", "LANG")  # the first one that is set counts
NO_PROXY = ("no_proxy", "NO_PROXY")  # programs read either, most of them the first one first
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# Where a launcher (torchrun, mpirun, srun) says which of its processes this one is. With TORCHELASTIC_USE_AGENT_STORE
# an engine waits for a store that nobody serves (torch 2.13); SGLang reads LOCAL_RANK and MASTER_ADDR, accelerate and
# mpi4py those of MPI. The rest of Slurm's (SLURM_JOB_ID, SLURM_TMPDIR) is about the job, and stays.
LAUNCHER = re.compile(
    r"(TORCHELASTIC|OMPI|PMI|PMIX|MPI|MV2|I_MPI)_.*|GROUP_RANK|ROLE_(RANK|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|(LOCAL_|GROUP_)?WORLD_SIZE|(LOCAL_)?RANK|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|GTIDS|STEP_.*|SRUN_COMM_.*)"
)
# Folders of a home that libraries of a run write to, and which entries of them a run reads. The rest are kernels.
HOME_FOLDERS: dict[str, Sequence[str] | None] = {
    ".cache": ("huggingface", "modelscope"),
    ".config": None,  # all
    ".ray": None,
    ".triton": (),
    ".tilelang": (),
    ".nv": (),
}


def changes(inherited: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that a run's processes have and `inherited` has not, or has otherwise; None: not at all."""
    present = [each for name in NO_PROXY for each in inherited.get(name, "").split(",")]
    outside = list(dict.fromkeys(filter(None, (each.strip() for each in present))))
    if "*" not in outside:
        outside += [each for each in own_addresses() if each not in outside]
    else:
        outside = ["*"]  # which Python's urllib knows alone, and not in a list
    return {
        **dict.fromkeys(launcher_variables(inherited)),
        **dict.fromkeys(NO_PROXY, ",".join(outside)),
        "PYTHONUTF8": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",  # else one that is inherited would win
        **({} if is_utf8(inherited) else {"LC_ALL": UTF8}),
    }


def apply(environment: MutableMapping[str, str], changed: Mapping[str, str | None]) -> None:
    """Set variables, and remove those that are None."""
    for name, value in changed.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value


def for_children(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that inherits `inherited`."""
    environment = dict(inherited)
    apply(environment, changes(inherited))
    return environment


def launcher_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of a launcher's variables.

    >>> launcher_variables({"RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"})
    ['OMPI_COMM_WORLD_SIZE', 'RANK', 'SLURM_PROCID']
    """
    return sorted(filter(LAUNCHER.fullmatch, environment))


def proxy_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that send HTTP to a proxy."""
    return [name for name in environment if name.lower() in PROXIES and environment[name]]


def own_addresses() -> list[str]:
    """Return the names and addresses of this machine."""
    addresses = [each for of_interface in psutil.net_if_addrs().values() for each in of_interface]
    found = (each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6))
    return list(dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), *found]))


def is_utf8(environment: Mapping[str, str]) -> bool:
    """Whether the locale of an environment has UTF-8 as its encoding. Python treats the plain C locale as UTF-8.

    >>> is_utf8({"LANG": "de_DE.utf8"}), is_utf8({"LANG": "en_US.UTF-8", "LC_ALL": "zh_CN.GB18030"}), is_utf8({})
    (True, False, False)
    """
    name = next(filter(None, (environment.get(each) for each in LOCALE)), "")
    try:
        return codecs.lookup(name.partition(".")[2].partition("@")[0]).name == "utf-8"
    except LookupError:
        return False


def home_is_writable() -> bool:
    """Whether the home folder, and what libraries have made there, can be written."""
    home = Path(os.path.expanduser("~"))
    folders = [home, *(each for name in HOME_FOLDERS if (each := home / name).exists())]
    return all(os.access(folder, os.W_OK | os.X_OK) for folder in folders)


def make_home(folder: Path) -> None:
    """Make a home folder that can be written: all that is in the real one is linked to, except caches of kernels.

    Ray keeps its token in it, compilers their kernels. Models and keys that are in the real one are still found.
    """
    home = Path(os.path.expanduser("~"))
    folder.mkdir(mode=0o700)
    for place in ("", *HOME_FOLDERS):
        (folder / place).mkdir(exist_ok=True)
        entries = list((home / place).iterdir()) if os.access(home / place, os.R_OK | os.X_OK) else []
        linked = HOME_FOLDERS.get(place, [entry.name for entry in entries if entry.name not in HOME_FOLDERS])
        for entry in entries:
            if linked is None or entry.name in linked:
                (folder / place / entry.name).symlink_to(entry)
