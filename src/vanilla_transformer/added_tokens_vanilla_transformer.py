"""Tokens that users add to a trained tokenizer: found in text, without a change to the text.

The library looks for added tokens before it splits text. That cannot serve special ones: where it
finds these, it finds `</s>` in text too. So they become part of the model's vocabulary, and the
pre-tokenizer keeps them whole, in the saved tokenizer.json as well. A word that a `word` tokenizer
gets is part of its vocabulary too: nothing else is found between blanks only.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

# Around the alternative for a whole symbol, in front of a pattern; escaped symbols contain neither.
_WHOLE, _END_OF_WHOLE = r"\A(?:", r")\z|"


def check_added(contents: Iterable[str], backend: Tokenizer) -> None:
    """Rejects tokens that could not be found, or not be distinguished from other text.

    Raises:
        ValueError: If text is normalized on its way in so that a token never occurs, or a token of
            a `word` tokenizer has a blank.
    """
    normalizer = backend.normalizer
    for content in contents:
        read = normalizer.normalize_str(content) if normalizer else content
        if read != content:
            raise ValueError(
                "An added token must be text that the tokenizer's normalizer leaves as it is, got "
                f"{content!r}, which it reads as {read!r}. A token cannot begin with a blank, and "
                "with a Unicode form it is written in that form."
            )
        if is_of_words(backend) and " " in content:
            raise ValueError(
                f"A token of a `word` tokenizer must be a word without blanks, got {content!r}."
            )


def is_of_words(backend: Tokenizer) -> bool:
    """Whether a token is the text between two blanks."""
    step = backend.pre_tokenizer
    return bool(step) and _splits_at_blanks(json.loads(step.__getstate__()))


def with_symbols(backend: Tokenizer, new: dict[str, int], old: Iterable[str]) -> Tokenizer:
    """A tokenizer whose model knows further symbols, which text may spell and nothing splits.

    Args:
        backend: As `VanillaTransformerTokenizer.train` makes it.
        new: Symbols with their ids, which follow each other.
        old: Symbols that were given earlier.
    """
    pipeline: dict[str, Any] = json.loads(backend.to_str())
    _extend_model(pipeline["model"], new, pipeline["added_tokens"])
    steps = pipeline["pre_tokenizer"]
    if not _splits_at_blanks(steps):
        if steps["type"] != "Sequence":
            steps = {"type": "Sequence", "pretokenizers": [steps]}
        steps["pretokenizers"] = _keeping(steps["pretokenizers"], list(old), list(new))
        pipeline["pre_tokenizer"] = steps
    changed = Tokenizer.from_str(json.dumps(pipeline))
    changed.encode_special_tokens = backend.encode_special_tokens
    return changed


def without_symbols(
    lines: Iterable[str], symbols: Sequence[str], *, between_blanks: bool
) -> Iterator[str]:
    """Lines with a blank for each symbol, for learning the pieces of the text around it.

    Args:
        lines: Text.
        symbols: Symbols that are never split.
        between_blanks: Whether they are symbols between blanks only, as words are.
    """
    pattern = _any_of(list(symbols))
    found = re.compile(f"(?<![^ ])(?:{pattern})(?![^ ])" if between_blanks else pattern)
    return (found.sub(" ", line) for line in lines)


def found_everywhere(token: str | AddedToken) -> AddedToken:
    """A token for which the library looks in text as the normalizer has left it.

    Only so does the normalizer see the whole text, and knows where it begins.
    """
    if isinstance(token, str):
        return AddedToken(token, normalized=True)
    sides = {side: getattr(token, side) for side in ("single_word", "lstrip", "rstrip")}
    return AddedToken(token.content, normalized=True, special=False, **sides)


def _extend_model(model: dict[str, Any], new: dict[str, int], added: list[dict[str, Any]]) -> None:
    # The library numbers added tokens after those of the model, so no id below may be missing. What
    # was added earlier is found before the model sees a text, or is split off from its `<`.
    earlier = {token["content"]: token["id"] for token in added}
    entries = sorted((earlier | new).items(), key=lambda entry: entry[1])
    if model["type"] == "Unigram":
        # A place in the list is an id; no piece has a higher score.
        model["vocab"] += [[token, 0.0] for token, place in entries if place >= len(model["vocab"])]
        for place in new.values():
            model["vocab"][place][1] = 0.0
        return
    model["vocab"] |= dict(entries)
    if model["type"] == "BPE":
        # A symbol has no merges.
        model["ignore_merges"] = True


def _keeping(steps: list[dict[str, Any]], old: list[str], new: list[str]) -> list[dict[str, Any]]:
    """Steps that split off symbols first, and split none of them again."""
    place = int(steps[0]["type"] == "Metaspace")
    first, splits = steps[:place], steps[place:]
    if any(split["pattern"]["Regex"].startswith(_WHOLE) for split in splits):
        splits = splits[1:]
    for split in splits:
        pattern = split["pattern"]["Regex"]
        if pattern.startswith(_WHOLE):
            pattern = pattern.partition(_END_OF_WHOLE)[2]
        split["pattern"] = {"Regex": f"{_WHOLE}{_any_of([*old, *new])}{_END_OF_WHOLE}{pattern}"}
    isolating = {
        "type": "Split",
        "pattern": {"Regex": _any_of([*old, *new])},
        "behavior": "Isolated",
        "invert": False,
    }
    return [*first, isolating, *splits]


def _any_of(symbols: list[str]) -> str:
    """Pattern that takes the longest symbol of those that begin at one place."""
    return "|".join(map(re.escape, sorted(symbols, key=lambda symbol: (-len(symbol), symbol))))


def _splits_at_blanks(step: dict[str, Any]) -> bool:
    return step["type"] == "Split" and step["behavior"] == "Removed"
