"""Runs have as little to do as in the tests of training."""

from ..training.conftest import little_to_do as little_to_do
