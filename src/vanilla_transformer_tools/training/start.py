"""The tokenizers and the model that a run starts with: its config, and what is trained of it.

Of a saved model that is all, or all but what is frozen.
"""

import copy
import difflib
import json
import re
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import CONFIG_NAME

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.layers_vanilla_transformer import Attention, Layer
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.saved_folder import (
    check_files,
    find_file,
    load_config,
    load_model,
    read_generation_config,
)
from vanilla_transformer_tools.search import MAX_EXTRA_TOKENS
from vanilla_transformer_tools.settings import PRESETS, TrainSettings
from vanilla_transformer_tools.text.casing import Casing
from vanilla_transformer_tools.text.token_ids import learn_tokenizer
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# Config fields that the command line sets by other options.
_SET_ELSEWHERE = {
    "vocab_size": "--vocab_size",
    "decoder_vocab_size": "--separate_vocabularies with --target_vocab_size",
    "label_smoothing": "--label_smoothing_factor",
    "dtype": "--bf16 or --fp16",
}

# Fields of a config that belong to the tokenizers.
_VOCABULARY_FIELDS = (
    "vocab_size",
    "decoder_vocab_size",
    "share_encoder_decoder_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)

# Section 6.1.
NUM_BEAMS = 4
LENGTH_PENALTY = 0.6

_NOT_OURS = (
    "--init_from or --tokenizer needs a model of this package, got {}. A pretrained model comes "
    "in, with its tokenizer, by `vanilla-transformer import`; then give the new folder. A folder "
    "with a tokenizer of this package will do for --tokenizer. A SentencePiece file, or a "
    "tokenizer without a model, cannot be taken over; train one of the same kind on the same text: "
    "--tokenizer_kind bpe or unigram, --vocab_size, and --symbols for tokens to keep whole."
)

# Words of --freeze, each for the parameters whose names match; those of embeddings match first.
_PARTS = {
    "embeddings": re.compile(r"(.*\.)?(shared|embed_\w+)\."),
    "encoder": re.compile(r"model\.encoder\."),
    "decoder": re.compile(r"model\.decoder\."),
}
# Names that an error gives as examples.
_EXAMPLES = 4


def config_overrides(settings: TrainSettings) -> dict[str, Any]:
    """Config fields given as KEY=VALUE, with values as in JSON and plain strings.

    Raises:
        ValueError: If one is no assignment, no field of the config, or set by another option.
    """
    fields = VanillaTransformerConfig.__dataclass_fields__
    overrides, faults = {}, []
    for assignment in settings.config:
        name, equals, text = assignment.partition("=")
        if not equals:
            faults.append(f"--config takes KEY=VALUE, got {assignment!r}.")
        elif name in _SET_ELSEWHERE:
            faults.append(f"--config {name}: use {_SET_ELSEWHERE[name]} instead.")
        elif name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            faults.append(f"--config: VanillaTransformerConfig has no field {name!r}.{hint}")
        else:
            try:
                overrides[name] = json.loads(text)
            except json.JSONDecodeError:
                overrides[name] = text
    if settings.separate_vocabularies and overrides.get("share_encoder_decoder_embeddings"):
        faults.append(
            "--config share_encoder_decoder_embeddings must be false with "
            "--separate_vocabularies, which share no table, got true. Leave one of the two out."
        )
    if faults:
        raise ValueError("\n".join(faults))
    return overrides


def model_fields(settings: TrainSettings) -> dict[str, Any]:
    """Config fields of a new model: its preset, and what --config changes in it."""
    return PRESETS[settings.preset].config() | config_overrides(settings)


def new_config(
    settings: TrainSettings, saved: VanillaTransformerConfig | None
) -> VanillaTransformerConfig:
    """The config of a new model, whose vocabularies are as large as they may become.

    Args:
        settings: Settings of the run.
        saved: Config of the model of --tokenizer, which decides on vocabularies; None: the
            settings do.

    Raises:
        ValueError: If --config contradicts the vocabulary of --tokenizer.
    """
    fields = model_fields(settings)
    if settings.tokenizer and (set_twice := sorted(fields.keys() & set(_VOCABULARY_FIELDS))):
        raise ValueError(
            f"--config must leave out {' and '.join(set_twice)} with --tokenizer, whose model "
            "decides on them. Leave either out."
        )
    if saved:
        fields |= {name: getattr(saved, name) for name in _VOCABULARY_FIELDS}
    else:
        fields["vocab_size"] = settings.vocab_size
        if settings.separate_vocabularies:
            fields["share_encoder_decoder_embeddings"] = False
            fields["decoder_vocab_size"] = settings.target_vocab_size or settings.vocab_size
    return VanillaTransformerConfig(**fields)


class Start(NamedTuple):
    """What a run takes over from a saved model: all of it, its tokenizers, or nothing.

    Attributes:
        tokenizers: The saved tokenizers; None: new ones are learned.
        model: The saved model; None: a new one is initialised.
        config: Config of the saved model, if there is one.
    """

    tokenizers: TokenizerPair | None = None
    model: PreTrainedModel | None = None
    config: VanillaTransformerConfig | None = None


NEW = Start()


def load_start(settings: TrainSettings, checkpoint: Path | None = None) -> Start:
    """Loads what a run starts with: from a checkpoint, which is given if it is resumed.

    Raises:
        ValueError: If model, tokenizers and settings do not fit together.
    """
    saved = str(checkpoint) if checkpoint else settings.init_from
    name = saved or settings.tokenizer
    if name is None:
        return NEW
    start = saved_start(settings, name)
    # In half precision most updates would be rounded away.
    return start._replace(model=load_model(saved, dtype=torch.float32)) if saved else start


def build_model(
    settings: TrainSettings, start: Start, config: VanillaTransformerConfig, pairs: Dataset
) -> tuple[TokenizerPair, PreTrainedModel]:
    """Tokenizers and model, ready to train: those of `start`, or new ones.

    Args:
        settings: Settings of the run.
        start: What the run takes over; its model is changed in place.
        config: Config of a new model; its vocabularies get the sizes of those that are learned.
        pairs: Text that new tokenizers learn from.

    Raises:
        ValueError: If model and settings do not fit together.
    """
    tokenizers = start.tokenizers or _learn_tokenizers(settings, pairs)
    model = start.model or _initialise_model(config, start, tokenizers, settings)
    # Outputs begin with the language that the tokenizers were set up for.
    defaults = model.generation_config
    if tokenizers.first_token is not None:
        defaults.forced_bos_token_id = tokenizers.first_token
    if tokenizers.start_token is not None:
        defaults.decoder_start_token_id = tokenizers.start_token
        model.config.decoder_start_token_id = tokenizers.start_token
    choose_parameters(model, settings)
    if settings.attn_implementation:
        model.set_attn_implementation(settings.attn_implementation)
    if settings.compile_layers:
        # Torch keeps eight graphs of a function, those of earlier runs in this process included.
        torch.compiler.reset()
        compile_layers(model)
    return tokenizers, model


def saved_start(settings: TrainSettings, name: str) -> Start:
    """The tokenizers of a saved model, for the languages of this run, and its config.

    Args:
        settings: Settings of the run.
        name: Folder or Hub name of the model; for --tokenizer, it may be a tokenizer alone.

    Raises:
        ValueError: If it is nothing of this package, if the tokenizers are not the model's, cannot
            do what the run needs, or if a language is unknown, missing, or given to tokenizers
            without languages.
    """
    if Path(name).is_file():
        raise ValueError(_NOT_OURS.format(f"the file {name!r}"))
    if name == settings.tokenizer:
        # Those of a model are compared when it is loaded.
        check_files(name)
    config = load_config(name) if find_file(name, CONFIG_NAME) else None
    defaults = read_generation_config(name)
    if config is not None and not isinstance(config, VanillaTransformerConfig):
        got = f"a model of the type {config.model_type!r} in {name!r}"
        raise ValueError(_NOT_OURS.format(got))
    tokenizers = TokenizerPair.from_pretrained(name)
    if not (config or isinstance(tokenizers.source, VanillaTransformerTokenizer)):
        got = f"a {type(tokenizers.source).__name__} in {name!r}"
        raise ValueError(_NOT_OURS.format(got))
    if settings.tag_column:
        tokenizers.check_tags(name)
    else:
        languages = settings.source_language, settings.target_language
        tokenizers = tokenizers.between(*languages, defaults)
    source = tokenizers.source
    if getattr(source, "src_vocab_size", None) != getattr(source, "tgt_vocab_size", None):
        raise ValueError(
            f"{type(source).__name__} of {name!r} has two vocabularies and encodes text with the "
            "first only, so there are no labels to train on. Translate with the model, or train "
            "one from the beginning."
        )
    if settings.separate_vocabularies and tokenizers.is_joint:
        raise ValueError(
            "--separate_vocabularies needs a model that was trained with it, got one vocabulary "
            f"of {len(source):,} entries for both sides in {name!r}. Leave it out, or train a "
            "model from the beginning."
        )
    return Start(tokenizers, config=config)


def _initialise_model(
    config: VanillaTransformerConfig,
    start: Start,
    tokenizers: TokenizerPair,
    settings: TrainSettings,
) -> PreTrainedModel:
    config = copy.deepcopy(config)
    # Otherwise the model of --tokenizer has decided on them.
    if start.config is None:
        config.vocab_size = len(tokenizers.source)
        if not tokenizers.is_joint:
            config.decoder_vocab_size = len(tokenizers.target)
    model = VanillaTransformerForConditionalGeneration(config)
    if settings.optimizer == "muon":
        zero_outputs(model)
    model.generation_config.update(
        num_beams=NUM_BEAMS,
        length_penalty=LENGTH_PENALTY,
        # The start token, and the longest output that the longest source may have.
        max_length=1 + settings.max_length + MAX_EXTRA_TOKENS,
    )
    return model


def zero_outputs(model: PreTrainedModel) -> None:
    """Sets the output projection of each sublayer to zero, so that layers begin as identities.

    Muon's steps are as large for small gradients as for large ones, so all weights learn from the
    second update on.

    Args:
        model: A model of this package, changed in place.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            nn.init.zeros_(module.out_proj.weight)
        elif isinstance(module, Layer):
            nn.init.zeros_(module.fc2.weight)


def _learn_tokenizers(settings: TrainSettings, pairs: Dataset) -> TokenizerPair:
    """Learns one vocabulary, or one for each side; all processes learn the same."""
    symbols = tuple(read_lines(settings.symbols)) if settings.symbols else ()
    if "" in symbols:
        raise ValueError(
            f"--symbols must hold a symbol in each line, got an empty line {symbols.index('') + 1} "
            f"in {settings.symbols!r}. Take it out."
        )
    # Tags are prefixed to sources.
    languages = sorted(set(pairs["tag"])) if settings.tag_column else []
    learn = partial(
        learn_tokenizer,
        pairs,
        kind=settings.tokenizer_kind,
        pretokenized=settings.pretokenized,
        symbols=symbols,
        casing=Casing.of_run(settings, symbols),
        vocab_size=settings.vocab_size,
    )
    of_sources: dict[str, Any]
    of_sources = {"target_languages": languages, "lowercase_sources": settings.lowercase_sources}
    if settings.separate_vocabularies:
        target_size = settings.target_vocab_size or settings.vocab_size
        return TokenizerPair(
            learn(["source"], **of_sources), learn(["target"], vocab_size=target_size)
        )
    return TokenizerPair.joint(learn(["source", "target"], **of_sources))


def choose_parameters(model: PreTrainedModel, settings: TrainSettings) -> None:
    """Freezes the parameters that the settings name.

    Raises:
        ValueError: If a pattern matches nothing, or all is frozen.
    """
    patterns = settings.freeze
    if not patterns:
        return
    # A matrix that is tied has several names.
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    all_names = sorted(name for tied in names.values() for name in tied)
    faults = [
        f"--freeze {pattern!r} matches no parameter. Take a word, {' '.join(_PARTS)}, or a pattern "
        f"of names such as {', '.join(all_names[:: -(-len(all_names) // _EXAMPLES)])}."
        for pattern in patterns
        if not any(_matches(name, pattern) for name in all_names)
    ]
    if faults:
        raise ValueError("\n".join(faults))
    for parameter, tied in names.items():
        matched = [name for name in tied if any(_matches(name, each) for each in patterns)]
        if matched:
            parameter.requires_grad = False
            if others := [name for name in tied if name not in matched]:
                PartialState().print(
                    f"frozen      {matched[0]}, and with it {' and '.join(others)}, the same matrix"
                )
    if not any(parameter.requires_grad for parameter in names):
        raise ValueError(
            f"--freeze must leave something to train, got {' '.join(patterns)}, which match all "
            f"{len(names)} parameters. Take one out."
        )


def _matches(name: str, pattern: str) -> bool:
    """Whether a parameter belongs to what a word or a pattern of --freeze stands for."""
    if pattern in _PARTS:
        return pattern == next((part for part, names in _PARTS.items() if names.match(name)), None)
    return fnmatchcase(name, pattern)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compiles each layer of encoder and decoder in place, and on a GPU softmax and loss.

    Layers of one kind share two graphs, for batches with padding and without, whose sizes are free.
    What depends on the data stays outside: masks, positions. Only training runs them: with those
    of evaluations and searches they would be more than the eight that torch keeps of a function.
    Names of parameters stay as they are.

    Args:
        model: A model of this package, or another one of Transformers.
        backend: Backend of `torch.compile`.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            _compile_for_training(module, backend)
        elif isinstance(module, VanillaTransformerForConditionalGeneration):
            module.model.backend.compile_loss(backend)


def _compile_for_training(layer: nn.Module, backend: str) -> None:
    """Does what `layer.compile` does, for calls in training."""
    compiled = torch.compile(layer._call_impl, dynamic=True, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if layer.training else layer._call_impl)(*args, **kwargs)

    layer._compiled_call_impl = call
