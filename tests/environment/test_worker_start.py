"""How a worker starts: its interpreter, its search path, and what it refuses."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.environment.pool import EnvironmentSpec
from app.errors import RunError
from tests.environment.pools import PATIENCE_S, Maker, a_task, play_one, running_pool

PLAIN = "class Env:\n    def begin(self, task): ...\n    def step(self, reply): ..."
ROOT = Path(__file__).parents[2]


async def scores_of(spec: EnvironmentSpec) -> Mapping[str, float]:
    async with running_pool(spec) as pool:
        return (await play_one(pool, "a")).scored.scores


async def test_a_worker_imports_nothing_heavy_and_an_environment_what_the_driver_can(own: Maker) -> None:
    source = PLAIN + (
        "\n    def score(self):"
        "\n        import sys"
        "\n        names = 'numpy torch hydra omegaconf ray transformers psutil aiohttp app.errors app.types'.split()"
        "\n        loaded = {name: 1 for name in names if name in sys.modules}"
        "\n        import numpy, psutil, app.environment.protocol"
        "\n        return loaded or numpy.float32(2)"
    )
    assert await scores_of(own(source)) == {"score": 2.0}


def test_an_environment_of_a_bare_interpreter_has_the_working_directory_and_our_protocol(
    own: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    monkeypatch.chdir(tmp_path)
    source = f"import os, sys\nfrom app.environment.protocol import Reply\n{PLAIN}" + (
        "\n    def score(self):"
        "\n        ours = [name for name in sys.modules if name.split('.')[0] in ('numpy', 'tests', 'hydra')]"
        f"\n        ours += [path for path in sys.path if path == {str(ROOT)!r}]"
        "\n        return {'folders': sys.path.count(os.getcwd()), 'ours': len(ours)}"
    )
    spec = own(source, python=str(bare / "bin" / "python"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert asyncio.run(scores_of(spec)) == {"folders": 1.0, "ours": 0.0}


async def test_an_environment_whose_import_hangs_is_given_up(own: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.environment.pool.START_TIMEOUT_S", 1.0)
    sentence = "A worker of the environment could not start: it did not load the environment within 1 s."
    with pytest.raises(RunError, match=f"^{re.escape(sentence)}$"):
        await scores_of(own("import threading; threading.Event().wait()\n" + PLAIN))


async def test_a_replaced_worker_that_cannot_load_the_environment_ends_every_wait(own: Maker, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    source = f"import os\nif os.path.exists({str(flag)!r}): raise OSError('gone')\n" + PLAIN.replace(
        "def begin(self, task): ...", f"def begin(self, task): open({str(flag)!r}, 'w'); os._exit(3)"
    )

    async with running_pool(own(source), episodes=1) as pool:
        session = await pool.begin(a_task(), [1])
        waiting = asyncio.ensure_future(pool.begin(a_task(), [1]))
        died = await asyncio.wait_for(session.next(), PATIENCE_S)
        with pytest.raises(RunError) as gone:
            await asyncio.wait_for(waiting, PATIENCE_S)
        with pytest.raises(RunError):
            await pool.begin(a_task(), [1])
        sentence = str(gone.value)
    assert died.kind == "died"
    assert sentence.startswith("A worker of the environment cannot be started: environment._target_=")
    assert "(OSError: gone at " in sentence
