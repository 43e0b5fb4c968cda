"""`python -m tests.shared_memory_app`: the application on a CPU that it takes for a device whose memory is full.

Trainer and engine then leave it to each other as on an accelerator: the trainer's memory is really freed and comes
back, the engine's server answers the same calls and has nothing to free.
"""

from dataclasses import replace

from app.device import cpu
from app.main import cli

if __name__ == "__main__":
    cpu.DEVICE = replace(cpu.DEVICE, shares_memory=True)
    cli()
