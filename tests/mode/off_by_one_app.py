"""`python -m tests.mode.off_by_one_app`: the application, whose strands say that the wrong tokens were sampled."""

from dataclasses import replace

import numpy as np

from app import main
from app.rollout.episodes.strand_builder import StrandBuilder
from app.types import Strand

build = StrandBuilder.build


def shifted(builder: StrandBuilder) -> Strand:
    """The strand with each sampled piece one token too early."""
    strand = build(builder)
    return replace(strand, sampled=np.roll(strand.sampled, -1))


if __name__ == "__main__":
    StrandBuilder.build = shifted  # type: ignore[method-assign]
    main.cli()
