"""Sources for comparing an export with its model."""

import random

from transformers import PreTrainedTokenizerBase

from vanilla_transformer_tools.text.tokenizer_pair import language_codes, tokens_by_id


def random_sources(tokenizer: PreTrainedTokenizerBase, lines: int, longest: int) -> list[list[int]]:
    """Ids with `</s>` of lines of random tokens, always the same.

    Args:
        tokenizer: Tokenizer of the source.
        lines: Number of lines.
        longest: Most tokens of a line, `</s>` not counted.
    """
    draw = random.Random(0)
    others = {*tokenizer.all_special_ids, *language_codes(tokenizer).values()}
    ordinary = sorted(tokens_by_id(tokenizer, "source").keys() - others)
    *_, end = tokenizer("")["input_ids"]
    return [[*draw.choices(ordinary, k=draw.randint(1, longest)), end] for _ in range(lines)]
