"""Pretrained weights of other classes of this architecture, as one of our models.

Each class is a declaration in `sources/`, see `declarations`. Anything else is an error.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.files import new_folder
from vanilla_transformer_tools.interop.declarations import Declaration, Source
from vanilla_transformer_tools.interop.fast_tokenizers import fast_pair
from vanilla_transformer_tools.interop.marian import NO_ENTRY, find_npz, read_marian
from vanilla_transformer_tools.interop.tensor_files import read_tensors, unreadable
from vanilla_transformer_tools.interop.trimming import Trimming, trim
from vanilla_transformer_tools.saved_folder import (
    check_files,
    check_objects,
    describe_model_files,
    load_config,
    load_model,
    nonfinite_tensors,
    write_run,
)
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

# Of the largest logit; float32 sums in another order, and tables of sinusoids in float32.
_TOLERANCE = 1e-4


def convert(source: PreTrainedModel) -> VanillaTransformerForConditionalGeneration:
    """One of our models with the weights and generation settings of another class's model.

    The weights are copied, the dtype stays, and both models have run on the same random tokens.

    Args:
        source: A model of a class in `known_sources`.

    Raises:
        ValueError: If the class, a setting or a tensor has no counterpart, or the logits differ;
            names all reasons.
    """
    was_training = source.training
    try:
        model, _ = _converted(Source.of(source.eval()))
    finally:
        source.train(was_training)
    return model.train(was_training)


@dataclass(frozen=True)
class LogitGap:
    """How the logits of a source and of the converted model differ on random tokens.

    Attributes:
        gap: Largest difference.
        scale: Largest logit of the source.
        encoder_gap: Largest difference of the encoders' outputs, as a share of the largest one.
    """

    gap: float
    scale: float
    encoder_gap: float

    def __str__(self) -> str:
        return f"logits of up to {self.scale:.3g} differ by at most {self.gap:.1e}"

    def check(self, dtype: torch.dtype = torch.float32) -> None:
        """Rejects a model whose gap is more than rounding in the dtype of the weights."""
        # Written so that NaN fails.
        tolerance = max(_TOLERANCE, torch.finfo(dtype).eps)
        if not self.gap <= tolerance * max(1.0, self.scale):
            agree = self.encoder_gap <= tolerance
            raise ValueError(
                f"The converted model must compute what its source does, but {self}; the encoders' "
                f"outputs {'agree, the decoders do not' if agree else 'differ already'}. It was "
                "not kept; please report this with the source and the versions of your packages."
            )


def _compare_weights(source: PreTrainedModel, model: PreTrainedModel) -> LogitGap:
    """Compares in the dtype of the weights, and if they differ there in float32.

    Products of 16 bits, of matrices that one model has side by side, may round otherwise.
    """
    dtype = model.dtype
    comparison = compare_logits(source, model)
    try:
        comparison.check(dtype)
    except ValueError:
        comparison = compare_logits(source.float(), model.float())
        source.to(dtype)
        model.to(dtype)
        comparison.check(dtype)
    return comparison


@torch.no_grad()
def compare_logits(source: Callable[..., Any], model: PreTrainedModel) -> LogitGap:
    """Runs both models on the same random tokens, with padding on the right."""
    config = model.config
    generator = torch.Generator().manual_seed(0)

    def draw(vocab_size: int, length: int) -> Tensor:
        # Some classes give padding no position, wherever it occurs.
        real = torch.tensor(sorted(set(range(vocab_size)) - {config.pad_token_id}))
        return real[torch.randint(len(real), (2, length), generator=generator)]

    # A table of positions may be shorter.
    source_length, target_length = (int(min(longest, config.last_position)) for longest in (9, 7))
    input_ids = draw(config.vocab_size, source_length)
    attention_mask = torch.ones_like(input_ids)
    end = max(1, source_length - 3)
    input_ids[1, end:], attention_mask[1, end:] = config.pad_token_id, 0
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": draw(config.target_vocab_size, target_length),
    }
    inputs = {name: one.to(model.device) for name, one in inputs.items()}
    # With a cache, some classes let a target position attend to later ones.
    outputs = [one(**inputs, use_cache=False) for one in (source, model)]
    expected, actual = (one.logits.double() for one in outputs)
    # Only real tokens; sorted, because `to_transformers` may reorder columns.
    encoded, ours = (
        one.encoder_last_hidden_state[inputs["attention_mask"] > 0].double().sort().values
        for one in outputs
    )
    return LogitGap(
        (expected - actual).abs().max().item(),
        expected.abs().max().item(),
        ((encoded - ours).abs().max() / encoded.abs().max()).item(),
    )


def import_model(
    name_or_path: str,
    folder: Path,
    *,
    mapping: Path | None = None,
    tokenizer: str | None = None,
    trimming: Trimming | None = None,
    positions: str = "transformers",
) -> LogitGap | None:
    """Saves a model of another class as one of ours, with its tokenizer and generation settings.

    Args:
        name_or_path: Folder or Hub name of a model of a class in `known_sources`; or Marian's
            `.npz`, or its folder; or, with a `mapping`, any file of tensors, or its folder.
        folder: Where the model goes; it must not exist yet, and appears when it is complete.
        mapping: A declaration of the tensors, as YAML.
        tokenizer: Folder or Hub name of the tokenizer for a `mapping`; others bring their own.
        trimming: Which entries of the vocabulary to keep; None: all. `run.json` states the sizes.
        positions: `marian`: makes a model of `MarianMTModel` compute what Marian does.

    Returns:
        How the logits of the two models compare; None if nothing here computes with the source.

    Raises:
        FileExistsError: If there is something at `folder`.
        ImportError: If the tokenizer needs a package that is not installed.
        ValueError: If the model is damaged, cannot be expressed, or computes something else here.
        OSError: If there is no such model, or no room for ours.
    """
    with new_folder(folder, "model") as new:
        source = load_source(name_or_path, mapping, tokenizer)
        record: dict[str, Any] = {"imported_from": _origin(source, positions)}
        model, comparison = _converted(source)
        if positions == "marian":
            compute_as_marian(model)
        tokenizers = source.tokenizers
        if trimming:
            trimmed = trim(model, source.one_tokenizer(), trimming)
            model, tokenizers = trimmed.model, TokenizerPair.joint(trimmed.tokenizer)
            record["trimmed"] = trimmed.sizes
        model.save_pretrained(new)
        if tokenizers:
            tokenizers.save_pretrained(new)
        write_run(new, {**record, "files": describe_model_files(new)})
    return comparison


def _origin(source: Source, positions: str) -> dict[str, Any]:
    """What `run.json` says of a source."""
    if source.record.get("model_type") == "marian":
        return {**source.record, "positions": positions}
    if positions == "marian":
        raise ValueError(
            f"--positions marian needs a MarianMTModel, got {source.record['name']}. Leave it out."
        )
    if "mapping" in source.record:
        return {**source.record, "assumed": source.declaration.assumed()}
    return {**source.record}


def _converted(
    source: Source,
) -> tuple[VanillaTransformerForConditionalGeneration, LogitGap | None]:
    """Our model of a source, compared with it where something here computes with it."""
    model = source.convert().eval()
    if source.model is not None:
        return model, _compare_weights(source.model, model)
    if damaged := nonfinite_tensors(model):
        raise ValueError(f"Weights must be finite, got others in {', '.join(damaged)}.")
    return model, None


def load_source(
    name_or_path: str, mapping: Path | None = None, tokenizer: str | None = None
) -> Source:
    """The model that `import_model` would bring in; arguments as for it.

    Raises:
        ImportError: If the tokenizer needs a package that is not installed.
        ValueError: If the model is damaged, or no model of a known kind.
        OSError: If there is no such model.
    """
    path = Path(name_or_path)
    if mapping is not None:
        source = _with_mapping(path, mapping, tokenizer)
    elif file := find_npz(path):
        source = read_marian(file)
    else:
        source = _of_transformers(name_or_path)
    return replace(source, record={"name": path.name, **source.record})


def _of_transformers(name_or_path: str) -> Source:
    config = _check_config(name_or_path)
    tokenizers = TokenizerPair.from_pretrained(name_or_path, config)
    try:
        model = load_model(name_or_path, use_safetensors=None).eval()
    # From torch's readers of pickles and of cut files.
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise unreadable(name_or_path, error) from error
    source = replace(Source.of(model), tokenizers=tokenizers)
    try:
        return replace(source, tokenizers=fast_pair(tokenizers))
    except ValueError as error:
        return replace(source, record={**source.record, "slow_tokenizer": str(error)})


@torch.no_grad()
def compute_as_marian(model: VanillaTransformerForConditionalGeneration) -> None:
    """Gives a model that comes from `MarianMTModel` what Marian has: positions and no `<pad>`."""
    config = model.config
    marian = Declaration.of("marian_npz")
    config.position_base = marian.fields({"dim-emb": config.d_model})["position_base"]
    config.layer_norm_eps = marian.constants["layer_norm_eps"]
    model.lm_head.bias[config.pad_token_id] = NO_ENTRY


def _with_mapping(path: Path, mapping: Path, tokenizer: str | None) -> Source:
    """Weights of another program, with tokenizer and settings from the same folder."""
    declaration = Declaration.of_mapping(mapping)
    folder = path if path.is_dir() else path.parent
    check_files(str(folder))
    if tokenizer is None and (folder / TOKENIZER_CONFIG_FILE).is_file():
        tokenizer = str(folder)
    source = Source({"mapping": mapping.name}, declaration, {}, read_tensors(path))
    if tokenizer is not None:
        config = declaration.config_of({}).to_dict()
        pair = TokenizerPair.from_pretrained(tokenizer, config)
        source = replace(source, tokenizers=pair)
    if (folder / GENERATION_CONFIG_NAME).is_file():
        check_objects(folder)
        source = replace(source, generation_config=GenerationConfig.from_pretrained(folder))
    return source


def _check_config(name_or_path: str) -> dict[str, Any]:
    """Fields of our config, before gigabytes are read."""
    path = Path(name_or_path)
    if path.is_file() or (path.is_dir() and not (path / CONFIG_NAME).exists()):
        raise ValueError(
            f"{name_or_path!r} must be the folder of a model of Transformers, with {CONFIG_NAME}, "
            f"or a model of Marian (.npz), got {'a file' if path.is_file() else 'a folder'} "
            "without. Give --mapping, which says what becomes of each tensor, for weights of "
            "other programs."
        )
    config = load_config(name_or_path)
    return Declaration.of(config.model_type).config_of(config.to_dict()).to_dict()
