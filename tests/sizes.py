"""Sizes that let an experiment run end to end in a second."""

from mmdgs.lab import digits, toys
from mmdgs.training import TrainingSettings

TINY = toys.ToySettings(
    points=300,
    training=TrainingSettings(steps=10, batch_size=50, learning_rate=3e-3),
    chain_steps=60,
    seeds=2,
    many_chains=30,
    many_steps=4,
)

TINY_DIGITS = digits.DigitSettings(chains=2, steps=1, probes=1)
