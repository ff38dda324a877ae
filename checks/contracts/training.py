"""The loss and its gradients, through the model and through `Seq2SeqTrainer`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from vanilla_transformer import VanillaTransformerTokenizer

from .candidate import (
    END,
    START,
    Candidate,
    assert_close,
    contract,
    gradients_of,
    labels,
    pad,
    pairs,
    source,
)


class KeepGradients(TrainerCallback):
    """Copies what the first update is made from."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        """Runs when all batches have added their share."""
        self.gradients = gradients_of(model)


def ragged_pairs() -> list[dict[str, list[int]]]:
    """Sixteen pairs with sources of 2 to 10 tokens and targets of 2 to 5, but one of 50."""
    lengths = [(2 + 5 * index % 9, 50 if index == 0 else 2 + 3 * index % 4) for index in range(16)]
    return [
        {
            "input_ids": [*(4 + (7 * i) % 33 for i in range(source_length - 1)), END],
            "labels": [*(4 + (5 * i) % 33 for i in range(target_length - 1)), END],
        }
        for source_length, target_length in lengths
    ]


def trainer(candidate: Candidate, model: PreTrainedModel, **changes: Any) -> Seq2SeqTrainer:
    """The unmodified `Seq2SeqTrainer` with Transformers' collator over the ragged pairs."""
    arguments: dict[str, Any] = {
        "output_dir": str(candidate.folder),
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    # It only lends its padding id.
    tokenizer = VanillaTransformerTokenizer.train(["a b"], kind="word", vocab_size=6)
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(**arguments | changes),
        train_dataset=ragged_pairs(),
        eval_dataset=ragged_pairs(),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )


def gradients_of_one_update(
    candidate: Candidate, batch_size: int, accumulated: int, **changes: Any
) -> Tensor:
    """Gradients that Trainer takes from the ragged pairs, cut into batches."""
    keeper = KeepGradients()
    run = trainer(
        candidate,
        candidate.build(),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulated,
        **changes,
    )
    run.add_callback(keeper)
    run.train()
    return keeper.gradients


def plain_loss(model: PreTrainedModel, label_smoothing: float = 0.0) -> Tensor:
    """Mean by torch over all targets of the ragged pairs, in one piece."""
    sources, targets = ([row[key] for row in ragged_pairs()] for key in ("input_ids", "labels"))
    input_ids, attention_mask = pad(sources)
    prefixes = pad([[START, *target[:-1]] for target in targets])[0]
    logits = model(
        input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=prefixes
    ).logits
    wanted = pad(targets, filler=-100)[0]
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=label_smoothing)


@contract("Loss")
def ignores_masked_labels(candidate: Candidate) -> None:
    """Decoder inputs are made from `labels`, and those of -100 do not count."""
    model = candidate.build()
    expected = F.cross_entropy(model(**pairs()).logits.flatten(0, 1), labels().flatten())
    for training in (False, True):
        assert_close(model.train(training)(**source(), labels=labels()).loss, expected)


@contract("Loss")
def accumulates_exactly(candidate: Candidate) -> None:
    """Batches of 16, 4 x 4 and 2 x 8, accumulated by Trainer, give the same gradients."""
    whole, *parts = (
        gradients_of_one_update(candidate, *split) for split in ((16, 1), (4, 4), (2, 8))
    )
    norms = " / ".join(f"{gradients.norm():.3g}" for gradients in (whole, *parts))
    for part in parts:
        assert (part - whole).abs().max() <= 1e-5 * whole.abs().max(), f"gradient norms {norms}"


@contract("Loss")
def smooths_through_trainer(candidate: Candidate) -> None:
    """Trainer's `label_smoothing_factor` gives the gradients of torch's smoothed loss."""
    model = candidate.build()
    plain_loss(model, label_smoothing=0.2).backward()
    expected = gradients_of(model)
    for split in ((16, 1), (4, 4)):
        gradients = gradients_of_one_update(candidate, *split, label_smoothing_factor=0.2)
        assert_close(gradients / expected.norm(), expected / expected.norm())


class LargestTensor(TorchDispatchMode):
    """Notes how many entries the largest tensor has that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operation."""
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return result


@contract("Loss")
def never_holds_all_logits(candidate: Candidate) -> None:
    """A training step over 1024 targets, vocabulary 2000, never holds all logits at once."""
    model = candidate.build(vocab_size=2000).train()
    ids = torch.randint(4, 2000, (64, 16), generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        model(input_ids=ids, labels=ids).loss.backward()
    assert largest.entries < ids.numel() * 2000, f"a tensor of {largest.entries:,} entries"


@contract("Loss")
def evaluates_through_trainer(candidate: Candidate) -> None:
    """Trainer's evaluation gives the loss, with `predict_with_generate` too."""
    model = candidate.build()
    expected = plain_loss(model)
    for generate in (False, True):
        run = trainer(candidate, model, predict_with_generate=generate)
        found = run.evaluate(**{"max_length": 9} if generate else {})
        assert_close(torch.tensor(found["eval_loss"]), expected.float())
