"""Compiling the layers and the loss of a model, once for batches of all shapes."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from vanilla_transformer.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compiles each layer of encoder and decoder in place, and on a GPU softmax and loss.

    Layers of one kind share two graphs, for batches with padding and without, whose sizes are free.
    What depends on the data stays outside: masks, positions. Only training runs them: with those
    of evaluations and searches they would be more than the eight that torch keeps of a function.
    Names of parameters stay as they are.

    Args:
        model: Ours, or another one of Transformers.
        backend: Of `torch.compile`.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            _compile_for_training(module, backend)
        elif isinstance(module, VanillaTransformerForConditionalGeneration):
            module.model.computing.loss_compiler = backend


def _compile_for_training(layer: nn.Module, backend: str) -> None:
    """Does what `layer.compile` does, for calls in training."""
    compiled = torch.compile(layer._call_impl, dynamic=True, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if layer.training else layer._call_impl)(*args, **kwargs)

    layer._compiled_call_impl = call
