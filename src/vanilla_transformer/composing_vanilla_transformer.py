"""A tokenizer that splits accents and syllables from letters, and composes them in its output."""

import unicodedata
from typing import Any

from transformers import PreTrainedTokenizerFast

DECOMPOSED_FORMS = ("NFD", "NFKD")


class ComposingTokenizer(PreTrainedTokenizerFast):
    """Fast tokenizer that decodes to NFC if its text was decomposed on the way in.

    The normalizer of `tokenizer.json` takes the text apart; the library has no decoder that puts it
    together. So this file travels with such a tokenizer, and only with one: a folder of any other
    loads as the plain fast tokenizer.
    """

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        text: str = super()._decode(*args, **kwargs)
        if self.init_kwargs.get("unicode_form") in DECOMPOSED_FORMS:
            text = unicodedata.normalize("NFC", text)
        return text
