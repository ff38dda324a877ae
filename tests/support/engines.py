"""Engines without a model."""

import math

from vanilla_transformer_tools.translation.engine import Hypothesis


class Recorder:
    """Notes what it is given, and writes the prefixes alone.

    Attributes:
        sources: Ids of all sources, in the order of the batches.
        prefixes: Ids of all prefixes.
    """

    name = "recorder"
    max_positions = 1000
    last_position = math.inf

    def __init__(self):
        self.sources, self.prefixes = [], []

    def translate_batch(self, sources, prefixes, limits, search):
        self.sources += sources
        self.prefixes += prefixes
        return [[Hypothesis(prefix, 0.0, 2)] for prefix in prefixes]


class Echo:
    """Writes each source as it is; it can only search."""

    name = "echo"
    max_positions = 50
    last_position = 50

    def translate_batch(self, sources, prefixes, limits, search):
        return [[Hypothesis(source[:-1], -1.0, end=2)] for source in sources]
