"""Imports the modules that ranks need. The fork server preloads this, so that each rank starts fast."""

from importlib import import_module

from app.device.torchvision_shim import define_operators

define_operators()
for family in ("qwen3", "qwen3_5"):
    import_module(f"transformers.models.{family}.modeling_{family}")
import_module("tests.trainer.ranks")
