"""Checkpoints of fairseq's `transformer`: their settings, tensors and vocabularies.

Their conversion is declared in `sources/fairseq.yaml`, as for every other source.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from vanilla_transformer.tokenization_vanilla_transformer import (
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    UNK_TOKEN,
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.interop.declarations import Declaration, Source
from vanilla_transformer_tools.interop.tensor_files import load_pickled, tensors_in
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# A token's place in the list is its id; those of the dictionary's file follow.
_SPECIAL_TOKENS = [BOS_TOKEN, PAD_TOKEN, EOS_TOKEN, UNK_TOKEN]
# What Python takes for white space and the regular expressions of `tokenizers` do not.
_BLANKS = Regex(r"[\s\x1C-\x1F]+")
# The largest dictionaries, of a million words, have a tenth of it.
_MOST_BYTES = 2**28
# Marks a line whose token may have occurred before.
_OVERWRITE = " #fairseq:overwrite"
_COUNT = re.compile(r"[+-]?\d+")
# In a folder with several checkpoints, in this order.
_USUAL_NAMES = ("checkpoint_best.pt", "model.pt", "checkpoint_last.pt")


def find_fairseq_file(source: Path) -> Path | None:
    """The checkpoint that a path names: itself, or in a folder that is no model of Transformers.

    Raises:
        ValueError: If a folder has several, none of a usual name; or if a file is of another form.
    """
    if source.suffix == ".safetensors" and source.is_file():
        raise ValueError(
            f"{str(source)!r} holds weights without a config. Name the folder of a model of "
            "Transformers, or give --mapping, which says what becomes of each tensor."
        )
    if source.is_file():
        return source
    files = [] if (source / "config.json").exists() else sorted(source.glob("*.pt"))
    usual = [source / name for name in _USUAL_NAMES if source / name in files]
    if len(files) > 1 and not usual:
        raise ValueError(
            f"{str(source)!r} must hold one checkpoint, got "
            f"{', '.join(file.name for file in files)}. Name the file itself."
        )
    return next(iter(usual or files), None)


def read_checkpoint(file: Path) -> Source:
    """Reads a checkpoint and the dictionaries in its folder.

    Fields are fairseq's options by name, including the task's; `source_entries` and
    `target_entries` are the sizes of the vocabularies.

    Raises:
        ValueError: If it is damaged, would run code, is none of fairseq's, or has no dictionaries.
        OSError: If a file cannot be read.
    """
    content = load_pickled(file)
    if not isinstance(content, Mapping) or not (content.get("args") or content.get("cfg")):
        keys = ", ".join(map(repr, content)) if isinstance(content, Mapping) else ""
        raise ValueError(
            f"{str(file)!r} must be a checkpoint of fairseq, with 'model' and 'args' or 'cfg', got "
            f"{keys or type(content).__name__:.100}. Give --mapping for weights of other programs."
        )
    settings = _settings(content)
    is_joint = bool(settings.get("share_all_embeddings"))
    source, target = map(read_dictionary, _dictionaries(file.parent, settings))
    if is_joint and source.get_vocab() != target.get_vocab():
        raise ValueError(
            "The dictionaries of source and target must be equal, because the model shares all "
            f"tables, got {len(source):,} and {len(target):,} entries that differ. Restore both."
        )
    settings["source_entries"] = len(source)
    settings["target_entries"] = None if is_joint else len(target)
    tokenizers = TokenizerPair.joint(source) if is_joint else TokenizerPair(source, target)
    declaration = Declaration.of("fairseq")
    tensors = tensors_in(content, file)
    return Source({"model_type": "fairseq"}, declaration, settings, tensors, tokenizers)


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of model and task, whose form depends on fairseq's release, in one level."""
    settings: dict[str, Any] = {}
    config = _entries(content.get("cfg"))
    for part in (config.get("task"), config.get("model"), content.get("args")):
        settings |= _entries(part)
        for stack in ("encoder", "decoder"):
            inner = _entries(settings.pop(stack, None))
            settings |= {f"{stack}_{name}": value for name, value in inner.items()}
    # As fairseq itself fills in what its older releases had otherwise.
    for name, older in (("arch", "_name"), ("activation_dropout", "relu_dropout")):
        settings[name] = settings.get(name) or settings.get(older)
    if settings.get("share_all_embeddings"):
        settings["share_decoder_input_output_embed"] = True
    return settings


def _entries(settings: Any) -> Mapping[str, Any]:
    if isinstance(settings, Namespace):
        return vars(settings)
    return settings if isinstance(settings, Mapping) else {}


def _dictionaries(folder: Path, settings: Mapping[str, Any]) -> list[Path]:
    """The dictionaries of source and target."""
    languages = [settings.get("source_lang"), settings.get("target_lang")]
    files = [folder / f"dict.{language}.txt" for language in languages]
    if missing := [file.name for file in files if not file.is_file()]:
        there = [file.name for file in sorted(folder.glob("dict*.txt"))]
        raise ValueError(
            f"The folder of the checkpoint must hold the dictionaries {files[0].name} and "
            f"{files[1].name}, got {', '.join(there) or 'none'}. Copy {' and '.join(missing)} "
            "from the folder that fairseq-preprocess has made."
        )
    return files


def read_dictionary(file: Path) -> VanillaTransformerTokenizer:
    """A tokenizer with the ids of a dictionary of fairseq, whose lines are `token count`.

    Text must be segmented as it was for fairseq: a token is what blanks enclose. A line that ends
    in `#fairseq:overwrite` gives an earlier token another id; its first row stays without a word.

    Raises:
        ValueError: If a line is none of that form, or a token occurs twice.
    """
    tokens = list(_SPECIAL_TOKENS)
    places = {token: place for place, token in enumerate(tokens)}
    for number, line in enumerate(read_lines(file, _MOST_BYTES), start=1):
        entry = line.rstrip().removesuffix(_OVERWRITE)
        token, _, count = entry.rpartition(" ")
        overwrites = entry != line.rstrip()
        if not token or not _COUNT.fullmatch(count) or (token in places and not overwrites):
            raise ValueError(
                f"{file}, line {number}, must be a new token and its count, got {line!r:.60}. "
                "Restore the file."
            )
        if token in _SPECIAL_TOKENS:
            # The special token keeps its name.
            token = f"{token} {len(tokens)}{_OVERWRITE}"
        elif token in places:
            # No text spells a name with a blank.
            tokens[places[token]] = f"{token} {places[token]}{_OVERWRITE}"
        places[token] = len(tokens)
        tokens.append(token)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(_BLANKS, "removed")
    # As in fairseq, a word of the text may be such a token.
    return VanillaTransformerTokenizer.of_pipeline(backend, _SPECIAL_TOKENS)
