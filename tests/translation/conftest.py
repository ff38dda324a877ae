"""Fixtures of the tests of translation."""

import pytest

from vanilla_transformer_tools.translation import Translator


@pytest.fixture
def build(tiny_model, tokenizer):
    """Makes a Translator of the tiny model with short limits."""
    return lambda **settings: Translator(
        tiny_model, tokenizer, **{"max_extra_tokens": 4, **settings}
    )
