"""Pieces of HTML that a page shows: all text in them is escaped."""

import difflib
import re
import unicodedata
from collections.abc import Sequence
from html import escape
from itertools import zip_longest

from vanilla_transformer_tools.page.links import WITHOUT_BLANKS, LinkedPair
from vanilla_transformer_tools.translation import Translation

# A less likely token is marked.
DOUBTFUL = 0.5
# Lines whose tokens and links are drawn.
MOST_LINES = 20

# What a comparison marks as a whole: a character of a script without blanks, a word, or a mark.
_PART = re.compile(rf"{WITHOUT_BLANKS.pattern}|(?:(?!{WITHOUT_BLANKS.pattern})\w)+|\s+|.")


def text(content: str) -> str:
    """Escaped text, with visible control characters, in a direction of its own."""
    shown = "".join(
        ascii(character)[1:-1]
        if unicodedata.category(character) == "Cc" and character not in "\t\n"
        else character
        for character in content
    )
    return f'<bdi dir="auto">{escape(shown)}</bdi>'


def message(words: str) -> str:
    """A sentence in place of a result."""
    return f'<p class="vt-message">{escape(words)}</p>'


def hypotheses_table(lines: Sequence[tuple[str, Translation]]) -> str:
    """All translations of all lines but blank ones, with their scores, best first."""
    rows = []
    for number, (line, best) in enumerate(lines, start=1):
        if not line.strip():
            continue
        for rank, one in enumerate((best, *best.alternatives), start=1):
            note = " (cut off)" if one.reached_limit else ""
            rows.append(
                f'<tr><td class="vt-number">{number}</td><td class="vt-number">{rank}</td>'
                f'<td class="vt-number">{one.score or 0:.3f}</td>'
                f"<td>{text(one.text)}{note}</td></tr>"
            )
    heads = "".join(f'<th scope="col">{head}</th>' for head in _HEADS)
    return (
        '<div class="vt-scroll"><table class="vt-table"><caption>A score is the log-probability '
        f"of a translation / length<sup>a</sup>; higher is better.</caption><thead><tr>{heads}"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


_HEADS = ("line", "rank", "score", "translation")


def token_lines(lines: Sequence[tuple[Sequence[str], Sequence[float]]], omitted: int = 0) -> str:
    """The tokens of translations, each with its probability; doubtful ones are marked.

    Args:
        lines: Of each translation the human-readable tokens, and their probabilities.
        omitted: Number of further lines.
    """
    shown = [
        f'<ol class="vt-tokens" dir="{direction("".join(tokens))}">'
        + "".join(map(_token, tokens, probabilities))
        + "</ol>"
        for tokens, probabilities in lines
    ]
    note = (
        "The number under a token is its probability after all tokens before it. "
        f'<span class="vt-doubtful">Marked</span> tokens are below {DOUBTFUL:.0%}; ␣ is a blank.'
    )
    return f'<p class="vt-note">{note}</p>{"".join(shown)}{_omitted(omitted)}'


def _token(token: str, probability: float) -> str:
    mark = ' class="vt-doubtful"' if probability < DOUBTFUL else ""
    return (
        f'<li{mark} style="--doubt:{1 - probability:.2f}"><bdi>{escape(token)}</bdi>'
        f"<small>{probability:.0%}</small></li>"
    )


def alignment(pairs: Sequence[LinkedPair], omitted: int = 0) -> str:
    """Lines above their translations; the page's script draws what links them.

    Args:
        pairs: Of the lines that are shown.
        omitted: Number of further lines.
    """
    note = (
        "Lines link the words of a translation to those that the model attended to most. Point at "
        "a word, or reach it with Tab, to follow it."
    )
    return f'<p class="vt-note">{note}</p>{"".join(map(_linked, pairs))}{_omitted(omitted)}'


def _linked(pair: LinkedPair) -> str:
    rows = []
    for side, parts, others, word in (
        (0, pair.source, pair.target, "to"),
        (1, pair.target, pair.source, "from"),
    ):
        items = []
        for place, part in enumerate(parts):
            linked = [link[1 - side] for link in pair.links if link[side] == place]
            label = f"{part}, {word} {', '.join(others[one] for one in linked) or 'nothing'}"
            items.append(
                f'<li tabindex="0" aria-label="{escape(label)}" '
                f'data-links="{" ".join(map(str, linked))}"><bdi>{escape(part)}</bdi></li>'
            )
        name = "source" if side == 0 else "translation"
        rows.append(
            f'<ul class="vt-words" dir="{direction(" ".join(parts))}" aria-label="{name}">'
            f"{''.join(items)}</ul>"
        )
    return f"<word-links>{''.join(rows)}</word-links>"


def differences(first: str, second: str) -> tuple[str, str]:
    """Two texts, in each of which the parts that the other one does not have are marked."""
    columns: tuple[list[str], list[str]] = [], []
    for one, other in zip_longest(first.split("\n"), second.split("\n"), fillvalue=""):
        parts = _PART.findall(one), _PART.findall(other)
        matcher = difflib.SequenceMatcher(None, *parts, autojunk=False)
        marked: tuple[list[str], list[str]] = [], []
        for tag, start, end, other_start, other_end in matcher.get_opcodes():
            for side, piece in enumerate((parts[0][start:end], parts[1][other_start:other_end])):
                if piece:
                    content = escape("".join(piece))
                    marked[side].append(content if tag == "equal" else f"<mark>{content}</mark>")
        for column, pieces in zip(columns, marked, strict=True):
            column.append(f'<p dir="auto">{"".join(pieces)}</p>')
    return "".join(columns[0]), "".join(columns[1])


def comparison(names: tuple[str, str], texts: tuple[str, str], notes: tuple[str, str]) -> str:
    """Translations of two models side by side.

    Args:
        names: Of the models.
        texts: Their translations.
        notes: What to say below each.
    """
    same = "Both models give the same translation."
    verdict = same if texts[0] == texts[1] else "What only one of them has is marked."
    columns = "".join(
        f'<section aria-label="{escape(name)}"><h3>{escape(name)}</h3>{marked}'
        f'<p class="vt-note">{escape(note)}</p></section>'
        for name, marked, note in zip(names, differences(*texts), notes, strict=True)
    )
    return f'<p class="vt-note">{verdict}</p><div class="vt-columns">{columns}</div>'


def attention_frame(page: str) -> str:
    """A page of attention in a frame that may run its own script and reach nothing else."""
    return (
        '<iframe class="vt-frame" title="Attention of the model, layer by layer" '
        f'sandbox="allow-scripts" srcdoc="{escape(page)}"></iframe>'
    )


def direction(content: str) -> str:
    """`rtl` if the first letter is of a script that runs from the right, else `ltr`."""
    for character in content:
        kind = unicodedata.bidirectional(character)
        if kind in ("L", "R", "AL"):
            return "ltr" if kind == "L" else "rtl"
    return "ltr"


def _omitted(lines: int) -> str:
    return message(f"{lines:,} further lines are not shown here.") if lines else ""


def progress(done: int, lines: int) -> str:
    """How many lines of a file are translated."""
    words = f"{done:,} of {lines:,} lines"
    return (
        f'<div class="vt-progress"><progress aria-label="Lines translated" value="{done}" '
        f'max="{lines}"></progress> {words}</div>'
    )
