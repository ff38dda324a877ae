"""Weights as ONNX graphs in the form of Optimum and transformers.js, and what runs them."""

import json
import logging
import warnings
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.utils import CONFIG_NAME

from vanilla_transformer.configuration_vanilla_transformer import CHOICES
from vanilla_transformer_tools.exports.expressed import HEADS, SIZES, SWITCHES, unexpressed
from vanilla_transformer_tools.exports.to_transformers import config_of_class
from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.text.batches import padded
from vanilla_transformer_tools.translation.engine import Hypothesis
from vanilla_transformer_tools.translation.generation_settings import never_generated

try:
    import onnx  # noqa: F401
    import onnxruntime
    import onnxscript  # noqa: F401
except ImportError as error:
    raise ImportError(
        "The export to ONNX needs the packages `onnx`, `onnxruntime` and `onnxscript`. "
        "Install them: pip install -e '.[export]'"
    ) from error

logger = logging.getLogger(__name__)

# The newest that torch's exporter writes without converting, and onnxruntime reads since 1.14.
OPSET = 18
GRAPHS_FOLDER = "onnx"
ENCODER, DECODER = "encoder_model", "decoder_model_merged"
# What the graphs compute; another field may need more than the inputs that they have. All choices
# are modules of the model, which are traced.
_EXPRESSED = SIZES | SWITCHES | HEADS
# A graph file holds at most 2 GiB; larger weights are in a file beside it.
_LARGEST_GRAPH = 2**31 - 2**20


class _DecoderGraph(nn.Module):
    """Target tokens that follow a cache to logits and the longer cache.

    The first step brings an empty cache, and later ones the keys and values of the whole source:
    only source positions that the cache lacks are projected. One graph so serves all steps.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        encoder_attention_mask: Tensor,
        input_ids: Tensor,
        encoder_hidden_states: Tensor,
        past_key_values: list[Tensor],
    ) -> list[Tensor]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        new_source = encoder_hidden_states[:, past_key_values[2].shape[2] :]
        for index, layer in enumerate(self.model.model.decoder.layers):
            key, value, *source = past_key_values[4 * index : 4 * index + 4]
            cache.self_attention_cache.update(key, value, index)
            new = layer.encoder_attn.source_keys_and_values(new_source, None)
            whole = [torch.cat(parts, dim=2) for parts in zip(source, new, strict=True)]
            cache.cross_attention_cache.update(*whole, index)
            cache.is_updated[index] = True
        hidden_states = self.model.model.decoder(
            input_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=cache,
        ).last_hidden_state
        halves = cache.self_attention_cache.layers, cache.cross_attention_cache.layers
        layers = chain.from_iterable(zip(*halves, strict=True))
        present = (tensor for layer in layers for tensor in (layer.keys, layer.values))
        return [self.model.lm_head(hidden_states), *present]


def refuse_unexpressed(model: PreTrainedModel) -> None:
    """Rejects a model if a field of its config changes what the graphs would compute."""
    if faults := unexpressed(model.config, _EXPRESSED, CHOICES):
        raise ValueError("\n".join(["The ONNX export cannot hold this model:", *faults]))


def export_onnx(model: PreTrainedModel, folder: Path) -> None:
    """Writes the graphs of a model in float32 and eval mode, with eager attention, below a folder.

    `refuse_unexpressed` says whether they compute what the model does.
    """
    # transformers.js looks for this name to make the empty cache.
    batch = torch.export.Dim("batch_size", min=1)
    source, target, past_source, past = (
        torch.export.Dim(f"{side}_sequence_length", min=1)
        for side in ("encoder", "decoder", "past_encoder", "past_decoder")
    )
    # A length of 1, or two that differ by 1, would become part of the graph.
    input_ids = torch.ones((2, 9), dtype=torch.long)
    attention_mask = torch.ones_like(input_ids)
    with torch.no_grad():
        hidden_states = model.model.encoder(input_ids, attention_mask).last_hidden_state
        cache = _example_cache(model, hidden_states)
    lengths = {"decoder": past, "encoder": past_source}
    cache_shapes = [{0: batch, 2: lengths[name.split(".")[2]]} for name in cache]
    graphs = folder / GRAPHS_FOLDER
    graphs.mkdir(exist_ok=True)
    _export(
        model.model.encoder,
        graphs / f"{ENCODER}.onnx",
        (input_ids, attention_mask),
        ({0: batch, 1: source}, {0: batch, 1: source}),
        ["input_ids", "attention_mask"],
        ["last_hidden_state"],
    )
    _export(
        _DecoderGraph(model),
        graphs / f"{DECODER}.onnx",
        (attention_mask, torch.ones((2, 5), dtype=torch.long), hidden_states, [*cache.values()]),
        ({0: batch, 1: source}, {0: batch, 1: target}, {0: batch, 1: source}, cache_shapes),
        [
            *("encoder_attention_mask", "input_ids", "encoder_hidden_states"),
            *(f"past_key_values{name}" for name in cache),
        ],
        ["logits", *(f"present{name}" for name in cache)],
    )


def _example_cache(model: PreTrainedModel, hidden_states: Tensor) -> dict[str, Tensor]:
    """Keys and values of a cache by the ends of their names, such as `.0.decoder.key`."""
    layers = model.model.decoder.layers
    shapes = layers[0].encoder_attn.source_keys_and_values(hidden_states, None)
    lengths = {"decoder": 4, "encoder": 3}
    tensors = product(range(len(layers)), lengths, zip(("key", "value"), shapes, strict=True))
    return {
        f".{index}.{side}.{part}": torch.zeros(2, like.shape[1], lengths[side], like.shape[3])
        for index, side, (part, like) in tensors
    }


def _export(
    graph: nn.Module,
    path: Path,
    arguments: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    input_names: list[str],
    output_names: list[str],
) -> None:
    logger.info("writing %s", path.name)
    # The table of tied embeddings is in the decoder twice.
    numbers = sum(one.numel() for one in graph.state_dict().values())
    with torch.no_grad(), warnings.catch_warnings():
        # Warnings of torch's exporter about its own code.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph.eval(),
            arguments,
            str(path),
            input_names=input_names,
            output_names=output_names,
            dynamic_shapes=dynamic_shapes,
            opset_version=OPSET,
            dynamo=True,
            external_data=4 * numbers > _LARGEST_GRAPH,
            verbose=False,
        )


def save_interface(model: PreTrainedModel, folder: Path) -> None:
    """Writes the `config.json` by which other software knows how to run the graphs.

    It names the class `marian`, the encoder-decoder whose files and tensors have these names. What
    is computed is in the graphs alone.
    """
    config = config_of_class(model, "marian").to_diff_dict()
    config["architectures"] = ["MarianMTModel"]
    config["transformers.js_config"] = {"dtype": "fp32"}
    write_lines(folder / CONFIG_NAME, [json.dumps(config, indent=2)])


class OnnxModel:
    """Runs the graphs in the folder of an export with onnxruntime, as its check needs it."""

    def __init__(self, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.encoder, self.decoder = (
            onnxruntime.InferenceSession(
                str(folder / GRAPHS_FOLDER / f"{name}.onnx"), options, ["CPUExecutionProvider"]
            )
            for name in (ENCODER, DECODER)
        )
        self.generation_config = GenerationConfig.from_pretrained(folder)

    def translate(self, sources: list[list[int]], limits: list[int]) -> list[Hypothesis]:
        """The greedy translations, decoded one token at a time with the cache, as by every search.

        Their scores are mean log-probabilities over what may be generated.
        """
        config = self.generation_config
        banned, ends = never_generated(config), np.ravel(config.eos_token_id).tolist()
        input_ids, mask = (one.numpy() for one in padded(sources, config.pad_token_id))
        (encoded,) = self.encoder.run(None, {"input_ids": input_ids, "attention_mask": mask})
        source = {"encoder_attention_mask": mask, "encoder_hidden_states": encoded}
        past = {
            node.name: np.zeros((len(sources), node.shape[1], 0, node.shape[3]), np.float32)
            for node in self.decoder.get_inputs()
            if node.name.startswith("past_key_values.")
        }
        tokens = torch.full((len(sources), 1), config.decoder_start_token_id)
        has_ended = torch.zeros_like(tokens, dtype=torch.bool)
        steps: list[tuple[Tensor, Tensor]] = []
        while len(steps) < max(limits) and not has_ended.all():
            inputs = {"input_ids": tokens.numpy(), **source, **past}
            logits, *present = self.decoder.run(None, inputs)
            past = dict(zip(past, present, strict=True))
            scores = torch.from_numpy(logits[:, -1])
            scores[:, banned] = -torch.inf
            best, tokens = scores.log_softmax(-1).max(-1, keepdim=True)
            steps.append((tokens, best))
            has_ended |= torch.isin(tokens, torch.tensor(ends))
        outputs, log_probs = (torch.cat(part, 1).tolist() for part in zip(*steps, strict=True))
        hypotheses = []
        for output, row, limit in zip(outputs, log_probs, limits, strict=True):
            found = Hypothesis.of(output[:limit], ends)
            length = len(found.ended)
            hypotheses.append(replace(found, score=sum(row[:length]) / length))
        return hypotheses
