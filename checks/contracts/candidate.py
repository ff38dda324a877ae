"""What checks work with: tiny models of a family, three sentence pairs, comparisons.

Shapes: B batch · S source · T target · D `d_model` · V vocabulary · N real target positions.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from neighbours import COMMON, build

# Unequal wherever they meet.
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
PAD, START, END = COMMON["pad_token_id"], COMMON["decoder_start_token_id"], COMMON["eos_token_id"]
SOURCES = [[17, 5, 9, 30, END], [8, 21, 36, 4, 11, 26, END], [13, END]]
TARGETS = [[6, 33, 19, 12, END], [25, 7, END], [10, 28, 14, END]]
PREFIXES = [[START, *target[:-1]] for target in TARGETS]
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Candidate:
    """A family of models that a check judges.

    Args:
        family: Key of `FAMILIES`.
        folder: Empty, for the check to write to.
    """

    family: str
    folder: Path

    def build(self, **changes: Any) -> PreTrainedModel:
        """A tiny model in evaluation mode whose parameters are all random, equal at each call."""
        model = build(self.family, **SIZES | changes).eval()
        generator = torch.Generator().manual_seed(522)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                # Marian's sinusoids are a frozen parameter.
                if parameter.requires_grad:
                    scale = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.3
                    noise = scale * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise + (1.0 if name.endswith("norm.weight") else 0.0))
        return model

    def reload(self, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
        """The model as it comes back from a folder."""
        model.save_pretrained(self.folder)
        return type(model).from_pretrained(self.folder, **options).eval()


Check = Callable[[Candidate], None]

# Checks of each area, entered by `contract`.
CHECKS: defaultdict[str, list[Check]] = defaultdict(list)


def contract(area: str) -> Callable[[Check], Check]:
    """Enters a check under its area."""

    def enter(check: Check) -> Check:
        CHECKS[area].append(check)
        return check

    return enter


def pad(rows: list[list[int]], side: str = "right", filler: int = PAD) -> tuple[Tensor, Tensor]:
    """Ids and mask of a batch, padded on one side."""
    rows = [row if side == "right" else row[::-1] for row in rows]
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=filler
    )
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])).long()
    return (ids, mask) if side == "right" else (ids.flip(1), mask.flip(1))


def source(side: str = "right") -> dict[str, Tensor]:
    """Three sources, S=7."""
    input_ids, attention_mask = pad(SOURCES, side)
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def pairs() -> dict[str, Tensor]:
    """Three sources with the decoder's inputs, T=5."""
    return source() | {"decoder_input_ids": pad(PREFIXES)[0]}


def labels() -> Tensor:
    """Targets of `pairs`, padded with -100."""
    return pad(TARGETS, filler=-100)[0]


def logits_alone(model: PreTrainedModel) -> Tensor:
    """Logits of all real target positions `[N, V]`, of one pair at a time."""
    logits = [
        model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([prefix])).logits[0]
        for ids, prefix in zip(SOURCES, PREFIXES, strict=True)
    ]
    return torch.cat(logits)


def translate(model: PreTrainedModel, **options: Any) -> Any:
    """What `generate` makes of the three sources in nine steps.

    M2M100 counts no position for a padding token; a check of its own asks whether one is written.
    """
    steps = {"min_new_tokens": 9, "max_new_tokens": 9}
    return model.generate(**source(), **steps, **{"suppress_tokens": [PAD, START]} | options)


def gradients_of(model: nn.Module) -> Tensor:
    """All gradients in one vector."""
    found = [parameter.grad for _, parameter in sorted(model.named_parameters())]
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def assert_close(actual: Tensor, expected: Tensor, what: str = "", tolerance: float = 1e-5) -> None:
    """Raises with the largest difference of numbers that are of order 1."""
    assert actual.shape == expected.shape, f"{what}shape {[*actual.shape]}, not {[*expected.shape]}"
    gap = (actual.double() - expected.double()).abs().max().item()
    # Not `gap > tolerance`, which NaN would pass.
    assert gap <= tolerance, f"{what}off by {gap:.2g}"
