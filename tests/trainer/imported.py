"""Imports what ranks use, once: their processes are forked from one that has done this and nothing else."""

from importlib import import_module

from app.device.torchvision_shim import define_operators

define_operators()
for family in ("qwen3", "qwen3_5"):
    import_module(f"transformers.models.{family}.modeling_{family}")
import_module("tests.trainer.ranks")
