"""Runs a script under the options of FSDP of `accelerate launch`, without GPUs.

Usage: accelerate launch ... run_sharded.py NOTE SCRIPT [OPTION ...]

`NOTE-RANK` is written when the gradients of sharded weights are clipped.
"""

import runpy
import sys
from pathlib import Path

import accelerate
from accelerate import DistributedType, PartialState
from torch.distributed.tensor import DTensor


def main() -> None:
    """Runs the script, and notes whether it has sharded all weights."""
    note, script, *options = sys.argv[1:]
    # On a CPU accelerate drops the request in silence (accelerate/state.py, the branch of
    # `DistributedType.MULTI_GPU`); all that follows is able to shard there.
    state = PartialState(cpu=True)
    state.distributed_type = DistributedType.MULTI_GPU
    clip = accelerate.Accelerator.clip_grad_norm_

    def noting_clip(self, parameters, *limits):
        parameters = list(parameters)
        if all(isinstance(parameter, DTensor) for parameter in parameters):
            Path(f"{note}-{state.process_index}").touch()
        return clip(self, parameters, *limits)

    accelerate.Accelerator.clip_grad_norm_ = noting_clip
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
