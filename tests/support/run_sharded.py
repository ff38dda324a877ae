"""Runs a script under the options of FSDP of `accelerate launch`, without GPUs.

Usage: accelerate launch ... run_sharded.py NOTE SCRIPT [OPTION ...]

`NOTE-RANK` is written when the gradients of sharded weights are clipped.
"""

import os
import runpy
import sys
from pathlib import Path

from accelerate import Accelerator, DistributedType, PartialState
from torch.distributed.tensor import DTensor


def main() -> None:
    """Runs the script, and notes whether all weights are sharded."""
    note, script, *options = sys.argv[1:]
    start, clip = Accelerator.__init__, Accelerator.clip_grad_norm_

    def sharding_start(self, *settings, **named):
        # On a CPU accelerate drops the request in silence (accelerate/state.py, the branch of
        # `DistributedType.MULTI_GPU`); all that follows is able to shard there.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        start(self, *settings, **named)

    def noting_clip(self, parameters, *limits):
        parameters = list(parameters)
        if all(isinstance(parameter, DTensor) for parameter in parameters):
            Path(f"{note}-{self.process_index}").touch()
        return clip(self, parameters, *limits)

    Accelerator.__init__ = sharding_start
    Accelerator.clip_grad_norm_ = noting_clip
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")
    # What is left of the script may keep gloo's threads alive, as the meshes of FSDP do. One that
    # drops a tensor while Python ends would abort the process.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
