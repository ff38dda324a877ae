"""Pretrained weights of other classes of this architecture, as one of our models.

Each class is a declaration in `sources/`: names of config fields, constants, and the rules of
`weight_maps`. What a declaration cannot express is refused.
"""

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from vanilla_transformer.files import naming_full_disk, scratch_folder
from vanilla_transformer.interop.weight_maps import Plan, WeightMap, shapes_of
from vanilla_transformer.model_folder import (
    check_objects,
    describe_model_files,
    load_model,
    write_run,
)
from vanilla_transformer.modeling.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.tokenization.tokenizer_pair import load_tokenizer

SOURCES = Path(__file__).with_name("sources")
# What others extend; it is no class of its own.
_BASE = "transformers"

Fields = Mapping[str, Any]

# Of the largest logit; float32 sums in another order, and tables of sinusoids in float32.
_TOLERANCE = 1e-4


def _fairseq_base(fields: Fields) -> float:
    """Fairseq spreads the wavelengths over h - 1 steps, h = d_model / 2, not over h."""
    half = fields["d_model"] // 2
    return 10_000.0 ** (half / (half - 1))


# Values that a declaration's `computed` may name.
_COMPUTED: dict[str, Callable[[Fields], Any]] = {
    "fairseq_base": _fairseq_base,
    "first_position_after_padding": lambda fields: fields["pad_token_id"] + 1,
}


@dataclass(frozen=True)
class Declaration:
    """How models of one class become ours.

    Attributes:
        config: Fields of our config and the names of the source's fields they are taken from.
        constants: Fields of our config that are the same for all models of the class.
        computed: Fields of our config by the name of the function in `_COMPUTED` that gives them.
        weights: Which tensors become which.
    """

    config: dict[str, str]
    constants: dict[str, Any]
    computed: dict[str, str]
    weights: WeightMap

    @classmethod
    def of(cls, model_type: str) -> "Declaration":
        """The declaration of a class of Transformers, by its `model_type`.

        Raises:
            ValueError: If there is none.
        """
        if model_type not in known_sources():
            raise ValueError(
                f"The model type must be one of {', '.join(known_sources())}, got {model_type!r}."
            )
        return cls._from(_read(model_type))

    @classmethod
    def _from(cls, content: dict[str, Any]) -> "Declaration":
        weights = WeightMap(content["tensors"], content["ignored"])
        return cls(content["config"], content["constants"], content["computed"], weights)

    def fields(self, source: Fields) -> dict[str, Any]:
        """Fields of our config, from those of the source; one that is absent there is None."""
        return {
            **{ours: source.get(theirs) for ours, theirs in self.config.items()},
            **self.constants,
            **{name: _COMPUTED[function](source) for name, function in self.computed.items()},
        }


def known_sources() -> list[str]:
    """The `model_type` of each class that can be imported."""
    return sorted(path.stem for path in SOURCES.glob("*.yaml") if path.stem != _BASE)


def _read(name: str) -> dict[str, Any]:
    """A declaration with everything that it extends; its own entries win."""
    content = yaml.safe_load((SOURCES / f"{name}.yaml").read_text(encoding="utf-8"))
    if base := content.pop("extends", None):
        inherited = _read(base)
        ignored = [*inherited["ignored"], *content.pop("ignored", [])]
        mappings = inherited.keys() - {"ignored"}
        content = {key: inherited[key] | content.get(key, {}) for key in mappings}
        content["ignored"] = ignored
    return content


def convert(source: PreTrainedModel) -> VanillaTransformerForConditionalGeneration:
    """One of our models with the weights and generation settings of another class's model.

    The weights are copied; the dtype stays.

    Args:
        source: A model of a class in `known_sources`.

    Raises:
        ValueError: If the class, its settings or its tensors cannot be expressed; names all faults.
    """
    model, plan = _plan(source)
    plan.check()
    model.load_state_dict(plan.carry_out(_untied(source)), strict=False, assign=True)
    model.tie_weights()
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.train(source.training)


def _plan(source: PreTrainedModel) -> tuple[VanillaTransformerForConditionalGeneration, Plan]:
    """Our model without memory for its weights, and what they will be made of."""
    declaration = Declaration.of(source.config.model_type)
    config = VanillaTransformerConfig(**declaration.fields(source.config.to_dict()))
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(config)
    shapes = (shapes_of(_untied(one)) for one in (model, source))
    return model, declaration.weights.plan(*shapes)


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors by name, each once."""
    tied = model.all_tied_weights_keys
    return {name: value for name, value in model.state_dict().items() if name not in tied}


@dataclass(frozen=True)
class Comparison:
    """How the logits of a source and of the converted model differ on random tokens.

    Attributes:
        gap: Largest difference.
        scale: Largest logit of the source.
    """

    gap: float
    scale: float

    def __str__(self) -> str:
        return f"logits of up to {self.scale:.3g} differ by at most {self.gap:.1e}"

    def check(self) -> None:
        """Refuses a model that computes something else.

        Raises:
            ValueError: If the difference is not rounding.
        """
        # Written so that NaN fails.
        if not self.gap <= _TOLERANCE * max(1.0, self.scale):
            raise ValueError(
                f"The converted model must compute what its source does, but {self}. Nothing was "
                "written; please report this with the source and the versions of your packages."
            )


@torch.no_grad()
def compare(source: PreTrainedModel, model: PreTrainedModel) -> Comparison:
    """Runs both models on the same random tokens, with padding on the right.

    Args:
        source: In evaluation mode, like `model`.
        model: What it became.
    """
    config = model.config
    generator = torch.Generator().manual_seed(0)

    def draw(vocab_size: int, length: int) -> Tensor:
        # Some classes give padding no position, wherever it occurs.
        real = torch.tensor(sorted(set(range(vocab_size)) - {config.pad_token_id}))
        return real[torch.randint(len(real), (2, length), generator=generator)]

    input_ids = draw(config.vocab_size, 9)
    attention_mask = torch.ones_like(input_ids)
    input_ids[1, 6:], attention_mask[1, 6:] = config.pad_token_id, 0
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": draw(config.target_vocab_size, 7),
        # With a cache, some classes let a target position attend to later ones.
        "use_cache": False,
    }
    expected, actual = (one(**inputs).logits.double() for one in (source, model))
    return Comparison((expected - actual).abs().max().item(), expected.abs().max().item())


def import_model(name_or_path: str, folder: Path) -> Comparison:
    """Saves a model of another class as one of ours, with its tokenizer and generation settings.

    Args:
        name_or_path: Folder or Hub name of a model of a class in `known_sources`. Weights in
            PyTorch's own format are read by its loader that runs no code.
        folder: Where the model goes; it must not exist yet, and appears when it is complete.

    Returns:
        How the logits of the two models compare.

    Raises:
        FileExistsError: If there is something at `folder`.
        ImportError: If the tokenizer needs a package that is not installed.
        ValueError: If the model is damaged, cannot be expressed, or computes something else here.
        OSError: If there is no such model, or no room for ours.
    """
    if folder.exists():
        raise FileExistsError(f"{str(folder)!r} must not exist yet. Give another folder.")
    # First, because this explains what is wrong with a folder or a name.
    tokenizer = load_tokenizer(name_or_path)
    source = _load(name_or_path)
    model = convert(source)
    comparison = compare(source, model)
    comparison.check()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        scratch_folder(folder.parent, f".{folder.name}.new-") as scratch,
        naming_full_disk(folder.parent, f"the model {folder.name!r}"),
    ):
        new = scratch / "new"
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        run = {
            "imported_from": {
                "name": Path(name_or_path).name,
                "model_type": source.config.model_type,
            },
            "files": describe_model_files(new),
        }
        write_run(new, run)
        new.rename(folder)
    return comparison


def plan_import(name_or_path: str) -> Plan:
    """What `import_model` would do with the tensors.

    Raises:
        ValueError: If the model is damaged, or a setting cannot be expressed.
        OSError: If there is no such model.
    """
    return _plan(_load(name_or_path))[1]


def _load(name_or_path: str) -> PreTrainedModel:
    if Path(name_or_path).is_dir():
        check_objects(Path(name_or_path))
    # Refused before gigabytes are read.
    Declaration.of(AutoConfig.from_pretrained(name_or_path).model_type)
    try:
        return load_model(name_or_path, use_safetensors=None).eval()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The weights of {name_or_path!r} must hold tensors only, got objects whose loading "
            "may run code. If you trust their source, convert them to safetensors."
        ) from error
    # From torch's reader of a cut file.
    except (RuntimeError, EOFError) as error:
        raise ValueError(
            f"The weights of {name_or_path!r} are damaged: {' '.join(str(error).split())}. Copy "
            "the model again."
        ) from error
