"""A `/tmp` and a `/dev/shm` for one run and its successors: whatever is left there, they left."""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

PARENT = Path("/var/tmp")  # outside of what is replaced
ENTER = 'mount --bind "$0/tmp" /tmp && mount --bind "$0/shm" /dev/shm && exec "$@"'


@dataclass(frozen=True)
class PrivateFolders:
    """Folders below `base`, which stand for `/tmp` and `/dev/shm` in a mount namespace; runs are beside them."""

    base: Path

    @classmethod
    def make(cls) -> "PrivateFolders":
        made = cls(Path(tempfile.mkdtemp(prefix="posttrain-kills-", dir=PARENT)))
        for name in ("tmp", "shm"):
            (made.base / name).mkdir()
            (made.base / name).chmod(0o1777)
        return made

    @property
    def prefix(self) -> list[str]:
        """What comes before a command line that enters the namespace."""
        return ["unshare", "--mount", "sh", "-c", ENTER, str(self.base)]

    @property
    def permitted(self) -> bool:
        """Whether this user may enter the namespace."""
        return subprocess.run([*self.prefix, "true"], capture_output=True).returncode == 0

    def left(self) -> list[str]:
        """Return what is in both folders."""
        return sorted(entry.name for folder in ("tmp", "shm") for entry in (self.base / folder).iterdir())

    def remove(self) -> None:
        shutil.rmtree(self.base)
