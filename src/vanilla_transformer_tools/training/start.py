"""The tokenizers and the model that a run starts with, and what is trained of it."""

import copy
import re
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.casing import Casing
from vanilla_transformer_tools.text.token_ids import learn_tokenizer
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

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
# An error gives one of so many names as an example.
_EVERY = 20


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

    The tokenizers are set up for the languages of the run. Of --tokenizer, there may be no config.

    Raises:
        ValueError: If it is nothing of this package, if the tokenizers are not the model's, cannot
            do what the run needs, or if a language is unknown, missing, or given to tokenizers
            without languages.
    """
    saved = str(checkpoint) if checkpoint else settings.init_from
    name = saved or settings.tokenizer
    if name is None:
        return NEW
    if Path(name).is_file():
        raise ValueError(_NOT_OURS.format(f"the file {name!r}"))
    if not saved:
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
    # In half precision most updates would be rounded away.
    model = load_model(saved, dtype=torch.float32) if saved else None
    return Start(tokenizers, model, config)


def build_model(
    settings: TrainSettings, start: Start, config: VanillaTransformerConfig, pairs: Dataset
) -> tuple[TokenizerPair, PreTrainedModel]:
    """Tokenizers and model, ready to train: those of `start`, changed in place, or new ones.

    Args:
        settings: Settings of the run.
        start: What the run takes over.
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
        # Layers begin as identities: Muon's steps are as large for small gradients as for large
        # ones, so all weights learn from the second update on.
        for module in model.modules():
            if isinstance(module, Attention):
                nn.init.zeros_(module.out_proj.weight)
            elif isinstance(module, Layer):
                nn.init.zeros_(module.fc2.weight)
    model.generation_config.update(
        num_beams=NUM_BEAMS,
        length_penalty=LENGTH_PENALTY,
        # The start token, and the longest output that the longest source may have.
        max_length=1 + settings.max_length + MAX_EXTRA_TOKENS,
    )
    return model


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
    # A matrix that is tied has several names, of which any will do.
    named = dict(model.named_parameters(remove_duplicate=False))
    faults = [
        f"--freeze {pattern!r} matches no parameter. Take a word, {' '.join(_PARTS)}, or a pattern "
        f"of names such as {', '.join(sorted(named)[::_EVERY])}."
        for pattern in settings.freeze
        if not any(_matches(name, pattern) for name in named)
    ]
    if faults:
        raise ValueError("\n".join(faults))
    for name, parameter in named.items():
        if any(_matches(name, pattern) for pattern in settings.freeze):
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(
            f"--freeze must leave something to train, got {' '.join(settings.freeze)}, which match "
            f"all {len(named)} names of parameters. Take one out."
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
