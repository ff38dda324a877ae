"""Adapters (LoRA, Hu et al. 2021): added to a saved model, and merged into it when it is saved."""

from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from vanilla_transformer_tools.settings import LORA_TARGET_MODULES, TrainSettings
from vanilla_transformer_tools.training.checkpoints import ADAPTER_FOLDER

# PEFT's own names.
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
# PEFT's wrapper puts this before the names of a model's tensors.
_ADAPTER_PREFIX = "base_model.model."
_ADAPTER = "default"


def add_lora(model: PreTrainedModel, settings: TrainSettings) -> None:
    """Gives linear layers adapters, which alone are trained.

    Raises:
        ValueError: If a name of a module matches nothing.
    """
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
