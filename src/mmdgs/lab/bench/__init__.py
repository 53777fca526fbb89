"""Benchmarks: mmdgs against a plain implementation written here, in one run on one machine."""

from mmdgs.lab.bench.chains import chain, plain_chain
from mmdgs.lab.bench.diagonals import Point, awake, moments, plain_moments, small_convnet, sweep
from mmdgs.lab.bench.samplers import plain_gibbs, random_model, sampler
from mmdgs.lab.bench.timing import Measured, Row, Work, measure, record
from mmdgs.lab.bench.trainings import plain_steps, train

__all__ = [
    "Measured",
    "Point",
    "Row",
    "Work",
    "awake",
    "chain",
    "measure",
    "moments",
    "plain_chain",
    "plain_gibbs",
    "plain_moments",
    "plain_steps",
    "random_model",
    "record",
    "sampler",
    "small_convnet",
    "sweep",
    "train",
]
