"""Runs a script under the options of FSDP of `accelerate launch`, without GPUs.

Usage: accelerate launch ... run_sharded.py FOLDER SCRIPT [OPTION ...]

`FOLDER-RANK` is written once a model is sharded.
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
    state = PartialState()
    state.distributed_type = DistributedType.MULTI_GPU
    prepare = accelerate.Accelerator.prepare

    def noting_prepare(self, *objects, **settings):
        prepared = prepare(self, *objects, **settings)
        model = prepared[0] if isinstance(prepared, tuple) else prepared
        weights = list(model.parameters())
        if all(isinstance(weight, DTensor) for weight in weights):
            Path(f"{note}-{state.process_index}").write_text(str(len(weights)))
        return prepared

    accelerate.Accelerator.prepare = noting_prepare
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
