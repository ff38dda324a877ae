"""Which words of a line the tokens of its text belong to, and which have none of their own."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice, repeat

from transformers import PreTrainedTokenizerBase

# Strings that a message names.
_NAMED = 5
_LINES_AT_A_TIME = 1000


def units_of_tokens(
    offsets: Iterable[tuple[int, int]], text: str, units: str | None = None
) -> list[set[int]]:
    """Numbers of the units whose characters each token has; none for blanks and `</s>`.

    Offsets are beginning and end of each token in the text. `units` is the text with blanks between
    the units; None: its words are separated by blanks.

    Raises:
        ValueError: If the units spell a different text.
    """
    words = (text if units is None else units).split()
    if "".join(words) != "".join(text.split()):
        raise ValueError(
            f"Units must spell their line, apart from blanks: expected {text!r}, got {units!r}."
        )
    numbers = chain.from_iterable([number] * len(word) for number, word in enumerate(words))
    units_of = [None if character.isspace() else next(numbers) for character in text]
    return [{one for one in units_of[start:end] if one is not None} for start, end in offsets]


def unknown_strings(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], argument: str = "text"
) -> Counter[str]:
    """Strings in `texts` that become `<unk>`, with the number of times each occurs.

    A slow tokenizer, which knows no places in a text, gives whole words. `text_target` as its
    argument makes the texts those of a target.
    """
    counts: Counter[str] = Counter()
    remaining = iter(texts)
    options = {"add_special_tokens": False, "verbose": False}
    while chunk := list(islice(remaining, _LINES_AT_A_TIME)):
        if not tokenizer.is_fast:
            chunk = [word for text in chunk for word in text.split()]
        options["return_offsets_mapping"] = tokenizer.is_fast
        encoded = tokenizer(**{argument: chunk}, **options)
        places = encoded.get("offset_mapping") or repeat(repeat((0, None)))
        for text, ids, spans in zip(chunk, encoded["input_ids"], places, strict=False):
            tokens = zip(ids, spans, strict=False)
            unknown = {span for one, span in tokens if one == tokenizer.unk_token_id}
            counts.update(text[start:end] for start, end in sorted(unknown))
    return counts


def most_frequent(counts: Counter[str]) -> str:
    """The strings that occur most often, each with its number, in words."""
    named = ", ".join(f"{string!r} ({n:,})" for string, n in counts.most_common(_NAMED))
    return named + ", ..." * (len(counts) > _NAMED)
