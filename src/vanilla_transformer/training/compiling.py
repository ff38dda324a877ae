"""Compiling the layers of a model, once for batches of all shapes."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compiles each layer of encoder and decoder in place.

    Layers of one kind share a graph, whose sizes are free. What depends on the data stays outside:
    masks, batches without padding, positions, the loss. Names of parameters stay as they are.

    Args:
        model: Ours, or another one of Transformers.
        backend: Of `torch.compile`.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True, backend=backend)
