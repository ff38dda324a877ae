"""The text of an output, and the translation of a line, joined from those of its pieces."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from vanilla_transformer.text_vanilla_transformer import BLANKS, blank_ends
from vanilla_transformer_tools.text.tokenizer_pair import decoded, unknown_id
from vanilla_transformer_tools.translation.engine import Hypothesis

# What `str.splitlines` and many editors take for the end of a line.
LINE_SEPARATORS = re.compile("[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")
# No blank follows a sentence of Chinese or Japanese.
_NO_BLANK_AFTER = re.compile(
    "[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff60\U00020000-\U0003134f]"
)


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


def translation_of(
    hypothesis: Hypothesis,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    first: int,
    **fields: Any,
) -> Translation:
    """The text of an output, in the white space of its source, with further fields.

    The first tokens, as many as `first`, are no text.
    """
    text, replaced = LINE_SEPARATORS.subn(" ", decoded(tokenizer, hypothesis.tokens[first:]))
    # Its blanks, without controls and marks; an argument may hold a line feed.
    before, after = (
        "".join(character for character in end if character in BLANKS)
        for end in blank_ends(source.replace("\n", " "))
    )
    unknown = unknown_id(tokenizer)
    return Translation(
        before + text + after,
        reached_limit=hypothesis.reached_limit,
        replaced_separators=replaced,
        unknown=sum(token == unknown for token in hypothesis.tokens),
        **fields,
    )


def different_first(ranked: Sequence[Translation]) -> list[Translation]:
    """Translations with different texts, best first, and then the others."""
    texts = [one.text for one in ranked]
    order = sorted(range(len(texts)), key=lambda place: texts.index(texts[place]) < place)
    return [ranked[place] for place in order]


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


def join_pieces(translations: Sequence[str]) -> str:
    """Joins the translations of the pieces of a line, which have the white space around them.

    Where a line had none between two pieces, as in Chinese, there is a blank, unless the
    translation is in such a script.
    """
    line = ""
    for text in translations:
        needs_blank = line and text and not (line[-1].isspace() or text[0].isspace())
        line += " " * bool(needs_blank and not _NO_BLANK_AFTER.match(line[-1])) + text
    return line
