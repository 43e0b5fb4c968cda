"""Two hosts on one machine: network namespaces with an address, a name and a Ray of their own, and a wire between them.

    with two_hosts(tmp_path) as hosts:
        hosts.start_ray(cpus=(2, 1))
        hosts.cut()

The first host runs the head and the driver. Processes, memory and files are shared; the network is not.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.waiting import until

PREFIX = "posttrain-host-"
PORT = 6379
RAY = Path(sys.executable).with_name("ray")
OBJECT_STORE_BYTES = 128 * 1024 * 1024
# Seconds instead of minutes until Ray notices a lost host, on both sides.
QUICK_DETECTION = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
# The mount namespace of `ip netns exec` ends with the command, so every command mounts the host's files.
ENTER = """
hostname "$0" && mount --bind "$1/hosts" /etc/hosts && mkdir -p /tmp/ray && mount --bind "$1/ray" /tmp/ray
shift && exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """A network namespace with its address and its folder: `hosts` is its /etc/hosts, `ray` its /tmp/ray."""

    name: str
    address: str
    folder: Path

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command line that runs this command on the host. It keeps its process id."""
        inside = ["unshare", "--uts", "sh", "-c", ENTER, self.name, str(self.folder), *map(str, arguments)]
        return ["ip", "netns", "exec", self.name, *inside]

    def run(
        self, *arguments: str | Path, seconds: float = 60, environment: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Run a command to its end and return its output."""
        done = subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self, part: str = "") -> list[psutil.Process]:
        """Return the host's processes that run; `part` is a part of their command lines."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        found = []
        for pid in listed.stdout.split():
            with suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE and part in " ".join(process.cmdline()):
                    found.append(process)
        return found


class TwoHosts:
    """The hosts `first` and `second`, connected."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second = (
            Host(f"{PREFIX}{letter}", f"10.77.0.{number}", folder / letter) for number, letter in enumerate("ab", 1)
        )
        for host in self:
            self._make(host)
        self._wire = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.wire", self.first.name, self.second.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._expect(b"ready")
        for host in self:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "wire")
            _ip("-n", host.name, "link", "set", "wire", "up")
            _ip("-n", host.name, "route", "add", "default", "dev", "wire")  # how Ray finds a driver's own address

    def __iter__(self) -> Iterator[Host]:
        yield from (self.first, self.second)

    @property
    def address(self) -> str:
        """The cluster's address."""
        return f"{self.first.address}:{PORT}"

    def start_ray(self, cpus: tuple[int, int]) -> None:
        """Start the head on the first host and a worker node on the second, with so many CPUs."""
        _start_node(self.first, cpus[0], "--head", f"--port={PORT}", "--include-dashboard=false")
        self.join(cpus[1])

    def join(self, cpus: int) -> None:
        """Start the worker node on the second host, the first time or after its Ray has ended."""
        _start_node(self.second, cpus, f"--address={self.address}")

    def cut(self) -> None:
        """Drop all packets between the hosts from now on. Open connections stay open on both sides."""
        self._command(b"cut")

    def mend(self) -> None:
        """Carry packets again."""
        self._command(b"mend")

    def close(self) -> None:
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        self._wire.stdin.close()
        self._wire.stdout.close()
        self._wire.wait(10)

    def _make(self, host: Host) -> None:
        (host.folder / "ray").mkdir(parents=True)
        names = [f"{each.address} {each.name}\n" for each in self]
        (host.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        _ip("netns", "add", host.name)
        _ip("-n", host.name, "link", "set", "lo", "up")

    def _command(self, command: bytes) -> None:
        assert self._wire.stdin is not None
        self._wire.stdin.write(command)
        self._wire.stdin.flush()
        self._expect(command)

    def _expect(self, word: bytes) -> None:
        assert self._wire.stdout is not None
        said = os.read(self._wire.stdout.fileno(), 64)
        assert said.strip() == word, f"the wire did not answer {word!r} but {said!r}"


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make the hosts; end their processes and remove them afterwards."""
    remove_hosts()
    try:
        with closing(TwoHosts(folder)) as hosts:
            yield hosts
    finally:
        remove_hosts()


def remove_hosts() -> None:
    """Remove the hosts of this test or of an earlier one that was killed, with all their processes."""
    for name in _ip("netns", "list").split():
        if not name.startswith(PREFIX):
            continue
        host = Host(name, "", Path())
        for process in host.processes():
            with suppress(psutil.Error):
                process.kill()
        until(lambda host=host: not host.processes(), 30)  # type: ignore[misc]
        _ip("netns", "delete", name)


def why_not() -> str | None:
    """Return why this machine cannot have two hosts, or None."""
    if sys.platform != "linux" or any(shutil.which(tool) is None for tool in ("ip", "unshare", "mount", "hostname")):
        return "two hosts need Linux with ip, unshare, mount and hostname"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "two hosts need /dev/net/tun"
    try:
        _ip("netns", "add", f"{PREFIX}probe")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    _ip("netns", "delete", f"{PREFIX}probe")
    return None


def _start_node(host: Host, cpus: int, *role: str) -> None:
    own = (f"--node-ip-address={host.address}", f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}")
    host.run(RAY, "start", *role, *own, "--disable-usage-stats", environment=QUICK_DETECTION)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
