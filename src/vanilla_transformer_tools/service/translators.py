"""The languages that a service offers, and a counted translator for each kind of request."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from vanilla_transformer_tools.saved_folder import read_card_metadata, read_generation_config
from vanilla_transformer_tools.service.batcher import Part
from vanilla_transformer_tools.text.tokenizer_pair import NAMED, TokenizerPair, offered_languages
from vanilla_transformer_tools.translation.placing import Line
from vanilla_transformer_tools.translation.translator import LEAST_TOKENS, Translator

# What clients send that leave the language to the service.
AUTOMATIC = "auto"
# Each has a copy of the tokenizer if that knows languages.
_MOST_TRANSLATORS = 16
# Of one request, with sampling; beams have as many as they are wide.
_MOST_SAMPLES = 10
# Bounds of the histograms.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LINES = tuple(2**power for power in range(11))


@dataclass(frozen=True)
class ServedLanguages:
    """Each of `sources` is translated into each of `targets`.

    Attributes:
        sources: Languages to translate from.
        targets: Languages to translate into.
        has_codes: Whether the tokenizer names the languages of both sides by codes.
        has_targets: Whether the tokenizer names the target language, by a code or a tag.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    has_codes: bool = False
    has_targets: bool = False

    @classmethod
    def load(
        cls, name: str, source: str | None = None, target: str | None = None, **loading: Any
    ) -> Self:
        """Languages of a model: of its tokenizer, else the given ones, else of its card.

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
        named = read_card_metadata(name).get("language") if not (source and target) else None
        listed = named if isinstance(named, list) else [named]
        card = [one for one in listed if one and isinstance(one, str)]
        sources, targets = offered_languages(tokenizer, defaults)
        has_codes, has_targets = bool(sources), bool(targets)
        if has_targets and not has_codes:
            sources = list(dict.fromkeys([*card, *targets]))
        elif not has_targets:
            sources, targets = ([card[0]], [card[1]]) if len(card) == 2 else ([], [])
        sources, targets = [source] if source else sources, [target] if target else targets
        faults = [
            f"The {side} language of {name!r} must be known, since clients name it, got "
            f"{f'{card} in its card' if card else 'no languages in its card'}. Name it: "
            f"--{side}_language {example}."
            for side, languages, example in (("source", sources, "de"), ("target", targets, "en"))
            if not languages
        ]
        if faults:
            raise ValueError("\n".join(faults))
        return cls(tuple(sources), tuple(targets), has_codes, has_targets)

    def chosen(self, source: str, target: str) -> tuple[str | None, str | None]:
        """Source and target language for a `Translator`, from the names that a client gives.

        The source `AUTOMATIC`, which many clients send by default, is the only one that is offered.

        Raises:
            ValueError: If one of them is not offered.
        """
        if source == AUTOMATIC and len(self.sources) == 1:
            (source,) = self.sources
        faults = [
            f"`{side}` must be one of the languages of this service, {_shortened(offered)}, got "
            f"{language!r}.{' It does not detect languages.' * (language == AUTOMATIC)} See "
            "/languages."
            for side, language, offered in (
                ("source", source, self.sources),
                ("target", target, self.targets),
            )
            if language not in offered
        ]
        if faults:
            raise ValueError(" ".join(faults))
        return source if self.has_codes else None, target if self.has_targets else None

    def __str__(self) -> str:
        return f"{_shortened(self.sources)} -> {_shortened(self.targets)}"


def _shortened(languages: Sequence[str]) -> str:
    """The first ones, and their number if there are more."""
    named = ", ".join(languages[:NAMED])
    return named if len(languages) <= NAMED else f"{named} ... ({len(languages)} in all)"


class Metrics:
    """Counters of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # Memory and processor time.
        ProcessCollector(registry=self.registry)
        own: dict[str, Any] = {"namespace": "vanilla_transformer", "registry": self.registry}
        self.requests = Counter(
            "requests",
            "Requests by path and status; 499: the client closed the connection.",
            ("path", "status"),
            **own,
        )
        self.request_seconds = Histogram(
            "request_seconds",
            "Seconds from a translation request's header to its answer.",
            buckets=_SECONDS,
            **own,
        )
        self.batch_lines = Histogram(
            "batch_lines", "Lines, or pieces of long ones, of a batch.", buckets=_LINES, **own
        )
        self.batch_seconds = Histogram(
            "batch_seconds", "Seconds in which a batch was translated.", buckets=_SECONDS, **own
        )
        self.unknown_tokens = Counter(
            "unknown_tokens",
            "Unknown tokens of translations, shown as <unk> or replaced by source words.",
            **own,
        )
        self.waiting_characters = Gauge(
            "waiting_characters", "Characters of all requests that are not answered yet.", **own
        )


@dataclass(frozen=True)
class RequestKind:
    """Properties that requests must have in common to share a batch.

    Attributes:
        source: For `Translator.source_language`.
        target: For `Translator.target_language`.
        alternatives: Translations besides the best one.
    """

    source: str | None
    target: str | None
    alternatives: int


class Translators:
    """Cuts and translates for a `Batcher`; all directions share one engine.

    A result is a tuple of texts: the best translation, then the alternatives.

    Args:
        first: Translator of any direction that is offered, with the search to use.
        languages: Languages that are offered.
    """

    def __init__(self, first: Translator, languages: ServedLanguages) -> None:
        self.first = first
        self.languages = languages
        self.metrics = Metrics()
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

    def cut(self, kind: RequestKind, lines: Sequence[Line]) -> list[list[Part]]:
        """The parts of each line, cut as `Translator` cuts them, with the blanks around them."""
        return [
            [
                Part(piece, sum(max(LEAST_TOKENS, len(part.source)) for part in piece.parts))
                for piece in pieces
                if piece.parts
            ]
            for pieces in self._of(kind).cut(lines)
        ]

    def translate(self, kind: RequestKind, texts: Sequence[Line]) -> list[tuple[str, ...]]:
        """The translations of each text, best first."""
        with self.metrics.batch_seconds.time():
            best = list(self._of(kind).translate(texts))
        ranked = [one.ranked for one in best]
        self.metrics.batch_lines.observe(len(texts))
        self.metrics.unknown_tokens.inc(sum(one.unknown for row in ranked for one in row))
        return [tuple(one.text for one in row) for row in ranked]

    def _build(self, kind: RequestKind) -> Translator:
        return self.first.changed(
            search=replace(self.first.search, num_hypotheses=1 + kind.alternatives),
            source_language=kind.source,
            target_language=kind.target,
        )
