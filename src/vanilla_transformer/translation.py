"""Text in, text out: translating lines with a trained model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

import vanilla_transformer  # noqa: F401  (registers the Auto classes)

# Lines that are sorted by length together; results come in order, so none waits for much more.
WINDOW_LINES = 2048


@dataclass(frozen=True)
class Translation:
    """Translation of one line.

    Attributes:
        text: Without line feeds, so that a line stays a line.
        reached_limit: The search was cut off at the longest output allowed.
    """

    text: str
    reached_limit: bool = False


class SourceLengthLimit(StoppingCriteria):
    """Ends each sentence at a limit of its own, whatever batch it is in.

    Args:
        limits: Longest output of each sentence in tokens, start token not counted, `[B]`.
    """

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each of the B * beams hypotheses `[B * beams, T]` has reached its limit."""
        beams = len(input_ids) // len(self.limits)
        return input_ids.shape[1] - 1 >= self.limits.repeat_interleave(beams)


class Translator:
    """Translates lines of text, each as if it were alone.

    Args:
        model: A sequence-to-sequence model in any dtype, on any device.
        tokenizer: Of both sides.
        num_beams: Width of the beam; None: as the model's generation config says.
        length_penalty: Exponent a in score = log-probability / length^a (Transformers'
            definition, `</s>` counted); None: as the model's generation config says.
        max_extra_tokens: Longest output beyond the tokens of its own source, section 6.1.
        max_tokens_per_batch: Source tokens of a batch, padding and beams counted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        max_extra_tokens: int = 50,
        max_tokens_per_batch: int = 8192,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        config = model.generation_config
        # A fresh model's config leaves both open; the last values are those of `generate`.
        self.num_beams = _first_given(num_beams, config.num_beams, 1)
        self.length_penalty = _first_given(length_penalty, config.length_penalty, 1.0)
        if self.num_beams == 1:
            # Greedy search knows no penalty, and `generate` would warn about one.
            self.length_penalty = 1.0
        self.max_extra_tokens = max_extra_tokens
        self.max_tokens_per_batch = max_tokens_per_batch // self.num_beams

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, *, trust_remote_code: bool = False, **settings: Any
    ) -> Self:
        """Loads model and tokenizer from a folder or the Hub, onto a GPU where there is one."""
        loading = {"trust_remote_code": trust_remote_code}
        model = AutoModelForSeq2SeqLM.from_pretrained(model_name_or_path, **loading)
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **loading)
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        return cls(model.to(device), tokenizer, **settings)

    @property
    def search(self) -> str:
        """The search in words, to stand beside a score."""
        if self.num_beams == 1:
            return "greedy"
        return f"beam {self.num_beams}, length penalty {self.length_penalty}"

    def translate(self, lines: Iterable[str]) -> Iterator[Translation]:
        """Translates lines, in order, one result a line; blank lines come back as they are."""
        lines = iter(lines)
        while window := list(islice(lines, WINDOW_LINES)):
            yield from self._translate_window(window)

    def _translate_window(self, lines: list[str]) -> list[Translation]:
        results = [Translation(line) for line in lines]
        texts = {index: line for index, line in enumerate(lines) if line.strip()}
        if not texts:
            return results
        encoded = self.tokenizer(list(texts.values()))["input_ids"]
        sources = dict(zip(texts, encoded, strict=True))
        for batch in self._batches(sources):
            translations = self._translate_batch([sources[index] for index in batch])
            for index, translation in zip(batch, translations, strict=True):
                results[index] = translation
        return results

    def _batches(self, sources: dict[int, list[int]]) -> Iterator[list[int]]:
        """Keys of sources of like length, longest first, within the budget of padded tokens."""
        batch: list[int] = []
        for index in sorted(sources, key=lambda index: len(sources[index]), reverse=True):
            if batch and (len(batch) + 1) * len(sources[batch[0]]) > self.max_tokens_per_batch:
                yield batch
                batch = []
            batch.append(index)
        yield batch

    @torch.inference_mode()
    def _translate_batch(self, sources: list[list[int]]) -> list[Translation]:
        inputs = self.tokenizer.pad({"input_ids": sources}, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        limits = inputs["attention_mask"].sum(-1) + self.max_extra_tokens
        outputs = self.model.generate(
            **inputs,
            num_beams=self.num_beams,
            length_penalty=self.length_penalty,
            # Counts the start token. A `max_new_tokens` of the model's config would overrule it.
            max_length=1 + int(limits.max()),
            max_new_tokens=None,
            stopping_criteria=[SourceLengthLimit(limits)],
        )
        texts = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        # Beam search may fill rows up with `</s>`, so one behind the limit ends nothing.
        generated = outputs[:, 1:]
        within_limit = torch.arange(generated.shape[1], device=limits.device) < limits[:, None]
        is_end = within_limit & (generated == self.tokenizer.eos_token_id)
        return [
            Translation(text.replace("\n", " "), reached_limit=not ended)
            for text, ended in zip(texts, is_end.any(-1).tolist(), strict=True)
        ]


def _first_given(*values: Any) -> Any:
    return next(value for value in values if value is not None)
