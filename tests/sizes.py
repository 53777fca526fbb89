"""What lets an experiment run end to end in a second: small sizes, and figures that are not
painted.
"""

import pytest

from mmdgs.demo.toys import ToySettings
from mmdgs.report.page import Figure
from mmdgs.training import TrainingSettings

TINY = ToySettings(
    points=300,
    training=TrainingSettings(steps=10, batch_size=50, learning_rate=3e-3),
    chain_steps=60,
    seeds=2,
    many_chains=30,
    many_steps=4,
)


def unpaint(patch: pytest.MonkeyPatch) -> None:
    """Figures are made, but painted as an empty PNG: matplotlib takes seconds for a large one."""
    patch.setattr(Figure, "png", lambda figure: b"\x89PNG")
