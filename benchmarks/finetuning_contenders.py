"""A class of Transformers and what this package imports from it, both under `Seq2SeqTrainer`."""

import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

from neighbours import hardware_line
from vanilla_transformer_tools.interop.importing import convert

# The class itself, and what it becomes here.
KINDS = ("in-tree", "vanilla")


def _stacks(layers: int, heads: int, ffn_dim: int) -> dict[str, int | float]:
    """Sizes of both stacks; every layer is run."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": ffn_dim, "layerdrop": 0.0}
    return {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()
    }


_M2M100 = (M2M100Config, M2M100ForConditionalGeneration)
SIZES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "opus": (
        MarianConfig,
        MarianMTModel,
        # OPUS-MT's own activation and ids; the tables have 58,101 entries.
        {"vocab_size": 58_101, "d_model": 512, "scale_embedding": True}
        | {"activation_function": "swish", "max_position_embeddings": 512}
        | {"pad_token_id": 58_100, "decoder_start_token_id": 58_100, "eos_token_id": 0}
        | _stacks(6, 8, 2048),
    ),
    "nllb": (*_M2M100, {"vocab_size": 256_206, "d_model": 1024} | _stacks(2, 16, 4096)),
    "minute": (*_M2M100, {"vocab_size": 500, "d_model": 32} | _stacks(2, 2, 64)),
}
# Tokens of a side, the last one included.
_SHORTEST, _LONGEST = 8, 48
_FIRST_WORD = 4
_LEARNING_RATE = 1e-4


def build(size: str, kind: str, *, drops: bool) -> PreTrainedModel:
    """A model with random weights, the same for both kinds.

    Args:
        size: Key of `SIZES`.
        kind: Of `KINDS`.
        drops: Whether the dropout of the class's config stays.
    """
    config_class, model_class, fields = SIZES[size]
    without = {} if drops else dict.fromkeys(("dropout", "attention_dropout"), 0.0)
    torch.manual_seed(0)
    model = model_class(config_class(**fields, **without))
    if kind == "vanilla":
        model = convert(model)
        if model.lm_head.bias is not None:
            # Marian's bias is a constant; ours is trained unless it is frozen.
            model.lm_head.bias.requires_grad = False
    return model


def describe(size: str) -> str:
    """Class and sizes, and where it was measured."""
    _, model_class, fields = SIZES[size]
    layers = f"{fields['encoder_layers']}+{fields['decoder_layers']} layers"
    sizes = f"d_model {fields['d_model']}, vocabulary {fields['vocab_size']:,}"
    return f"{model_class.__name__}, {layers}, {sizes}, float32; {hardware_line()}"


def random_pairs(size: str, count: int) -> Dataset:
    """Pairs of random tokens, whose sides have 8 to 48 tokens."""
    fields = SIZES[size][2]
    end = fields.get("eos_token_id", 2)
    generator = torch.Generator().manual_seed(0)

    def side() -> list[int]:
        length = torch.randint(_SHORTEST, _LONGEST + 1, (), generator=generator)
        # The last id is Marian's padding.
        words = (_FIRST_WORD, fields["vocab_size"] - 1)
        return [*torch.randint(*words, (length - 1,), generator=generator).tolist(), end]

    return Dataset.from_list([{"input_ids": side(), "labels": side()} for _ in range(count)])


def tokens_of(pairs: Dataset) -> int:
    """Source and target tokens."""
    return sum(len(side) for name in ("input_ids", "labels") for side in pairs[name])


@dataclass
class Losses(TrainerCallback):
    """Loss and norm of the gradient of each update, and the seconds that training took."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stops it."""
        self.seconds = time.perf_counter() - self._started

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Remembers a report; the last one is of the whole run."""
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))


class Contender:
    """A model that is trained on the same pairs in each round.

    Args:
        size: Key of `SIZES`.
        kind: Of `KINDS`.
        pairs: Of a round.
        pairs_per_update: Of a batch.
        parts: In which a batch is accumulated.
        drops: Whether the dropout of the class's config stays.
    """

    def __init__(
        self,
        size: str,
        kind: str,
        pairs: Dataset,
        pairs_per_update: int,
        parts: int = 1,
        drops: bool = True,
    ) -> None:
        self.report = Losses()
        model = build(size, kind, drops=drops)
        padding = model.config.pad_token_id
        arguments = Seq2SeqTrainingArguments(
            # Nothing is saved.
            tempfile.gettempdir(),
            max_steps=len(pairs) // pairs_per_update,
            per_device_train_batch_size=pairs_per_update // parts,
            gradient_accumulation_steps=parts,
            train_sampling_strategy="sequential",
            learning_rate=_LEARNING_RATE,
            lr_scheduler_type="constant",
            # Norms are reported, and gradients are left as they are.
            max_grad_norm=1e9,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        self.trainer = Seq2SeqTrainer(
            model,
            arguments,
            data_collator=lambda rows: pad(rows, padding),
            train_dataset=pairs,
            callbacks=[self.report],
        )
        self.trainer.remove_callback(PrinterCallback)

    def run(self) -> float:
        """Seconds for one round over all pairs."""
        self.trainer.train()
        return self.report.seconds


def pad(rows: list[dict[str, list[int]]], padding: int) -> dict[str, torch.Tensor]:
    """A batch, padded on the right."""

    def stack(name: str, value: int) -> torch.Tensor:
        sides = [torch.tensor(one[name]) for one in rows]
        return pad_sequence(sides, batch_first=True, padding_value=value)

    input_ids = stack("input_ids", padding)
    mask = (input_ids != padding).long()
    return {"input_ids": input_ids, "attention_mask": mask, "labels": stack("labels", -100)}


def run_round(size: str, kind: str, pairs: Dataset, pairs_per_update: int) -> int:
    """Runs one contender once; returns the bytes of trained weights, gradients and Adam."""
    contender = Contender(size, kind, pairs, pairs_per_update)
    contender.run()
    return 16 * contender.trainer.model.num_parameters(only_trainable=True)


def losses_of(size: str, kind: str, pairs: Dataset, pairs_per_update: int, parts: int) -> Losses:
    """Losses of a run without dropout, from the weights that both kinds begin with."""
    set_seed(0)
    contender = Contender(size, kind, pairs, pairs_per_update, parts, drops=False)
    contender.run()
    return contender.report
