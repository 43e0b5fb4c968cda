"""`python -m tests.shared_memory_app`: the application on a CPU that it takes for a device whose memory is full."""

from dataclasses import replace

from app.device import cpu
from app.main import cli

if __name__ == "__main__":
    cpu.DEVICE = replace(cpu.DEVICE, shares_memory=True)
    cli()
