"""What the driver imports to name methods of trainer ranks."""

import subprocess
import sys


def test_the_drivers_modules_import_no_torch() -> None:
    modules = "app.cluster.actors, app.mode.session, app.mode.train, app.weight_sync.factory"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"
