"""The languages that a service offers, as its clients name them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from vanilla_transformer_tools.saved_folder import read_card_metadata, read_generation_config
from vanilla_transformer_tools.text.languages import NAMED, offered_languages
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# What clients send that leave the language to the service.
AUTOMATIC = "auto"


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
        card = [] if source and target else _card_languages(name)
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


def _card_languages(name: str) -> list[str]:
    """Languages in the metadata of a model card."""
    languages = read_card_metadata(name).get("language")
    languages = languages if isinstance(languages, list) else [languages]
    return [language for language in languages if language and isinstance(language, str)]


def _shortened(languages: Sequence[str]) -> str:
    """The first ones, and their number if there are more."""
    named = ", ".join(languages[:NAMED])
    return named if len(languages) <= NAMED else f"{named} ... ({len(languages)} in all)"
