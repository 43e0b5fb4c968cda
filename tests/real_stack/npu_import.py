"""torch_npu imported for real, without CANN and without an NPU.

Its libraries bind all their functions when they are loaded, so each function that neither torch nor torch_npu has is
compiled into a library of CANN's name. torch_npu asks for torch's CPU build. Beside the default build of x86-64, both
register the same keys of the allocator's configuration, which ends the process; torch's own registration is dropped
before torch_npu's.
"""

import ctypes
import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

from tests.real_stack.stub import defined, undefined, write_libraries

CANN = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
NOT_LOADED = "libop_plugin_atb.so"  # on first use only
OF_THE_INTERPRETER = ("Py", "_Py", "_ITM", "__gmon", "__cxa_finalize")
FORGET = "libforget_allocator_keys.so"
FORGET_SOURCE = """
#include <string>
#include <unordered_set>
extern std::unordered_set<std::string> keys
    asm("_ZZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11EvE4keys");
extern "C" void forget_allocator_keys() { keys.clear(); }
"""
FIND = (
    "import importlib.util as u, json;"
    "print(json.dumps({n: list(u.find_spec(n).submodule_search_locations)[0] for n in ('torch', 'torch_npu')}))"
)


def write_cann(python: Path, folder: Path) -> Path:
    """Compile what this environment's torch_npu needs of CANN; return the folder."""
    listed = subprocess.run([str(python), "-c", FIND], capture_output=True, text=True, check=True)
    packages = {name: Path(path) for name, path in json.loads(listed.stdout).items()}
    plugin = [*packages["torch_npu"].glob("lib/*.so"), *packages["torch_npu"].glob("_C*.so")]
    plugin = [path for path in plugin if path.name != NOT_LOADED]
    known = set().union(
        *(defined(path) for path in (*plugin, *packages["torch"].glob("lib/*.so*"), *system_libraries()))
    )
    missing = set().union(*(undefined(path) for path in plugin)) - known
    functions = sorted(name for name in missing if not name.startswith(OF_THE_INTERPRETER))

    first, *others = CANN
    write_libraries(folder, {first: functions, **{name: () for name in others}}, returns=0)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(folder / FORGET)]
    subprocess.run(command, input=FORGET_SOURCE, text=True, check=True)
    return folder


def system_libraries() -> list[Path]:
    """The C and C++ libraries of this process."""
    ctypes.CDLL("libstdc++.so.6")
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {Path(line.split()[-1]) for line in lines if "/lib" in line and ".so" in line}
    names = ("libc.so", "libc-", "libm.so", "libm-", "ld-linux", "ld-2", "libpthread", "libdl", "libgcc_s", "libstdc++")
    return [path for path in mapped if path.name.startswith(names)]


def import_torch_npu() -> ModuleType:
    """Import torch_npu in this process, which has the folder of `write_cann` in LD_LIBRARY_PATH."""
    import torch

    if torch.version.cuda is not None:
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(FORGET).forget_allocator_keys()
    return importlib.import_module("torch_npu")
