"""The tokenizers of a model's two sides, one for both or one for each, and their languages.

Tokenizers name languages in two ways. A *tag* such as our `<2de>` or Marian's `>>deu<<` names the
target language and comes before the source. *Codes*, those of NLLB, M2M100, mBART and PLBart, name
the language of each side: the tokenizer puts them next to its text, and outputs begin with one.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import CONFIG_NAME

from vanilla_transformer.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
    language_tags,
)
from vanilla_transformer_tools.files import naming_full_disk
from vanilla_transformer_tools.saved_folder import (
    TARGET_FILES,
    TARGET_FOLDER,
    find_file,
    load_tokenizer,
    read_object,
)

# A config has one id of each for both sides.
_COMMON_TOKENS = ("pad_token", "bos_token", "eos_token")
_MARIAN_TAG = re.compile(r">>.+<<")
# Languages that a message names.
NAMED = 8


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
        refuse_legacy_codes(self.source)
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
        """The tokenizers of a loaded model, whose folder has the target's if there is one.

        Args:
            model: From `from_pretrained`.
            source: From the root of its folder.

        Raises:
            ValueError: As `from_pretrained` does.
        """
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
        faults = [
            f"{entries:,} entries of the {side} for a table of {size:,}"
            for side, (tokenizer, size) in sizes.items()
            for entries in [_entries(tokenizer, side)]
            # Tables of others have rows to spare; ours never have.
            if size is not None
            and (
                entries > size
                or (entries < size and isinstance(tokenizer, VanillaTransformerTokenizer))
            )
        ]
        faults += [
            f"{token} {token_id} for {expected}"
            for token in _COMMON_TOKENS
            for token_id, expected in [(_id_of(self.source, token), config.get(f"{token}_id"))]
            # Marian's tokenizer has no `<s>`.
            if expected is not None
            and token_id not in (expected if isinstance(expected, list) else [expected])
            and not (token == "bos_token" and token_id is None)
        ]
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
        """These tokenizers, set up for one direction.

        Args:
            source_language: See `choose_languages`; None for a model without codes.
            target_language: See `choose_languages`, or for a model with tags the name of one.
            defaults: The model's generation config.

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
        """Rejects the tokenizers of a model for pairs that have a tag of their language each.

        Args:
            name: Folder or Hub name of the model, for the error.

        Raises:
            ValueError: If they name the languages of both sides by codes.
        """
        if language_codes(self.source):
            raise ValueError(
                "--tag_column needs a model with tags of languages before its sources, got "
                f"{type(self.source).__name__} in {name!r}, which names the languages of both "
                "sides. Train one direction at a time, with --source_language and "
                "--target_language."
            )

    def save_pretrained(self, folder: Path) -> None:
        """Writes what `from_pretrained` reads.

        Raises:
            OSError: If the disk is full.
        """
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


def _id_of(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    """Id of a special token, such as `eos_token`."""
    token_id: int | None = getattr(tokenizer, f"{token}_id")
    if token_id is None and token == "eos_token":
        # FSMT's tokenizer calls its `</s>` a separator.
        token_id = getattr(tokenizer, "sep_token_id", None)
    return token_id


def _entries(tokenizer: PreTrainedTokenizerBase, side: str) -> int:
    """Rows that a table for this tokenizer needs."""
    if isinstance(tokenizer, VanillaTransformerTokenizer):
        return len(tokenizer)
    return 1 + max(tokens_by_id(tokenizer, side))


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


def language_codes(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the codes by which a tokenizer names the language of each side; none for most."""
    if not hasattr(tokenizer, "set_src_lang_special_tokens"):
        return {}
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if codes is None:
        named = {
            getattr(tokenizer, f"{name}_token", None)
            for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
        }
        codes = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in named
        }
    # Those of PLBart are written __java__.
    return {
        code.strip("_"): token_id
        for code, token_id in codes.items()
        if token_id != tokenizer.unk_token_id
    }


def offered_languages(
    tokenizer: PreTrainedTokenizerBase, defaults: GenerationConfig
) -> tuple[list[str], list[str]]:
    """Languages of sources and of targets that a model lets its user choose from.

    Models with tags let nobody choose the language of a source, most others neither language.

    Args:
        tokenizer: Of the sources, before any language is chosen.
        defaults: Of the model.
    """
    if codes := language_codes(tokenizer):
        # What the decoder of mBART and PLBart reads first is the one language that they write.
        start = defaults.decoder_start_token_id
        starts = [code for code, token_id in codes.items() if token_id == start]
        return list(codes), starts or list(codes)
    return [], list(target_tags(tokenizer))


def refuse_legacy_codes(tokenizer: PreTrainedTokenizerBase) -> None:
    """Rejects NLLB's tokenizer as old releases of Transformers had it, with codes after the text.

    NLLB was trained with the code first, and outputs begin with theirs in either case, so labels of
    this tokenizer teach something else than generation does.

    Raises:
        ValueError: If it is such a tokenizer.
    """
    if getattr(tokenizer, "legacy_behaviour", False):
        raise ValueError(
            f"The tokenizer must put the code of a language before the text, got "
            f"{type(tokenizer).__name__} with `legacy_behaviour` true, which puts it after the "
            "text. Set `legacy_behaviour` to false in tokenizer_config.json."
        )


def choose_languages(
    tokenizer: PreTrainedTokenizerBase,
    source: str | None,
    target: str | None,
    defaults: GenerationConfig,
) -> tuple[PreTrainedTokenizerBase, int]:
    """Sets up a copy of a tokenizer with codes for one direction.

    Args:
        tokenizer: Tokenizer of the source, and of the target.
        source: Language of the sources; None: the saved one, if the tokenizer has both.
        target: Language of the outputs; None: the one that `defaults` begin an output with, or else
            the one with which the tokenizer was saved.
        defaults: The model's generation config.

    Returns:
        The copy, which puts the codes of both languages next to their text, and the id of the
        target's code.

    Raises:
        ValueError: If a language is unknown or missing.
    """
    codes = language_codes(tokenizer)
    begins_with = {defaults.forced_bos_token_id, defaults.decoder_start_token_id}
    if target is None:
        named = [code for code, token_id in codes.items() if token_id in begins_with]
        target = named[0] if named else _saved(tokenizer, "tgt_lang")
    # Classes save English for a source language that nobody chose.
    if source is None and _saved(tokenizer, "tgt_lang"):
        source = _saved(tokenizer, "src_lang")
    faults = [
        f"The {side} language must be one that the tokenizer knows, such as "
        f"{', '.join(_some(codes, language))} ({len(codes)} in all), got {language!r}. Name it: "
        f"--{side}_language."
        for side, language in (("source", source), ("target", target))
        if language not in codes
    ]
    if faults:
        raise ValueError("\n".join(faults))
    code = codes[str(target)]
    tokenizer = copy.deepcopy(tokenizer)
    if not hasattr(tokenizer, "lang_code_to_id"):
        # The class of NLLB takes tokens, which for M2M100 are written __de__.
        source, target = tokenizer.convert_ids_to_tokens([codes[str(source)], code])
    # Also where it is saved, so that the folder keeps its languages.
    tokenizer.src_lang = tokenizer.init_kwargs["src_lang"] = source
    tokenizer.tgt_lang = tokenizer.init_kwargs["tgt_lang"] = target
    return tokenizer, code


def language_prefix(tokenizer: PreTrainedTokenizerBase, language: str | None) -> list[int]:
    """Ids that come before a source: the tag of its target language, if there is one.

    A tag is a token of the source and counts towards its length.

    Args:
        tokenizer: Of the model.
        language: Name of the target language; None for a model of one direction.

    Raises:
        ValueError: If the model does not know the language, or knows several and none is given.
    """
    tags = target_tags(tokenizer)
    if language is None and not tags:
        return []
    if language in tags:
        return [tags[language]]
    if not tags:
        raise ValueError(
            f"The model takes no target language, got {language!r}. Leave it out, or train a model "
            "with --tag_column."
        )
    raise ValueError(
        f"The target language must be one of the model's, {', '.join(tags)}, got "
        f"{language!r}. Name one: --target_language, or in training the --tag_column of the pairs."
    )


def target_tags(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Ids of the tags that name a target language, by language; none for most models."""
    tags = language_tags(tokenizer)
    # Of Marian: `MarianTokenizer` has them as pieces, our fast ones as added tokens.
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    named = filter(_MARIAN_TAG.fullmatch, added)
    for token in getattr(tokenizer, "supported_language_codes", named):
        tags[token.strip("<>")] = tokenizer.convert_tokens_to_ids(token)
    return tags


def end_length(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens after the text: `</s>`, and for some tokenizers a code after it."""
    return len(getattr(tokenizer, "suffix_tokens", ())) or 1


def _saved(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    """A language that the tokenizer was saved with."""
    code = tokenizer.init_kwargs.get(name)
    return code.strip("_") if code else None


def _some(codes: Iterable[str], wanted: str | None) -> list[str]:
    """The most similar ones, and then the first."""
    similar = difflib.get_close_matches(wanted or "", codes, n=NAMED, cutoff=0.3)
    return list(dict.fromkeys([*similar, *codes]))[:NAMED]
