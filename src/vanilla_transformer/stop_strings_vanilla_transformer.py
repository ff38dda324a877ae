"""Stop strings of `generate`, which are looked for in the text as it is decoded."""

import os
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation import StoppingCriteria


class StopStrings(StoppingCriteria):
    """Ends an output whose last token completes one of several strings.

    Transformers' own class looks at each token of the vocabulary separately. That fails where the
    tokenizer does not know its sample text, as of words or characters, and gives the first word of
    an output a blank that the decoded text does not have.

    Args:
        strings: Text that ends an output; it stays part of it.
        tokenizer: Of the outputs.
    """

    def __init__(self, strings: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings = strings
        self.tokenizer = tokenizer
        names = ("pad", "bos", "eos")
        self.no_text = {getattr(tokenizer, f"{name}_token_id", None) for name in names}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which outputs end, `[B]`, of ids `[B, T]`."""
        ended = [self._ends(row) for row in input_ids.tolist()]
        return torch.tensor(ended, device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        before, text = self._text(ids[:-1]), self._text(ids)
        # Bytes of a character that was incomplete may have changed the end of the text.
        old = len(os.path.commonprefix([before, text]))  # noqa: RUF071
        return any(
            (found := text.rfind(string)) >= 0 and found + len(string) > old
            for string in self.strings
        )

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode([token for token in ids if token not in self.no_text])
        return text
