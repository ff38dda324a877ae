"""The interface of engines: token ids in, hypotheses out."""

from collections.abc import Container
from dataclasses import dataclass
from math import nan
from typing import Protocol, Self

from vanilla_transformer_tools.search import Search


@dataclass(frozen=True)
class Hypothesis:
    """One output for one source.

    Attributes:
        tokens: Ids, with a forced prefix, without the start token and `</s>`.
        score: Log-probability / length^length_penalty of the tokens after the prefix, `</s>`
            counted; NaN if scores were not wanted.
        end: Id of the token that ended it, `</s>` in most models; None: it reached the limit.
    """

    tokens: list[int]
    score: float
    end: int | None

    @classmethod
    def of(cls, output: list[int], ends: Container[int]) -> Self:
        """An output up to the first token that ends it."""
        place = next((place for place, token in enumerate(output) if token in ends), None)
        return cls(output[:place], nan, None if place is None else output[place])

    @property
    def reached_limit(self) -> bool:
        """Whether the output ended at the limit instead of at `</s>`."""
        return self.end is None

    @property
    def ended(self) -> list[int]:
        """The tokens with the one that ended them, if one did."""
        return self.tokens if self.end is None else [*self.tokens, self.end]


@dataclass(frozen=True)
class ForcedPass:
    """Scores and alignment of one given output.

    Attributes:
        log_probs: Log-probability of each token.
        alignment: For each token, the source position with the largest attention weight.
    """

    log_probs: list[float]
    alignment: list[int]


class Engine(Protocol):
    """The interface of engines, which search: `TorchEngine`, `CTranslate2Engine`, or another one.

    Attributes:
        name: Name in records of results.
        max_positions: Longest source, in tokens, that the model expects.
        last_position: Longest source or output, in tokens, that it can read or write.
    """

    name: str
    max_positions: int
    last_position: float

    def translate_batch(
        self,
        sources: list[list[int]],
        prefixes: list[list[int]],
        limits: list[int],
        search: Search,
    ) -> list[list[Hypothesis]]:
        """Translates each source independently of the others.

        Args:
            sources: Ids with `</s>`.
            prefixes: Ids of one length that outputs begin with, after `search`'s first token.
            limits: Longest output of each source in tokens, its prefix counted.
            search: How to search.

        Returns:
            The hypotheses of each source, best first.
        """
