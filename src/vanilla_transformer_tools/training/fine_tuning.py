"""The trained part of a saved model: all of it, all but frozen weights, or an added adapter.

An adapter (LoRA, Hu et al. 2021) adds a product of two narrow matrices to each linear map; only
these are trained, and at the end they are merged into the map.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from accelerate import PartialState
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from vanilla_transformer_tools.settings import LORA_TARGET_MODULES, TrainSettings

# PEFT's own names, in a folder beside the merged model.
ADAPTER_FOLDER = "adapter"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# PEFT's wrapper puts this before the names of a model's tensors.
_ADAPTER_PREFIX = "base_model.model."
_ADAPTER = "default"

# Words of --freeze, each for the parameters whose names match; those of embeddings match first.
_PARTS = {
    "embeddings": re.compile(r"(.*\.)?(shared|embed_\w+)\."),
    "encoder": re.compile(r"model\.encoder\."),
    "decoder": re.compile(r"model\.decoder\."),
}
# Names that an error gives as examples.
_EXAMPLES = 4


def choose_parameters(model: PreTrainedModel, settings: TrainSettings) -> None:
    """Makes the weights trainable that the settings ask for.

    Args:
        model: Changed in place: parameters are frozen, or linear layers get adapters.
        settings: Settings of the run.

    Raises:
        ValueError: If a pattern or a name of a module matches nothing, or all is frozen.
    """
    if settings.freeze:
        _freeze(model, settings.freeze)
    if settings.peft:
        _add_lora(model, settings)


def _freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    # A matrix that is tied has several names.
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    all_names = sorted(name for tied in names.values() for name in tied)
    faults = [
        f"--freeze {pattern!r} matches no parameter. Take a word, {' '.join(_PARTS)}, or a pattern "
        f"of names such as {_examples(all_names)}."
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
    """Whether a parameter matches a word or a pattern of --freeze."""
    if pattern in _PARTS:
        return pattern == next((part for part, names in _PARTS.items() if names.match(name)), None)
    return fnmatchcase(name, pattern)


def _examples(names: Sequence[str]) -> str:
    return ", ".join(names[:: -(-len(names) // _EXAMPLES)])


def _add_lora(model: PreTrainedModel, settings: TrainSettings) -> None:
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    targets = settings.lora_target_modules or LORA_TARGET_MODULES
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    # The output projection is often the table of the embeddings.
    linear.discard("lm_head")
    if unknown := set(targets) - linear:
        raise ValueError(
            f"--lora_target_modules must name linear layers, {' '.join(sorted(linear))}, got "
            f"{' '.join(sorted(unknown))}."
        )
    config = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(targets),
    )
    # Not PEFT's wrapper: its checkpoints hold no weights of the model, so it would need a way of
    # its own to average, load and compare them.
    inject_adapter_in_model(config, model, _ADAPTER)


def merge_adapter(model: PreTrainedModel, folder: Path, base: str | None) -> None:
    """Saves the adapter of a model in PEFT's format and merges it; does nothing if there is none.

    Args:
        model: Afterwards it is one without adapters, and computes the same.
        folder: Folder of the model; the adapter gets a folder in it.
        base: Folder or Hub name of the model that was adapted.
    """
    if not hasattr(model, "peft_config"):
        return
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Without a look at the Hub for another size of the vocabulary.
    adapter = get_peft_model_state_dict(model, adapter_name=_ADAPTER, save_embedding_layers=False)
    config = model.peft_config[_ADAPTER]
    config.inference_mode = True
    # A folder may name its user.
    config.base_model_name_or_path = Path(base).name if base and Path(base).is_dir() else base
    (folder / ADAPTER_FOLDER).mkdir()
    config.save_pretrained(folder / ADAPTER_FOLDER)
    save_file(
        {f"{_ADAPTER_PREFIX}{name}": tensor.contiguous() for name, tensor in adapter.items()},
        folder / ADAPTER_FOLDER / _ADAPTER_WEIGHTS,
        metadata={"format": "pt"},
    )
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    del model.peft_config
