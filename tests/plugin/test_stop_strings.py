"""Stop strings: an output ends with the token that completes one."""

from typing import get_args

import pytest
import torch
from transformers import LogitsProcessor

from vanilla_transformer.tokenization_vanilla_transformer import (
    TokenizerKind,
    VanillaTransformerTokenizer,
)

from ..conftest import build_variant

TEXT = "zwei drei vier, zwei drei."


class Dictated(LogitsProcessor):
    """Lets the model write given ids, in all beams."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.ids[input_ids.shape[1] - 1]] = 0.0
        return forced


@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_output_ends_with_the_token_that_completes_a_stop_string(kind):
    tokenizer = VanillaTransformerTokenizer.train([TEXT] * 3, vocab_size=300, kind=kind)
    model = build_variant(vocab_size=len(tokenizer))
    for stop, written, num_beams in (
        ("drei", "zwei drei", 2),
        (" zwei", "zwei drei vier, zwei", 1),
        ("ei vier", "zwei drei vier", 1),
        (["fünf", "vier"], "zwei drei vier", 1),
        ("fünf", TEXT, 1),
    ):
        found = model.generate(
            **tokenizer(["zwei"], return_tensors="pt"),
            logits_processor=[Dictated(tokenizer(TEXT).input_ids)],
            num_beams=num_beams,
            stop_strings=stop,
            tokenizer=tokenizer,
            max_new_tokens=50,
        )

        text = tokenizer.decode(found[0], skip_special_tokens=True)
        # A word has its comma.
        assert text in (written, f"{written},")


def test_stop_string_without_a_tokenizer_is_refused(tiny_model, batch):
    with pytest.raises(ValueError, match="`tokenizer` argument of `generate`"):
        tiny_model.generate(batch["input_ids"], stop_strings="x")
