"""Transformers' interface: importing this module registers `pipeline("vanilla-translation")`."""

from collections.abc import Iterable, Iterator
from typing import Any

from transformers import AutoModelForSeq2SeqLM, Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation.results import Translation
from vanilla_transformer_tools.translation.translator import (
    Translator,
    trained_on_sentences,
    training_length,
)


class TranslationPipeline(Pipeline):
    """`pipeline("vanilla-translation", model=...)`: lines to a list of `translation_text`.

    Settings of `Translator` may be given when it is made or when it is called.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.tokenizers = TokenizerPair.of_model(self.model, self.tokenizer)
        name = self.model.name_or_path
        self.max_source_length = training_length(name) if name else None
        self.split_sentences = trained_on_sentences(name) if name else None

    def __call__(
        self,
        inputs: str | Iterable[str],
        *,
        batch_size: int | None = None,
        num_workers: int | None = None,
        **settings: Any,
    ) -> list[dict[str, str]]:
        """One dict for each line, as Transformers' former translation pipeline gave them.

        Args:
            inputs: A line, or several.
            batch_size: Of other pipelines; here `max_tokens_per_batch` is the size of a batch.
            num_workers: Of other pipelines.
            settings: See the class.
        """
        settings = {**self._forward_params, **settings}
        return self.postprocess(self._forward(self.preprocess(inputs), **settings))

    def _sanitize_parameters(self, **settings: Any) -> tuple[dict[str, Any], ...]:
        return {}, settings, {}

    def preprocess(self, input_: str | Iterable[str], **_: Any) -> Iterable[str]:
        """A string is one line."""
        return [input_] if isinstance(input_, str) else input_

    def _forward(self, input_tensors: Iterable[str], **settings: Any) -> Iterator[Translation]:
        settings["target_tokenizer"] = self.tokenizers.target
        if settings.get("max_source_length") is None:
            settings["max_source_length"] = self.max_source_length
        settings.setdefault("split_sentences", self.split_sentences)
        return Translator(self.model, self.tokenizer, **settings).translate(input_tensors)

    def postprocess(self, model_outputs: Iterator[Translation], **_: Any) -> list[dict[str, str]]:
        """The texts in the form of Transformers' former translation pipeline."""
        return [{"translation_text": translation.text} for translation in model_outputs]


PIPELINE_REGISTRY.register_pipeline(
    "vanilla-translation",
    pipeline_class=TranslationPipeline,
    pt_model=AutoModelForSeq2SeqLM,
    type="text",
)
