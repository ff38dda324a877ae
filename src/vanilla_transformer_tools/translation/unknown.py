"""Unknown tokens of an output: shown as `<unk>`, or replaced by the source words they stand for."""

from collections.abc import Iterable, Sequence
from itertools import chain

from transformers import PreTrainedTokenizerBase

from vanilla_transformer_tools.text.blanks import without_blank_ends
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, end_length
from vanilla_transformer_tools.translation.engines import Hypothesis, TorchEngine
from vanilla_transformer_tools.translation.results import Piece


def unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of `<unk>`; None if the tokenizer has none, or it is a token with another purpose too."""
    others = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return None if tokenizer.unk_token_id in others else tokenizer.unk_token_id


def texts_with_unknown(
    tokenizer: PreTrainedTokenizerBase, outputs: Iterable[Sequence[int]]
) -> list[str]:
    """The texts of ids as `skip_special_tokens=True` gives them, but with `<unk>`."""
    added = tokenizer.added_tokens_decoder.items()
    dropped = {*tokenizer.all_special_ids, *(one for one, token in added if token.special)}
    dropped -= {unknown_id(tokenizer)}
    kept = ([token_id for token_id in ids if token_id not in dropped] for ids in outputs)
    return [tokenizer.decode(ids) for ids in kept]


def with_source_words(
    texts: Sequence[str],
    hypotheses: Sequence[Hypothesis],
    pieces: Sequence[Piece],
    tokenizers: TokenizerPair,
    engine: TorchEngine,
) -> list[str]:
    """Texts in which each `<unk>` is the text of the source token with most attention.

    Args:
        texts: Texts of the hypotheses, as `texts_with_unknown` gives them.
        hypotheses: Outputs.
        pieces: Source of each.
        tokenizers: Fast ones.
        engine: Engine that reads those with unknown tokens again.
    """
    unknown, replaced = unknown_id(tokenizers.target), list(texts)
    numbers = [number for number, one in enumerate(hypotheses) if unknown in one.tokens]
    if not numbers:
        return replaced
    passes = engine.force(
        [pieces[number].source for number in numbers],
        [hypotheses[number].ended for number in numbers],
        align=True,
        end_length=end_length(tokenizers.source),
    )
    for number, forced in zip(numbers, passes, strict=True):
        source = without_blank_ends(pieces[number].text)
        encoded = tokenizers.source(source, return_offsets_mapping=True, verbose=False)
        # The first ones are of the tag.
        offsets = [(0, 0)] * len(tokenizers.source_prefix) + encoded["offset_mapping"]
        words = [
            source[slice(*offsets[position])] or tokenizers.target.unk_token
            for position, token in zip(forced.alignment, hypotheses[number].tokens, strict=False)
            if token == unknown
        ]
        first, *others = texts[number].split(tokenizers.target.unk_token)
        # Text that spells `<unk>` itself stays as it is.
        if len(others) == len(words):
            replaced[number] = first + "".join(chain.from_iterable(zip(words, others, strict=True)))
    return replaced
