"""Imports the stand-in device and what ranks need. The fork server preloads this, so that each rank starts fast."""

import torch_npu  # noqa: F401

import tests.trainer.imported  # noqa: F401
