"""The tokenizers and the model that a run starts with: new ones, or saved ones."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
)
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.tokenization_vanilla_transformer import (
    VanillaTransformerTokenizer,
)
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.saved_folder import (
    check_files,
    find_file,
    load_config,
    load_model,
    read_generation_config,
)
from vanilla_transformer_tools.settings import MAX_EXTRA_TOKENS, PRESETS, TrainSettings
from vanilla_transformer_tools.text.token_cache import cached_tokenizer
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, load_tokenizer
from vanilla_transformer_tools.training.compiling import compile_layers
from vanilla_transformer_tools.training.fine_tuning import choose_parameters
from vanilla_transformer_tools.training.recipe import check_vocabularies, config_overrides

# Section 6.1.
NUM_BEAMS = 4
LENGTH_PENALTY = 0.6

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


def build_model(
    settings: TrainSettings,
    arguments: Seq2SeqTrainingArguments,
    pairs: Dataset,
    checkpoint: str | None,
) -> tuple[TokenizerPair, VanillaTransformerForConditionalGeneration]:
    """Loads tokenizers and model, or makes tokenizers and initialises a model for them."""
    # With an adapter a checkpoint is no model yet; Trainer loads it when there is one.
    if start := settings.init_from if settings.peft else checkpoint or settings.init_from:
        # In half precision most updates would be rounded away.
        model = load_model(start, dtype=torch.float32)
        tokenizers = saved_tokenizers(settings, start, model.generation_config)
    else:
        tokenizers = _new_tokenizers(settings, pairs)
        model = _initialise_model(settings, tokenizers)
    _begin_with_languages(model, tokenizers)
    _check_positions(model, settings)
    choose_parameters(model, settings)
    if settings.attn_implementation:
        model.set_attn_implementation(settings.attn_implementation)
    if settings.compile_layers:
        # Torch keeps eight graphs of a function, those of earlier runs in this process included.
        torch.compiler.reset()
        compile_layers(model)
    # The model smooths its own loss, without the full logits that Trainer's smoother needs.
    model.config.label_smoothing = arguments.label_smoothing_factor
    arguments.label_smoothing_factor = 0.0
    return tokenizers, model


def _check_positions(model: PreTrainedModel, settings: TrainSettings) -> None:
    """Refuses learned positions that end before the longest text that is not cut."""
    last = getattr(model.config, "last_position", math.inf)
    if settings.max_length > last:
        raise ValueError(
            f"--max_length {settings.max_length} is longer than the learned positions, which end "
            f"after {last} tokens. Give --max_length {last}, or, for a new model, more "
            "positions: --config max_position_embeddings=N."
        )


def saved_tokenizers(
    settings: TrainSettings, name: str, defaults: GenerationConfig | None = None
) -> TokenizerPair:
    """The tokenizers of a saved model, for the languages of this run.

    Args:
        settings: Of the run.
        name: Folder or Hub name of the model.
        defaults: Of its searches; None: as they are saved.

    Raises:
        ValueError: If the model is of another class, if they are not its own, cannot do what the
            run needs, or if a language is unknown, missing, or given to tokenizers without
            languages.
    """
    _refuse_other_classes(settings, name)
    tokenizers = TokenizerPair.from_pretrained(name)
    check_vocabularies(settings, name, tokenizers)
    if settings.tag_column:
        return tokenizers
    if defaults is None:
        has_model = find_file(name, CONFIG_NAME)
        defaults = read_generation_config(name) if has_model else GenerationConfig()
    return tokenizers.between(settings.source_language, settings.target_language, defaults)


def _begin_with_languages(model: PreTrainedModel, tokenizers: TokenizerPair) -> None:
    """Lets outputs begin with the language that the tokenizers were set up for."""
    defaults = model.generation_config
    if tokenizers.first_token is not None:
        defaults.forced_bos_token_id = tokenizers.first_token
    if tokenizers.start_token is not None:
        for config in (model.config, defaults):
            config.decoder_start_token_id = tokenizers.start_token


def _initialise_model(
    settings: TrainSettings, tokenizers: TokenizerPair
) -> VanillaTransformerForConditionalGeneration:
    fields = PRESETS[settings.preset].config() | config_overrides(settings)
    if settings.tokenizer:
        _refuse_vocabulary_fields(settings)
    if settings.tokenizer and find_file(settings.tokenizer, CONFIG_NAME):
        saved = load_config(settings.tokenizer)
        fields |= {name: getattr(saved, name) for name in _VOCABULARY_FIELDS}
    else:
        fields["vocab_size"] = len(tokenizers.source)
        if not tokenizers.is_joint:
            fields["share_encoder_decoder_embeddings"] = False
            fields["decoder_vocab_size"] = len(tokenizers.target)
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields))
    model.generation_config.update(
        num_beams=NUM_BEAMS,
        length_penalty=LENGTH_PENALTY,
        # The start token, and the longest output that the longest source may have.
        max_length=1 + settings.max_length + MAX_EXTRA_TOKENS,
    )
    return model


def _refuse_vocabulary_fields(settings: TrainSettings) -> None:
    given = sorted(config_overrides(settings).keys() & set(_VOCABULARY_FIELDS))
    if given:
        raise ValueError(
            f"--config must leave out {' and '.join(given)} with --tokenizer, whose model decides "
            "on them. Leave either out."
        )


def _refuse_other_classes(settings: TrainSettings, name: str) -> None:
    """Refuses what is neither a model of this package nor, for --tokenizer, a tokenizer of it."""
    option = "--init_from" if name == settings.init_from else "--tokenizer"
    if option == "--tokenizer" and Path(name).is_file():
        got = f"the file {name!r}"
    elif find_file(name, CONFIG_NAME):
        model_type = load_config(name).model_type
        if model_type == VanillaTransformerConfig.model_type:
            return
        got = f"a model of the type {model_type!r} in {name!r}"
    elif option == "--tokenizer" and find_file(name, TOKENIZER_CONFIG_FILE):
        tokenizer = load_tokenizer(name)
        if isinstance(tokenizer, VanillaTransformerTokenizer):
            return
        got = f"a {type(tokenizer).__name__} in {name!r}"
    else:
        # What is missing is reported when the tokenizers are loaded.
        return
    if option == "--init_from":
        raise ValueError(
            f"--init_from needs a model of this package, got {got}. Bring it in by "
            "`vanilla-transformer import`."
        )
    raise ValueError(
        f"--tokenizer needs a folder with a tokenizer or a model of this package, got {got}. The "
        "tokenizer of a pretrained model comes in with its model: `vanilla-transformer import`, "
        "then --tokenizer or --init_from with the new folder. A SentencePiece file, or a tokenizer "
        "without a model, cannot be taken over; train one of the same kind on the same text: "
        "--tokenizer_kind bpe or unigram, --vocab_size, and --symbols for tokens to keep whole."
    )


def _new_tokenizers(settings: TrainSettings, pairs: Dataset) -> TokenizerPair:
    """Learns one vocabulary, or one for each side, or loads those of a saved model.

    All processes learn the same.
    """
    if settings.tokenizer:
        _refuse_other_classes(settings, settings.tokenizer)
        check_files(settings.tokenizer)
        return saved_tokenizers(settings, settings.tokenizer)

    def learn(
        columns: Sequence[str], vocab_size: int, languages: Sequence[str]
    ) -> VanillaTransformerTokenizer:
        return cached_tokenizer(
            pairs,
            columns,
            vocab_size=vocab_size,
            kind=settings.tokenizer_kind,
            pretokenized=settings.pretokenized,
            unicode_form=settings.unicode_form,
            target_languages=languages,
            symbols=symbols,
        )

    symbols = tuple(read_lines(settings.symbols)) if settings.symbols else ()
    if "" in symbols:
        raise ValueError(
            f"--symbols must hold a symbol in each line, got an empty line {symbols.index('') + 1} "
            f"in {settings.symbols!r}. Take it out."
        )
    # Tags are prefixed to sources.
    languages = sorted(set(pairs["tag"])) if settings.tag_column else []
    if settings.separate_vocabularies:
        return TokenizerPair(
            learn(["source"], settings.vocab_size, languages),
            learn(["target"], settings.target_vocab_size or settings.vocab_size, []),
        )
    return TokenizerPair.joint(learn(["source", "target"], settings.vocab_size, languages))
