"""A line in pieces, and its translation, which is joined from theirs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from vanilla_transformer_tools.translation.segments import join_pieces


@dataclass(frozen=True)
class Translation:
    """Translation of one line.

    Attributes:
        text: Its line separators are blanks, so that a line stays a line; those around a source
            are as they were, but for line feeds.
        reached_limit: Whether the search was cut off at the longest output allowed.
        replaced_separators: Line separators of the output that became blanks.
        unknown: Unknown tokens of the output, which are `<unk>` in `text`.
        unknown_source: Strings of the source that its vocabulary lacks, one for each occurrence.
        score: Log-probability / length^length_penalty, `</s>` counted, a forced prefix not. Mean of
            the pieces of a long line. None if scores were not wanted.
        alternatives: The next best translations, if several were wanted.
        source_tokens: Tokens of the source, with a tag; only with details, like all that follow.
        tokens: Tokens of the output, with `</s>` if it ended.
        token_scores: Log-probability of each of `tokens`.
        alignment: Positions in `source_tokens` and `tokens`, a pair for each token but `</s>`.
    """

    text: str
    reached_limit: bool = False
    replaced_separators: int = 0
    unknown: int = 0
    unknown_source: tuple[str, ...] = ()
    score: float | None = None
    alternatives: tuple["Translation", ...] = ()
    source_tokens: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    token_scores: tuple[float, ...] = ()
    alignment: tuple[tuple[int, int], ...] = ()

    @property
    def ranked(self) -> tuple["Translation", ...]:
        """The translation and its alternatives, best first."""
        return (self, *self.alternatives)


@dataclass(eq=False)
class Piece:
    """A line, or a part of one, as an engine gets it.

    Attributes:
        text: With the white space around it; the pieces of a line are the whole line.
        source: Ids with `</s>`, and with a tag if the model needs one.
        prefix: Ids with which its translation begins.
        unknown: Strings that the vocabulary lacks, one for each occurrence.
        translation: With the white space of the text; None until it is found.
    """

    text: str
    source: list[int]
    prefix: list[int] = field(default_factory=list)
    unknown: tuple[str, ...] = ()
    translation: Translation | None = None


def join_parts(parts: Sequence[Translation]) -> Translation:
    """The translation of a line from those of its parts, in order, with as many alternatives."""
    if len(parts) == 1:
        return parts[0]
    ranks = zip(*(part.ranked for part in parts), strict=True)
    return with_alternatives(map(_joined, ranks))


def with_alternatives(ranked: Iterable[Translation]) -> Translation:
    """The first of several translations with the others as its alternatives."""
    best, *others = ranked
    return replace(best, alternatives=tuple(others))


def _joined(parts: Sequence[Translation]) -> Translation:
    alignment: list[tuple[int, int]] = []
    sources = targets = 0
    for part in parts:
        alignment += [(source + sources, target + targets) for source, target in part.alignment]
        sources += len(part.source_tokens)
        targets += len(part.tokens)
    scores = [part.score for part in parts if part.score is not None]
    return Translation(
        join_pieces([part.text for part in parts]),
        reached_limit=any(part.reached_limit for part in parts),
        replaced_separators=sum(part.replaced_separators for part in parts),
        unknown=sum(part.unknown for part in parts),
        unknown_source=tuple(chain.from_iterable(part.unknown_source for part in parts)),
        score=sum(scores) / len(scores) if scores else None,
        source_tokens=tuple(chain.from_iterable(part.source_tokens for part in parts)),
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        token_scores=tuple(chain.from_iterable(part.token_scores for part in parts)),
        alignment=tuple(alignment),
    )
