"""Several processes that train together: how long they wait for each other."""

from torch import distributed
from transformers import TrainingArguments


def limit_waiting(arguments: TrainingArguments) -> None:
    """Makes gloo follow `--ddp_timeout`, which Trainer drops with `--use_cpu`.

    Otherwise processes would wait half an hour for a machine that is gone.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_backend() == "gloo":
        from torch.distributed.distributed_c10d import _set_pg_timeout

        _set_pg_timeout(arguments.ddp_timeout_delta)
