"""Benchmarks: mmdgs against a plain implementation, both measured in one run on one machine."""

from mmdgs.lab.bench.comparisons import Point, Sizes, chain, moments, sampler, sweep, train
from mmdgs.lab.bench.restoration import restoration
from mmdgs.lab.bench.timing import Row, record

__all__ = ["Point", "Row", "Sizes", "chain", "moments", "record", "restoration", "sampler", "sweep", "train"]
