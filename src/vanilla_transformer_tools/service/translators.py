"""What the batches of a service are done with: a translator for each kind of request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from transformers import GenerationConfig

from vanilla_transformer_tools.saved_folder import read_generation_config
from vanilla_transformer_tools.service.batcher import Part
from vanilla_transformer_tools.service.languages import ServedLanguages
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation.marks import can_align, cut_marked_lines
from vanilla_transformer_tools.translation.translator import Translator

# Each has a copy of the tokenizer if that knows languages.
_MOST_TRANSLATORS = 16
# Of one request, with sampling; beams have as many as they are wide.
_MOST_SAMPLES = 10


@dataclass(frozen=True)
class RequestKind:
    """What requests must have in common to share a batch.

    Attributes:
        source: For `Translator.source_language`.
        target: For `Translator.target_language`.
        alternatives: Translations besides the best one.
    """

    source: str | None
    target: str | None
    alternatives: int


def load_languages(
    name: str, source: str | None, target: str | None, **loading: Any
) -> tuple[ServedLanguages, GenerationConfig]:
    """The languages of a model, and its generation config.

    Args:
        name: Folder or Hub name of the model.
        source: Only language to translate from; None: all that are known.
        target: Only language to translate into; None: all that are known.
        loading: Further arguments of `AutoTokenizer`.

    Raises:
        ValueError: If nothing names the languages, or the folder is damaged.
    """
    tokenizer = TokenizerPair.from_pretrained(name, **loading).source
    defaults = read_generation_config(name)
    return ServedLanguages.of(name, tokenizer, defaults, source, target), defaults


class Translators:
    """Cuts and translates for a `Batcher`; all directions share one engine.

    A result is a tuple of texts: the best translation, then the alternatives.

    Args:
        first: Translator of any direction that is offered, with the search to use.
        languages: Languages that are offered.
        defaults: Generation config of the model.
        max_tokens_per_batch: Source tokens of a batch; None: the default of `Translator`.
    """

    def __init__(
        self,
        first: Translator,
        languages: ServedLanguages,
        defaults: GenerationConfig,
        max_tokens_per_batch: int | None,
    ) -> None:
        self.first = first
        self.languages = languages
        self.defaults = defaults
        self.max_tokens_per_batch = max_tokens_per_batch
        # Unknown tokens of all translations so far.
        self.unknown = 0
        # Only the thread of the batcher calls it.
        self._of = lru_cache(_MOST_TRANSLATORS)(self._build)

    @property
    def most_alternatives(self) -> int:
        """The most that a request may ask for."""
        search = self.first.search
        most = _MOST_SAMPLES if search.do_sample else search.num_beams
        return (search.mbr_candidates or most) - 1

    def kind(self, source: str, target: str, alternatives: int) -> RequestKind:
        """The kind of a request.

        Raises:
            ValueError: If a language is not offered, or there are not that many alternatives.
        """
        if not 0 <= alternatives <= self.most_alternatives:
            raise ValueError(
                f"`alternatives` must be from 0 to {self.most_alternatives}, one less than the "
                f"search finds, got {alternatives}."
            )
        return RequestKind(*self.languages.chosen(source, target), alternatives)

    def check_html(self) -> None:
        """Refuses HTML if tags cannot follow their words.

        Raises:
            ValueError: If the engine does not show its attention, or a tokenizer is not fast.
        """
        if not can_align(self.first):
            raise ValueError("`format` html needs a service with --engine torch or auto.")

    def cut(self, kind: RequestKind, lines: Sequence[str]) -> list[list[Part]]:
        """The parts of each line, cut as `Translator` cuts them, with the blanks around them."""
        translator = self._of(kind)
        prefix = len(translator.source_prefix)
        limit = translator.max_source_length - prefix
        return [
            [Part(text, prefix + tokens) for text, tokens in pieces]
            for pieces in cut_marked_lines(
                lines,
                translator.tokenizer,
                limit,
                split_sentences=translator.split_sentences,
            )
        ]

    def translate(self, kind: RequestKind, texts: Sequence[str]) -> list[tuple[str, ...]]:
        """The translations of each text, best first."""
        results = []
        for best in self._of(kind).translate(texts):
            hypotheses = (best, *best.alternatives)
            self.unknown += sum(hypothesis.unknown for hypothesis in hypotheses)
            results.append(tuple(hypothesis.text for hypothesis in hypotheses))
        return results

    def _build(self, kind: RequestKind) -> Translator:
        first = self.first
        return Translator(
            first.engine,
            first.tokenizer,
            target_tokenizer=first.target_tokenizer,
            search=replace(first.search, num_hypotheses=1 + kind.alternatives),
            source_language=kind.source,
            target_language=kind.target,
            generation_config=self.defaults,
            max_source_length=first.max_source_length,
            split_sentences=first.split_sentences,
            max_tokens_per_batch=self.max_tokens_per_batch,
            replace_unknown=first.replace_unknown,
            protect=",".join(first.protect) or "none",
        )
