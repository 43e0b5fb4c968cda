"""`model.lora.targets`: which linear layers of a decoder have an adapter. Needs no torch."""

from collections.abc import Sequence

from app.config.model import ALL_LINEAR
from app.errors import expect

# Decays of linear attention: engines compute them in one kernel that takes no adapters.
DECAYS = ("in_proj_a", "in_proj_b", "in_proj_ba")
# Projections that engines compute as one: they take adapters of all of them, or of none.
FUSED = ("in_proj_qkv", "in_proj_z")


def is_adapted(name: str, targets: Sequence[str]) -> bool:
    """Whether a linear layer of the decoder, by its last name, has an adapter."""
    return name not in DECAYS and (list(targets) == [ALL_LINEAR] or name in targets)


def check_targets(targets: Sequence[str], known: set[str]) -> None:
    """Raise `ConfigError` if a target is not one of the decoder's linear layers, or half of a fused one."""
    accepted = f"[{ALL_LINEAR}], or some of {', '.join(sorted(known))}"
    unknown = [name for name in targets if name not in known and name != ALL_LINEAR]
    expect(not unknown, "model.lora.targets", list(targets), accepted)

    fused = [name for name in FUSED if name in known]
    chosen = [name for name in fused if name in targets]
    whole = chosen in ([], fused)
    expect(whole, "model.lora.targets", list(targets), f"{' and '.join(fused)} both or neither: engines fuse them")
