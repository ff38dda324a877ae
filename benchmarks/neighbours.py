"""Models of one size from three families, and what benchmarks do with them."""

import re
import time
from typing import Any

import torch
from transformers import (
    BatchEncoding,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.models.m2m_100.modeling_m2m_100 import shift_tokens_right
from transformers.trainer_pt_utils import LabelSmoother

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer_tools.settings import PRESETS
from vanilla_transformer_tools.training.run_record import hardware
from vanilla_transformer_tools.training.starting_model import compile_layers

FAMILIES = {
    "vanilla": (VanillaTransformerConfig, VanillaTransformerForConditionalGeneration),
    "m2m100": (M2M100Config, M2M100ForConditionalGeneration),
    "marian": (MarianConfig, MarianMTModel),
}


# What all families share: the paper's choices, and this project's special tokens.
COMMON: dict[str, Any] = {
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "scale_embedding": True,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
# Fields of a config that all families have.
COMMON_FIELDS = (
    *(COMMON.keys() - {"dropout", "attention_dropout", "activation_dropout"}),
    *("vocab_size", "d_model", "tie_word_embeddings"),
    *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
)
LOGITS_TOLERANCE = 1e-4
NEIGHBOURS = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "forced_eos_token_id": None}


def families() -> dict[str, tuple[str, dict[str, Any]]]:
    """Family and changed fields of each contender, by its name: the families themselves."""
    return {family: (family, {}) for family in FAMILIES}


def our_variants(preset: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same of the variants of our model, the default first; head sizes are doubled."""
    sizes = PRESETS[preset].config()
    twice = 2 * sizes["d_model"] // sizes["encoder_attention_heads"]
    changes: dict[str, dict[str, Any]] = {
        "default": {},
        "eager attention": {"attn_implementation": "eager"},
        "no padding": {"attn_implementation": "varlen"},
        "post-norm": {"pre_norm": False},
        "norm of embeddings": {"embedding_layer_norm": True},
        "learned positions": {"position_embedding_type": "learned"},
        "separate tables": {"share_encoder_decoder_embeddings": False},
        "untied projection": {"tie_word_embeddings": False},
        "projection with bias": {"lm_head_bias": True},
        "attention without biases": {"attention_bias": False},
        "d_k doubled": {"d_k": twice},
        "d_k and d_v doubled": {"d_k": twice, "d_v": twice},
        "talking heads, logits": {"talking_heads": "logits"},
        "talking heads, weights": {"talking_heads": "weights"},
        "talking heads, both": {"talking_heads": "both"},
    }
    return {name: ("vanilla", fields) for name, fields in changes.items()}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A freshly initialised model with ReLU and one shared embedding table.

    Args:
        family: Key of `FAMILIES`.
        changes: Fields of the config, among them its sizes.
    """
    config_class, model_class = FAMILIES[family]
    fields = COMMON if family == "vanilla" else COMMON | NEIGHBOURS
    return model_class(config_class(**fields | changes))


def sinusoids(family: str, length: int, width: int) -> torch.Tensor:
    """Positions `[length, width]` in the family's own layout, in float64.

    Ours alternates sines and cosines, as in the paper's formula. Marian puts all sines before all
    cosines. So does M2M100, which also stretches the frequencies and counts from after the padding
    id.
    """
    first, stretch = (1, width - 2) if family == "m2m100" else (0, width)
    frequencies = 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / stretch)
    angles = torch.arange(first, first + length)[:, None] * frequencies
    if family == "vanilla":
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def copy_into_m2m100(model: PreTrainedModel) -> M2M100ForConditionalGeneration:
    """M2M100 of our model's size, with our weights and positions: the same function."""
    other = build("m2m100", **{name: getattr(model.config, name) for name in COMMON_FIELDS})
    weights = {}
    for name, value in model.state_dict().items():
        fused = re.search(r"\.(qkv|kv)_proj\.", name)
        letters = fused[1] if fused else "-"
        # Rows are ordered query, key, value.
        for letter, part in zip(letters, value.chunk(len(letters)), strict=True):
            weights[name.replace(f".{letters}_proj.", f".{letter}_proj.")] = part
    other.load_state_dict(weights)
    use_our_positions(other)
    return other.eval()


def use_our_positions(model: M2M100ForConditionalGeneration) -> None:
    """Overwrites M2M100's tables, which are not saved, with the paper's positions."""
    for stack in (model.model.encoder, model.model.decoder):
        # Padding has the row of the padding id.
        rows = stack.embed_positions.weights[stack.embed_positions.padding_idx + 1 :]
        rows.copy_(sinusoids("vanilla", *rows.shape))


@torch.no_grad()
def check_same_logits(
    model: PreTrainedModel, other: PreTrainedModel, inputs: dict[str, torch.Tensor]
) -> None:
    """Refuses a model that computes another function; sources of `inputs` are also the targets.

    Raises:
        ValueError: If logits of real tokens differ by more than `LOGITS_TOLERANCE`.
    """
    logits, others = (
        one(**inputs, decoder_input_ids=inputs["input_ids"], use_cache=False).logits
        for one in (model, other)
    )
    gap = (logits - others)[inputs["attention_mask"].bool()].abs().max()
    # Written so that NaN fails.
    if not gap <= LOGITS_TOLERANCE:
        raise ValueError(
            f"The logits of {type(other).__name__} must be those of {type(model).__name__} within "
            f"{LOGITS_TOLERANCE}, got a difference of {gap:.1e}. It cannot represent this model."
        )


def padding_of(cut: list[BatchEncoding]) -> float:
    """Share of padding in batches, 0 to 1."""
    return 1 - tokens_of(cut) / sum(b["input_ids"].numel() + b["labels"].numel() for b in cut)


def tokens_of(cut: list[BatchEncoding]) -> int:
    """Source and target tokens, padding not counted."""
    return sum(int(b["attention_mask"].sum() + (b["labels"] != -100).sum()) for b in cut)


class Training:
    """One contender that trains: forward, backward and Adam over given batches.

    Args:
        family: Key of `FAMILIES`.
        changes: Fields of its config, in addition to the preset's.
        preset: Key of `PRESETS`.
        vocab_size: Entries of the embedding table.
        dtype: "float32", or the dtype of matrix products under autocast.
        label_smoothing: Inside our model, and by Trainer's smoother for the others.
        compiler: Backend that compiles the layers, once for all shapes; None: none does.
        cut: The batches.
    """

    def __init__(
        self,
        family: str,
        changes: dict[str, Any],
        preset: str,
        vocab_size: int,
        dtype: str,
        label_smoothing: float,
        compiler: str | None,
        cut: list[BatchEncoding],
    ) -> None:
        device = best_device()
        sizes = PRESETS[preset].config() | {"dropout": 0.1} | changes
        self.model = build(family, vocab_size=vocab_size, **sizes).to(device).train()
        if compiler:
            compile_layers(self.model, compiler)
        self.smoother = None
        if family == "vanilla":
            self.model.config.label_smoothing = label_smoothing
        elif label_smoothing:
            self.smoother = LabelSmoother(label_smoothing)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.dtype = getattr(torch, dtype)
        self.cut = [batch.to(device) for batch in cut]

    def run(self) -> float:
        """Seconds for one round over all batches."""
        device = self.model.device.type
        started = time.perf_counter()
        for batch in self.cut:
            with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
                loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def loss(self, batch: BatchEncoding) -> torch.Tensor:
        """The loss that Trainer would use, including label smoothing."""
        if self.smoother is None:
            return self.model(**batch).loss
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        # M2M100 has no `prepare_decoder_input_ids_from_labels`.
        config = self.model.config
        start = (config.pad_token_id, config.decoder_start_token_id)
        shifted = shift_tokens_right(batch["labels"], *start)
        return self.smoother(self.model(**inputs, decoder_input_ids=shifted), batch["labels"])


def run_steps(*setting: Any) -> int:
    """Runs one contender once; returns the bytes of weights, gradients and Adam.

    What the peak of its process adds to these is activations, logits and buffers.
    """
    contender = Training(*setting)
    contender.run()
    return 16 * contender.model.num_parameters()


def best_device() -> str:
    """Where contenders train."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def hardware_line(device: str | None = None) -> str:
    """Device, threads and versions; without a device that of training."""
    name = hardware(torch.device(device or best_device()))
    return f"{name}, torch {torch.__version__}, transformers {transformers_version}"
