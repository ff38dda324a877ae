"""The languages of a tokenizer, which it names in one of two ways.

A *tag* such as our `<2de>` or Marian's `>>deu<<` names the target language and comes before the
source. *Codes*, those of NLLB, M2M100, mBART and PLBart, name the language of each side: the
tokenizer puts them next to its text, and outputs begin with one.
"""

import copy
import difflib
import re
from collections.abc import Iterable

from transformers import GenerationConfig, PreTrainedTokenizerBase

from vanilla_transformer.tokenization_vanilla_transformer import language_tags

_MARIAN_TAG = re.compile(r">>.+<<")
# Languages that a message names.
_NAMED = 8


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

    A tag is a token of the source and counts towards its length. Models of one direction have none,
    and take None for the language.

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
    similar = difflib.get_close_matches(wanted or "", codes, n=_NAMED, cutoff=0.3)
    return list(dict.fromkeys([*similar, *codes]))[:_NAMED]
