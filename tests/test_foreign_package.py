"""The installed command in a working directory that has a package with this one's name, and the user's reward."""

import os
import subprocess
import sys
from pathlib import Path

from tests.folders import ROOT, python

HELPERS = """
import asyncio
from app.cluster.process_reaper import process_reaper
from app.config.reward import RewardConfig
from app.reward.scorer import Scorer

async def start():
    scorer = Scorer(RewardConfig(_target_="my_rewards.always_one"))
    await scorer.start()
    print(bool(scorer.pools[0].pids))
    scorer.close()

with process_reaper():
    asyncio.run(start())
"""
REWARD = "def always_one(trajectories):\n    return [1.0 for _ in trajectories]\n"


def test_the_public_names_import_no_heavy_library() -> None:
    names = "import sys, app; [getattr(app, name) for name in app.__all__]"
    heavy = "print(sorted({'torch', 'sglang', 'ray', 'transformers'} & set(sys.modules)))"
    assert python("-c", f"{names}; {heavy}") == "[]\n"


def test_the_process_reaper_and_the_reward_workers_do_not_import_it(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for package in ("app", "app/reward", "app/rollout", "app/cluster"):
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("raise RuntimeError('the foreign package was imported')\n")
    (project / "my_rewards.py").write_text(REWARD)

    script = tmp_path / "posttrain"
    script.write_text(HELPERS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # stands for the installation
    command = [sys.executable, str(script)]
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=280)
    assert (result.stdout, result.stderr) == ("True\n", "")
