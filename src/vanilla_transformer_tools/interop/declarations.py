"""How models of one kind become ours: YAML files of names, constants, and rules of `weight_maps`.

Those in `sources/` are for classes of Transformers and for other programs; a user's mapping is one
of the same notation, without a config of the source to take values from.
"""

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.files import parse_yaml
from vanilla_transformer_tools.interop.weight_maps import Plan, WeightMap, shapes_of, untied_tensors
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

SOURCES = Path(__file__).with_name("sources")
_DECLARED = {path.stem for path in SOURCES.glob("*.yaml")}
# What a mapping may extend: declarations that take nothing from a config.
_EXTENDABLE = ("fairseq", "nn_transformer")

# Fields of our config that change what is computed, but no shape of a tensor.
_WITHOUT_A_SHAPE = (
    "encoder_attention_heads",
    "decoder_attention_heads",
    "activation_function",
    "pre_norm",
    "scale_embedding",
    "position_embedding_type",
)

Fields = Mapping[str, Any]


def _fairseq_base(fields: Fields) -> float:
    """Fairseq and Marian spread wavelengths over h - 1 steps, h = d_model / 2, not over h."""
    if fields["position_embedding_type"] == "learned":
        return 10_000.0
    half = fields["d_model"] // 2
    return 10_000.0 ** (half / (half - 1))


# Values that a declaration's `computed` may name, made of those of our config.
_COMPUTED: dict[str, Callable[[Fields], Any]] = {
    "fairseq_base": _fairseq_base,
    "first_position_after_padding": lambda fields: fields["pad_token_id"] + 1,
}

_SECTIONS_OF_A_MAPPING: dict[str, type] = {
    "extends": str,
    "prefix": str,
    "constants": dict,
    "tensors": dict,
    "ignored": list,
}


@dataclass(frozen=True)
class Declaration:
    """How models of one kind become ours.

    Attributes:
        weights: Which tensors become which.
        defaults: Fields of the source's config that may be absent.
        config: Fields of our config and the names of the source's fields they are taken from.
        values: By the source's field: its values that are called otherwise here.
        constants: Fields of our config that are the same for all models; they win over `config`.
        computed: Fields of our config by the name of the function in `_COMPUTED` that gives them.
        required: Fields of the source and the value, pattern, or list of values they must have.
    """

    weights: WeightMap
    defaults: dict[str, Any] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[Any, Any]] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)

    @classmethod
    @cache
    def of(cls, model_type: str) -> "Declaration":
        """The declaration of a `model_type`, or of Marian's own files, `marian_npz`."""
        if model_type not in _DECLARED:
            raise ValueError(
                f"The model type must be one of {', '.join(known_sources())}, got {model_type!r}."
            )
        return cls._from(_read(model_type))

    @classmethod
    def of_mapping(cls, file: Path) -> "Declaration":
        """A user's declaration in a file of YAML.

        Raises:
            ValueError: If it is no such declaration; names all faults.
            OSError: If the file cannot be read.
        """
        try:
            content = parse_yaml(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} must be YAML, got text that is none: {error}") from error
        if faults := [*_faults_of_mapping(content)]:
            raise ValueError(f"{file} must be a mapping of weights, got:\n" + "\n".join(faults))
        try:
            return cls._from(_complete(content))
        except ValueError as error:
            raise ValueError(f"{file} must have rules that can be read, got:\n{error}") from error

    @classmethod
    def _from(cls, content: dict[str, Any]) -> "Declaration":
        rules = [content.pop(name, {}) for name in ("tensors", "ignored", "older")]
        return cls(WeightMap(*rules), **content)

    def fields(self, source: Fields) -> dict[str, Any]:
        """Fields of our config, from the source's fields; one that is absent there is None."""
        source = self._with_defaults(source)
        found = {ours: source.get(theirs) for ours, theirs in self.config.items()}
        for ours, theirs in self.config.items():
            if names := self.values.get(theirs):
                found[ours] = names.get(found[ours], found[ours])
        found |= self.constants
        return found | {name: _COMPUTED[kind](found) for name, kind in self.computed.items()}

    def source_fields(self, ours: Fields) -> dict[str, Any]:
        """Fields of the source, from fields of our config: `fields` the other way round."""
        found = {theirs: ours[field] for field, theirs in self.config.items() if field in ours}
        for theirs, names in self.values.items():
            called = (name for name, value in names.items() if value == found.get(theirs))
            found[theirs] = next(called, found.get(theirs))
        return found

    def config_of(self, source: Fields) -> VanillaTransformerConfig:
        """Our config, from the fields of the source's.

        Raises:
            ValueError: If there is none with such values; names all faults.
        """
        try:
            return VanillaTransformerConfig(**self.fields(source))
        except StrictDataclassError as error:
            faults = [*self.faults(source), str(error.__cause__ or error)]
            raise ValueError("\n".join(faults)) from error

    def faults(self, source: Fields) -> list[str]:
        """Settings of the source that cannot be expressed."""
        source = self._with_defaults(source)
        return [
            f"`{name}` must be {expected!r}, got {source[name]!r}"
            for name, expected in self.required.items()
            if source.get(name) is not None and not _agrees(source[name], expected)
        ]

    def assumed(self) -> dict[str, Any]:
        """Defaults for fields that are not declared, where no tensor would show a mistake."""
        declared = {**self.config, **self.constants, **self.computed}
        return {
            name: getattr(VanillaTransformerConfig, name)
            for name in _WITHOUT_A_SHAPE
            if name not in declared
        }

    def _with_defaults(self, source: Fields) -> Fields:
        values = {name: value for name, value in source.items() if value is not None}
        return {**self.defaults, **values}


@dataclass(frozen=True)
class Source:
    """A model of one kind, which may become one of ours.

    Attributes:
        record: Where it comes from, for `run.json`.
        declaration: How models of its kind become ours.
        fields: Fields of the source's config.
        tensors: Tensors by name.
        tokenizers: Tokenizers of both sides; None: there are none.
        generation_config: Settings of its searches; None: there are none.
        model: Model with these weights, in evaluation mode; None: no class here computes them.
    """

    record: dict[str, str]
    declaration: Declaration
    fields: Fields
    tensors: Mapping[str, Tensor]
    tokenizers: TokenizerPair | None = None
    generation_config: GenerationConfig | None = None
    model: PreTrainedModel | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Source":
        """A model of Transformers."""
        kind = model.config.model_type
        return cls(
            {"model_type": kind},
            Declaration.of(kind),
            model.config.to_dict(),
            untied_tensors(model),
            generation_config=model.generation_config,
            model=model,
        )

    def plan(self) -> tuple[VanillaTransformerForConditionalGeneration, Plan]:
        """Our model without memory for its weights, and the plan for making them.

        Raises:
            ValueError: If there can be no config; names all its faults.
        """
        config = self.declaration.config_of(self.fields)
        faults = self.declaration.faults(self.fields)
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(config)
        if self.generation_config:
            model.generation_config = copy.deepcopy(self.generation_config)
        targets, tied = shapes_of(untied_tensors(model)), model.all_tied_weights_keys
        plan = self.declaration.weights.plan(targets, shapes_of(self.tensors), tied)
        return model, replace(plan, faults=faults + plan.faults)

    def one_tokenizer(self) -> PreTrainedTokenizerBase:
        """That of both sides.

        Raises:
            ValueError: If there is none, or one for each side.
        """
        if not (self.tokenizers and self.tokenizers.is_joint):
            raise ValueError(
                "--keep_vocabulary needs a source with one tokenizer for both sides, got "
                f"{'two' if self.tokenizers else 'none'}. Leave it out."
            )
        return self.tokenizers.source

    def convert(self) -> VanillaTransformerForConditionalGeneration:
        """One of our models with these weights, in memory of its own.

        Raises:
            ValueError: If settings or tensors cannot be expressed; names all faults.
        """
        model, plan = self.plan()
        plan.check()
        weights = plan.carry_out(self.tensors)
        if others := [name for name, one in weights.items() if not one.is_floating_point()]:
            raise ValueError(
                f"Weights must be floating-point numbers, got {weights[others[0]].dtype} for "
                f"{', '.join(others)}. Undo the quantisation."
            )
        # A model that computes in one type may still be saved in several.
        dtype = reduce(torch.promote_types, (weight.dtype for weight in weights.values()))
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        return model


def known_sources() -> list[str]:
    """The `model_type` of each class that can be imported."""
    return sorted(name for name in _DECLARED if name in CONFIG_MAPPING)


def _agrees(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return value in wanted
    if isinstance(wanted, str):
        return fnmatchcase(str(value), wanted)
    # Marian's 0, False, None and an empty list are all "off".
    return bool(value == wanted or not (value or wanted))


def _read(name: str) -> dict[str, Any]:
    """A declaration of ours with everything that it extends."""
    return _complete(parse_yaml((SOURCES / f"{name}.yaml").read_text(encoding="utf-8")))


def _complete(content: dict[str, Any]) -> dict[str, Any]:
    """All sections of a declaration, with those that it extends; its own entries win."""
    inherited = _read(content["extends"]) if "extends" in content else {}
    prefix = content.get("prefix", "")
    inherited["tensors"] = {
        target: [prefix + name for name in source] if isinstance(source, list) else prefix + source
        for target, source in inherited.get("tensors", {}).items()
    }
    ignored = inherited.get("ignored", []) + content.get("ignored", [])
    sections = {*inherited, *content} - {"extends", "prefix", "ignored"}
    complete = {name: inherited.get(name, {}) | content.get(name, {}) for name in sections}
    return {**complete, "ignored": ignored}


def _faults_of_mapping(content: Any) -> Iterator[str]:
    """Faults of a user's mapping, apart from its rules."""
    if not isinstance(content, dict):
        yield f"no sections, but {content!r:.60}; begin with `constants:` and `tensors:`"
        return
    for name, value in content.items():
        if name not in _SECTIONS_OF_A_MAPPING:
            yield f"`{name}`: no such section; it must be {', '.join(_SECTIONS_OF_A_MAPPING)}"
        elif not isinstance(value, kind := _SECTIONS_OF_A_MAPPING[name]):
            yield f"`{name}` must be a {kind.__name__}, got {value!r:.60}"
    if content.get("extends", _EXTENDABLE[0]) not in _EXTENDABLE:
        yield f"`extends` must be {' or '.join(_EXTENDABLE)}, got {content['extends']!r:.60}"
    if "prefix" in content and "extends" not in content:
        yield "`prefix` must come with `extends`, to whose names it is added"
    known, constants = VanillaTransformerConfig.__annotations__, content.get("constants")
    for name in constants if isinstance(constants, dict) else ():
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            yield f"`{name}` is no field of {VanillaTransformerConfig.__name__}{hint}"
