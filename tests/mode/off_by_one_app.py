"""`python -m tests.mode.off_by_one_app`: the application, whose sequences say that the wrong tokens were sampled."""

from dataclasses import replace

import numpy as np

from app import main
from app.rollout.episodes.sequence_builder import SequenceBuilder
from app.types import TokenSequence

build = SequenceBuilder.build


def shifted(builder: SequenceBuilder) -> TokenSequence:
    """The sequence with each sampled piece one token too early."""
    sequence = build(builder)
    return replace(sequence, sampled=np.roll(sequence.sampled, -1))


if __name__ == "__main__":
    SequenceBuilder.build = shifted  # type: ignore[assignment,method-assign]
    main.cli()
