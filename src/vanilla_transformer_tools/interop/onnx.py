"""Weights as ONNX graphs, and a small reader that runs them step by step in onnxruntime."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from vanilla_transformer.generation_vanilla_transformer import padded
from vanilla_transformer_tools.translation.search import refuse_torch_only

Array = NDArray[Any]

# The newest that torch's exporter writes without converting, and onnxruntime reads since 1.14.
OPSET = 18
ENCODER_FILE, DECODER_FILE = "encoder_model.onnx", "decoder_model.onnx"


class _EncoderGraph(nn.Module):
    """Sources to the keys and values that the decoder's cross-attention reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        hidden_states = self.model.model.encoder(input_ids, attention_mask).last_hidden_state
        cache: list[Tensor] = []
        for layer in self.model.model.decoder.layers:
            cache += layer.encoder_attn.source_keys_and_values(hidden_states, None)
        return cache


class _DecoderGraph(nn.Module):
    """Target tokens that follow a cache to logits and the longer cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        decoder_input_ids: Tensor,
        attention_mask: Tensor,
        source_cache: list[Tensor],
        target_cache: list[Tensor],
    ) -> list[Tensor]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for index in range(len(self.model.model.decoder.layers)):
            cache.self_attention_cache.update(*target_cache[2 * index : 2 * index + 2], index)
            cache.cross_attention_cache.update(*source_cache[2 * index : 2 * index + 2], index)
            cache.is_updated[index] = True
        hidden_states = self.model.model.decoder(
            decoder_input_ids,
            # Of the encoder's output the decoder uses only the length.
            encoder_hidden_states=source_cache[0][:, 0],
            encoder_attention_mask=attention_mask,
            past_key_values=cache,
        ).last_hidden_state
        longer = [
            tensor
            for layer in cache.self_attention_cache.layers
            for tensor in (layer.keys, layer.values)
        ]
        return [self.model.lm_head(hidden_states), *longer]


def export_onnx(model: PreTrainedModel, folder: Path) -> None:
    """Writes `encoder_model.onnx` and `decoder_model.onnx`, in opset 18, and their `*.onnx.data`.

    The weights are in the `.data` files, because a graph file holds at most 2 GiB; keep the files
    together. `OnnxModel` describes inputs and outputs.

    Args:
        model: In float32, in eval mode; its attention must be `eager`.
        folder: Where the files go.

    Raises:
        ImportError: If `onnx` or `onnxscript` are not installed.
        ValueError: If the model has another attention.
    """
    if model.config._attn_implementation != "eager":
        raise ValueError(
            "The export to ONNX needs `attn_implementation='eager'`, got "
            f"{model.config._attn_implementation!r}. Load the model with it."
        )
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "The export to ONNX needs the packages `onnx` and `onnxscript`. "
            "Install them: pip install -e '.[export]'"
        ) from error
    batch, source, target, past = (
        torch.export.Dim(name, min=1) for name in ("batch", "source", "target", "past")
    )
    # None of the lengths may be 1, which would become part of the graph.
    input_ids = torch.ones((2, 3), dtype=torch.long)
    attention_mask = torch.ones_like(input_ids)
    layers = range(model.config.decoder_layers)
    source_names = [f"source.{layer}.{part}" for layer in layers for part in ("key", "value")]
    past_names = [name.replace("source", "past") for name in source_names]
    present_names = [name.replace("source", "present") for name in source_names]
    with torch.no_grad():
        source_cache = _EncoderGraph(model)(input_ids, attention_mask)
    target_cache = [torch.zeros(2, cached.shape[1], 4, cached.shape[3]) for cached in source_cache]
    _export(
        _EncoderGraph(model),
        folder / ENCODER_FILE,
        (input_ids, attention_mask),
        ({0: batch, 1: source}, {0: batch, 1: source}),
        ["input_ids", "attention_mask"],
        source_names,
    )
    _export(
        _DecoderGraph(model),
        folder / DECODER_FILE,
        (torch.full((2, 5), 1), attention_mask, source_cache, target_cache),
        (
            {0: batch, 1: target},
            {0: batch, 1: source},
            [{0: batch, 2: source} for _ in source_cache],
            [{0: batch, 2: past} for _ in target_cache],
        ),
        ["decoder_input_ids", "attention_mask", *source_names, *past_names],
        ["logits", *present_names],
    )


def _export(
    graph: nn.Module,
    path: Path,
    arguments: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    input_names: list[str],
    output_names: list[str],
) -> None:
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
            external_data=True,
            verbose=False,
        )


class OnnxModel:
    """Reads an exported folder with onnxruntime, as the check of an export needs it.

    The graphs, for readers in other languages (B batch, S source, T new target tokens, P target
    tokens in the cache, H heads, E head size, V vocabulary; i counts the decoder's layers):

    - `encoder_model.onnx`: `input_ids` and `attention_mask` (1 = real token), int64 `[B, S]`, give
      `source.i.key` and `source.i.value` `[B, H, S, E]`.
    - `decoder_model.onnx`: `decoder_input_ids` int64 `[B, T]`, the same `attention_mask`, the
      `source.*` of the encoder, and `past.i.key` and `past.i.value` `[B, H, P, E]`, give `logits`
      `[B, T, V]` and `present.i.key` and `present.i.value` `[B, H, P + T, E]`, which are the next
      step's `past.*`. The first step has P = 0 and begins with the start token.

    B, S, T and P may change from call to call. The ids of the special tokens, those that are never
    generated (`bad_words_ids`, `suppress_tokens`), and the one that each output begins with, if
    there is one (`forced_bos_token_id`), are in `generation_config.json`.

    Args:
        folder: Folder of the exported model.

    Raises:
        ImportError: If `onnxruntime` is not installed.
        ValueError: If the folder is not one that our export made, or is damaged, or its generation
            config asks for more than this reader does.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                "Running an ONNX export needs the package `onnxruntime`. "
                "Install it: pip install -e '.[export]'"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self.encoder, self.decoder = (
                onnxruntime.InferenceSession(
                    str(Path(folder) / name), options, ["CPUExecutionProvider"]
                )
                for name in (ENCODER_FILE, DECODER_FILE)
            )
        # onnxruntime's errors have no base class of their own.
        except Exception as error:
            raise ValueError(
                f"onnxruntime {onnxruntime.__version__} cannot load {str(folder)!r}: "
                f"{' '.join(str(error).split())} Export the model again."
            ) from error
        self.generation_config = GenerationConfig.from_pretrained(folder)
        refuse_torch_only(self.generation_config)

    def force(self, sources: list[list[int]], targets: list[list[int]]) -> Array:
        """Logits of the next token at each position of given targets, `[B, T, V]`.

        They are decoded one token at a time with the cache, as every search does it.

        Args:
            sources: Ids with `</s>`.
            targets: Ids after the start token; the last one is not read.
        """
        config = self.generation_config
        input_ids, mask = padded(sources, config.pad_token_id)
        encoded = {"attention_mask": mask.numpy()}
        names = [output.name for output in self.encoder.get_outputs()]
        outputs = self.encoder.run(names, {"input_ids": input_ids.numpy(), **encoded})
        encoded |= dict(zip(names, outputs, strict=True))
        past = {
            node.name: np.zeros((len(sources), node.shape[1], 0, node.shape[3]), np.float32)
            for node in self.decoder.get_inputs()
            if node.name.startswith("past.")
        }
        shifted = [[config.decoder_start_token_id, *target[:-1]] for target in targets]
        steps = []
        for tokens in padded(shifted, config.pad_token_id)[0].numpy().T:
            inputs = {"decoder_input_ids": tokens[:, None], **encoded, **past}
            logits, *present = self.decoder.run(None, inputs)
            past = dict(zip(past, present, strict=True))
            steps.append(logits)
        return np.concatenate(steps, axis=1)
