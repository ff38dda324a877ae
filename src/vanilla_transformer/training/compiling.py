"""Compiling the layers and the loss of a model, once for batches of all shapes."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from vanilla_transformer.modeling.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compiles each layer of encoder and decoder in place, and on a GPU softmax and loss.

    Layers of one kind share a graph, whose sizes are free. What depends on the data stays outside:
    masks, batches without padding, positions. Names of parameters stay as they are.

    Args:
        model: Ours, or another one of Transformers.
        backend: Of `torch.compile`.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True, backend=backend)
        elif isinstance(module, VanillaTransformerForConditionalGeneration):
            module.loss_compiler = backend
