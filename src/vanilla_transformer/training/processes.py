"""Several processes that train together: how long they wait for each other."""

from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout
from transformers import TrainingArguments


def limit_waiting(arguments: TrainingArguments) -> None:
    """Makes gloo follow `--ddp_timeout`, which Trainer drops with `--use_cpu`.

    Otherwise processes would wait half an hour for a machine that is gone.
    """
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        _set_pg_timeout(arguments.ddp_timeout_delta)
