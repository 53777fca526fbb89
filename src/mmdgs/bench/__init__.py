"""Benchmarks: mmdgs against a plain implementation written here, in one run on one machine."""

from mmdgs.bench.chains import chain, plain_chain, plain_diagonal, small_convnet
from mmdgs.bench.timing import Row, Work, rates, record
from mmdgs.bench.trainings import plain_steps, train

__all__ = [
    "Row",
    "Work",
    "chain",
    "plain_chain",
    "plain_diagonal",
    "plain_steps",
    "rates",
    "record",
    "small_convnet",
    "train",
]
