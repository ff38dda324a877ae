"""The tokenizers of a model's two sides, one for both or one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import CONFIG_NAME

from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.files import naming_full_disk
from vanilla_transformer_tools.saved_folder import (
    TARGET_FILES,
    TARGET_FOLDER,
    find_file,
    load_tokenizer,
    read_object,
)
from vanilla_transformer_tools.text.languages import (
    choose_languages,
    language_codes,
    language_prefix,
)

# A config has one id of each for both sides.
_COMMON_TOKENS = ("pad_token", "bos_token", "eos_token")


@dataclass(frozen=True)
class TokenizerPair:
    """Tokenizers of source and target; one tokenizer twice if both share a vocabulary.

    Attributes:
        source: Tokenizer of the input; has the tags of target languages.
        target: Tokenizer of the output, and of prefixes that it must begin with.
        source_prefix: Ids before the ids of each source, see `between`.
        first_token: Id that each output begins with; None if the model chooses.
        start_token: Id that the decoder reads first; None: the model's.

    Raises:
        ValueError: If `<pad>`, `<s>` or `</s>` have another id on the other side, or a tokenizer
            of NLLB puts codes after the text.
    """

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase
    source_prefix: tuple[int, ...] = ()
    first_token: int | None = None
    start_token: int | None = None

    def __post_init__(self) -> None:
        if getattr(self.source, "legacy_behaviour", False):
            # NLLB was trained with the code first, and outputs begin with theirs in either case, so
            # labels of this tokenizer teach something else than generation does.
            raise ValueError(
                f"The tokenizer must put the code of a language before the text, got "
                f"{type(self.source).__name__} with `legacy_behaviour` true, which puts it after "
                "the text. Set `legacy_behaviour` to false in tokenizer_config.json."
            )
        faults = [
            f"{getattr(self.source, name)} is {ids[0]} and {ids[1]}"
            for name in _COMMON_TOKENS
            for ids in [[getattr(side, f"{name}_id") for side in (self.source, self.target)]]
            if ids[0] != ids[1]
        ]
        if faults:
            raise ValueError(
                "The tokenizers of source and target must give special tokens the same ids, got: "
                f"{', '.join(faults)}. Train both with `VanillaTransformerTokenizer.train`."
            )

    @classmethod
    def joint(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """One tokenizer for both sides."""
        return cls(tokenizer, tokenizer)

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, config: dict[str, Any] | None = None, **loading: Any
    ) -> Self:
        """The tokenizers of a saved model, from its folder or the Hub.

        Args:
            model_name_or_path: As for `AutoTokenizer`.
            config: Fields of the config of a model that is made for these tokenizers; those that
                it lacks are not compared. None: the saved model's.
            loading: Further arguments of `AutoTokenizer`.

        Raises:
            ValueError: If a folder holds no tokenizer or a damaged file, or the model's config has
                a vocabulary of the target and its tokenizer is missing.
            OSError: If there is neither a folder nor a model on the Hub of this name.
        """
        if config is None:
            folder = Path(model_name_or_path)
            if folder.is_dir() and not (folder / TOKENIZER_CONFIG_FILE).exists():
                last = get_last_checkpoint(folder)
                hint = f" Its training has not finished; {last!r} is a model." if last else ""
                if (folder / CONFIG_NAME).exists():
                    hint = " It has no tokenizer; `tokenizer.save_pretrained` writes one into it."
                raise ValueError(
                    f"{model_name_or_path!r} must be the folder of a saved model, got no "
                    f"{TOKENIZER_CONFIG_FILE} in it.{hint}"
                )
            # Tokenizers may be saved without a model.
            file = find_file(model_name_or_path, CONFIG_NAME, loading.get("revision"))
            config = read_object(file) if file else {}
        source = load_tokenizer(model_name_or_path, **loading)
        pair = cls._beside(source, config, model_name_or_path, **loading)
        pair._check_config(config, model_name_or_path)
        return pair

    @classmethod
    def of_model(cls, model: PreTrainedModel, source: PreTrainedTokenizerBase) -> Self:
        """The tokenizers of a loaded model, whose folder has the target's if there is one."""
        config = model.config
        revision = getattr(config, "_commit_hash", None)
        return cls._beside(source, config.to_dict(), model.name_or_path, revision=revision)

    @classmethod
    def _beside(
        cls, source: PreTrainedTokenizerBase, config: dict[str, Any], name: str, **loading: Any
    ) -> Self:
        file, _ = TARGET_FILES
        if name and find_file(name, file, loading.get("revision")):
            target = load_tokenizer(name, subfolder=TARGET_FOLDER, **loading)
            return cls(source, target)
        if has_target_vocabulary(config) and not knows_both_sides(source):
            raise ValueError(
                f"{name!r} must hold the tokenizer of its target, for which its config has a "
                f"`decoder_vocab_size` of {config['decoder_vocab_size']}, got no {file}. Copy the "
                f"whole folder of the model, or save that tokenizer into its {TARGET_FOLDER}/."
            )
        return cls.joint(source)

    def _check_config(self, config: dict[str, Any], name: str) -> None:
        """Rejects tokenizers of other sizes or special ids than the config, where it has any."""
        sizes = {
            "source": (self.source, config.get("vocab_size")),
            "target": (self.target, config.get("decoder_vocab_size") or config.get("vocab_size")),
        }
        faults = []
        for side, (tokenizer, size) in sizes.items():
            is_ours = isinstance(tokenizer, VanillaTransformerTokenizer)
            entries = len(tokenizer) if is_ours else 1 + max(tokens_by_id(tokenizer, side))
            # Tables of others have rows to spare; ours never have.
            if size is not None and (entries > size or (entries < size and is_ours)):
                faults.append(f"{entries:,} entries of the {side} for a table of {size:,}")
        for token in _COMMON_TOKENS:
            token_id, expected = getattr(self.source, f"{token}_id"), config.get(f"{token}_id")
            if token_id is None and token == "eos_token":
                # FSMT's tokenizer calls its `</s>` a separator.
                token_id = getattr(self.source, "sep_token_id", None)
            # Marian's tokenizer has no `<s>`.
            lacks_bos = token == "bos_token" and token_id is None
            allowed = expected if isinstance(expected, list) else [expected]
            if expected is not None and token_id not in allowed and not lacks_bos:
                faults.append(f"{token} {token_id} for {expected}")
        if faults:
            raise ValueError(
                f"The tokenizer of {name!r} is not the one of its model, got {'; '.join(faults)}. "
                "Copy the whole folder of the model again; after adding tokens call "
                "`model.resize_token_embeddings(len(tokenizer))` and save both."
            )

    @property
    def is_joint(self) -> bool:
        """Whether both sides have one tokenizer."""
        return self.source is self.target

    @property
    def contents(self) -> tuple[str, ...]:
        """Everything that determines ids, for comparing pairs."""
        sides = [self.source] if self.is_joint else [self.source, self.target]
        return tuple(_content(side) for side in sides)

    def between(
        self, source_language: str | None, target_language: str | None, defaults: GenerationConfig
    ) -> Self:
        """These tokenizers, set up for one direction: by codes as `choose_languages`, or by a tag.

        Raises:
            ValueError: If a language is unknown, missing, or given to a model without languages.
        """
        if not language_codes(self.source):
            if source_language is not None:
                raise ValueError(
                    f"The model takes no source language, got {source_language!r}. Leave "
                    "--source_language out."
                )
            prefix = language_prefix(self.source, target_language)
            return type(self)(self.source, self.target, tuple(prefix))
        source, code = choose_languages(self.source, source_language, target_language, defaults)
        target = source if self.is_joint else self.target
        # mBART and PLBart end a target with its code, which the decoder reads first.
        if source(text_target="")["input_ids"][-1] == code:
            return type(self)(source, target, start_token=code)
        return type(self)(source, target, first_token=code)

    def check_tags(self, name: str) -> None:
        """Rejects tokenizers whose codes name the languages of both sides, for pairs with tags.

        A tag names the language of the target alone. Errors call the model by `name`.
        """
        if language_codes(self.source):
            raise ValueError(
                "--tag_column needs a model with tags of languages before its sources, got "
                f"{type(self.source).__name__} in {name!r}, which names the languages of both "
                "sides. Train one direction at a time, with --source_language and "
                "--target_language."
            )

    def save_pretrained(self, folder: Path) -> None:
        """Writes what `from_pretrained` reads."""
        with naming_full_disk(folder, "the tokenizer"):
            self.source.save_pretrained(folder)
        self.save_target(folder)

    def save_target(self, folder: Path) -> None:
        """Writes the target's tokenizer, if it has one of its own, into the folder of a model."""
        if not self.is_joint:
            with naming_full_disk(folder, "the tokenizer"):
                self.target.save_pretrained(folder / TARGET_FOLDER)


def has_target_vocabulary(config: dict[str, Any]) -> bool:
    """Whether a config gives the target a vocabulary of its own.

    Separate tables are not enough: both may have the same vocabulary.
    """
    is_shared = config.get("share_encoder_decoder_embeddings", True)
    return not is_shared and config.get("decoder_vocab_size") is not None


def knows_both_sides(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether one tokenizer has two vocabularies, as Marian's and FSMT's may."""
    return hasattr(tokenizer, "target_encoder") or hasattr(tokenizer, "tgt_vocab_size")


def tokens_by_id(tokenizer: PreTrainedTokenizerBase, side: str) -> dict[int, str]:
    """The tokens of one side, `source` or `target`."""
    if knows_both_sides(tokenizer):
        # Both classes name them so; one that has no second vocabulary decodes what it encodes.
        if side == "target":
            return dict(tokenizer.decoder)
        return {token_id: token for token, token_id in tokenizer.encoder.items()}
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    # M2M100 does not count them.
    codes = language_codes(tokenizer).values()
    return tokens | {token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in codes}


def speller(
    tokenizer: PreTrainedTokenizerBase, side: str
) -> Callable[[Sequence[int]], Sequence[str]]:
    """A function from ids of one side, `source` or `target`, to their tokens."""
    if side == "source" and knows_both_sides(tokenizer):
        # Their own function knows the target alone.
        tokens = tokens_by_id(tokenizer, side)
        return lambda ids: [tokens.get(token_id, tokenizer.unk_token) for token_id in ids]
    return lambda ids: tokenizer.convert_ids_to_tokens(list(ids))


def unknown_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of `<unk>`; None if the tokenizer has none, or it is a token with another purpose too."""
    others = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return None if tokenizer.unk_token_id in others else tokenizer.unk_token_id


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids as `skip_special_tokens=True` gives it, but with `<unk>`."""
    added = tokenizer.added_tokens_decoder.items()
    dropped = {*tokenizer.all_special_ids, *(one for one, token in added if token.special)}
    dropped -= {unknown_id(tokenizer)}
    text: str = tokenizer.decode([token for token in ids if token not in dropped])
    return text


def _content(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that determines ids, or its checksum."""
    if tokenizer.is_fast:
        text: str = tokenizer.backend_tokenizer.to_str()
        return text
    with TemporaryDirectory() as folder:
        files = map(Path, tokenizer.save_vocabulary(folder))
        digest = sha256(b"".join(file.read_bytes() for file in sorted(files)))
    digest.update(repr(sorted(tokenizer.get_added_vocab().items())).encode())
    return digest.hexdigest()
