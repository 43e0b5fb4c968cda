"""The application on a CPU that it takes for a full device: the trainer's memory is freed, engines answer as before."""

from dataclasses import replace

from app.device import cpu
from app.main import cli

if __name__ == "__main__":
    cpu.DEVICE = replace(cpu.DEVICE, shares_memory=True)
    cli()
