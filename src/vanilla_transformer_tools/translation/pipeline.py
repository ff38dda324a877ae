"""Transformers' interface: importing this module registers `pipeline("vanilla-translation")`."""

from collections.abc import Iterable, Iterator
from typing import Any

from transformers import AutoModelForSeq2SeqLM, Pipeline, PreTrainedModel
from transformers.pipelines import PIPELINE_REGISTRY

from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation.loading import in_our_layers, training_defaults
from vanilla_transformer_tools.translation.results import Translation
from vanilla_transformer_tools.translation.translator import Translator


class TranslationPipeline(Pipeline):
    """`pipeline("vanilla-translation", model=...)`: lines to a list of `translation_text`.

    Settings of `Translator` may be given when it is made or when it is called.
    """

    model: PreTrainedModel

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        name = self.model.name_or_path
        self.defaults = training_defaults(name) if name else {}
        tokenizers = TokenizerPair.of_model(self.model, self.tokenizer)
        self.defaults["target_tokenizer"] = tokenizers.target
        self.model = in_our_layers(self.model)

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
            batch_size: Ignored; `max_tokens_per_batch` is the size of a batch.
            num_workers: Ignored.
            settings: Settings of `Translator`.
        """
        settings = {**self._forward_params, **settings}
        return self.postprocess(self._forward(self.preprocess(inputs), **settings))

    def _sanitize_parameters(self, **settings: Any) -> tuple[dict[str, Any], ...]:
        return {}, settings, {}

    def preprocess(self, input_: str | Iterable[str], **_: Any) -> Iterable[str]:
        """A string is one line."""
        return [input_] if isinstance(input_, str) else input_

    def _forward(self, input_tensors: Iterable[str], **settings: Any) -> Iterator[Translation]:
        given = {name: value for name, value in settings.items() if value is not None}
        translator = Translator(self.model, self.tokenizer, **self.defaults | given)
        return translator.translate(input_tensors)

    def postprocess(self, model_outputs: Iterator[Translation], **_: Any) -> list[dict[str, str]]:
        """The texts as Transformers' former translation pipeline gave them."""
        return [{"translation_text": translation.text} for translation in model_outputs]


PIPELINE_REGISTRY.register_pipeline(
    "vanilla-translation",
    pipeline_class=TranslationPipeline,
    pt_model=AutoModelForSeq2SeqLM,
    type="text",
)
