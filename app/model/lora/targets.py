"""`model.lora.targets`: which linear layers of a decoder have an adapter. Needs no torch."""

from collections.abc import Sequence

from app.config.model import ALL_LINEAR
from app.errors import expect

# Decays of linear attention: engines compute them in one kernel that takes no adapters.
DECAYS = ("in_proj_a", "in_proj_b", "in_proj_ba")
# Engines compute some projections as one, and take an adapter of one only beside those of others. For a missing key
# projection, or one of `up_proj` beside `gate_proj`, SGLang fills in zeros.
BESIDE = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
    "in_proj_qkv": ("in_proj_z",),
    "in_proj_z": ("in_proj_qkv",),
}


def is_adapted(name: str, targets: Sequence[str]) -> bool:
    """Whether a linear layer of the decoder, by its last name, has an adapter."""
    return name not in DECAYS and (list(targets) == [ALL_LINEAR] or name in targets)


def check_targets(targets: Sequence[str], known: set[str]) -> None:
    """Raise `ConfigError` if a target is not one of the decoder's linear layers."""
    accepted = f"[{ALL_LINEAR}], or some of {', '.join(sorted(known))}"
    unknown = [name for name in targets if name not in known and name != ALL_LINEAR]
    expect(not unknown, "model.lora.targets", list(targets), accepted)


def check_served(targets: Sequence[str]) -> None:
    """Raise `ConfigError` if engines cannot serve adapters of these layers alone."""
    for name in targets:
        missing = [other for other in BESIDE.get(name, ()) if other not in targets]
        accepted = f"{' and '.join(missing)}, too: engines compute them and {name} as one"
        expect(not missing, "model.lora.targets", list(targets), accepted)
