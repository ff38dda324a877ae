"""What users of a sequence-to-sequence model rely on, each as a check that can fail.

A check builds what it needs from a `Candidate` and raises where the contract is broken; the first
line of the error says how. Its docstring is its row in the table of `compare_contracts.py`. Checks
use what every model of Transformers has: its config, `forward`, `generate`, its encoder, decoder
and embeddings.
"""

from . import computing, sharing, training
from .candidate import CHECKS, Candidate, Check

__all__ = ["CHECKS", "Candidate", "Check", "computing", "sharing", "training"]
