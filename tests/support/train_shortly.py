"""A short training run of several processes; `launch` starts it.

Usage: train_shortly.py FOLDER [--shard] [--untied]

FOLDER then holds the saved model and, one for each process, `report-RANK.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from torch.distributed.tensor import DTensor
from transformers import Seq2SeqTrainer

# `launch` starts this file by itself, outside the package of the tests.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.gradients_of_one_update import (
    build_arguments,
    build_collator,
    build_model,
    ragged_pairs,
)

from vanilla_transformer import fast_loss_vanilla_transformer


class ShardingTrainer(Seq2SeqTrainer):
    """Notes what the processes hold while they train."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trainer's own, after which the parameters are in their places."""
        loss = super().training_step(*args, **kwargs)
        self.sharded = {
            name
            for name, parameter in self.model.named_parameters()
            if isinstance(parameter, DTensor)
        }
        return loss


def train_shortly(
    folder: Path, batch_size: int, shard: bool = False, tied: bool = True
) -> dict[str, Any]:
    """Three updates, a validation and translations by `Seq2SeqTrainer`.

    `batch_size` counts the pairs of an update over all processes. `shard` splits the weights over
    the processes, as `fsdp=True` does on GPUs.
    """
    # The long target spans several chunks of the loss.
    fast_loss_vanilla_transformer.CHUNK_ROWS = 16
    arguments = build_arguments(
        folder,
        max_steps=3,
        predict_with_generate=True,
        generation_max_length=9,
        **{"fsdp": True} if shard else {},
    )
    arguments.per_device_train_batch_size = batch_size // arguments.world_size
    arguments.per_device_eval_batch_size = 16 // arguments.world_size
    if shard:
        # On a CPU accelerate drops the request in silence (accelerate/state.py, the branch of
        # `DistributedType.MULTI_GPU`); all that follows is able to shard there.
        PartialState().distributed_type = DistributedType.MULTI_GPU
    pairs = ragged_pairs()
    model = build_model(label_smoothing=0.1, tied=tied)
    trainer = ShardingTrainer(
        model=model,
        args=arguments,
        train_dataset=pairs,
        eval_dataset=pairs,
        data_collator=build_collator(model),
    )
    trainer.train()
    predictions = trainer.predict(pairs).predictions
    trainer.save_model()
    return {
        "world_size": arguments.world_size,
        "sharded": sorted(trainer.sharded),
        "parameters": sorted(name for name, _ in model.named_parameters()),
        "predictions": predictions.tolist(),
    }


def main() -> None:
    """Writes what the tests compare with a single process."""
    folder = Path(sys.argv[1])
    shard, tied = "--shard" in sys.argv, "--untied" not in sys.argv
    report = train_shortly(folder, batch_size=4, shard=shard, tied=tied)
    rank = torch.distributed.get_rank()
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
