"""Starts a helper script of the tests in several processes."""

import gc
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def launch(
    script: str, *arguments: str | Path, processes: int = 2, launcher: Sequence[str] = ()
) -> str:
    """Runs a script to its end and returns what it printed; see `run_processes`."""
    done = run_processes(script, *arguments, processes=processes, launcher=launcher)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_processes(
    script: str, *arguments: str | Path, processes: int = 2, launcher: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a script, one thread for each process, and waits for all of them.

    The `launcher` is a module that starts the processes, and its options. Without it they are forks
    of one process, which imports only once what takes seconds; when one dies, the others live on.
    """
    forks = [sys.executable, __file__, str(processes)]
    command = [sys.executable, "-m", *launcher] if launcher else forks
    return subprocess.run(
        [*command, script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fork(processes: int, script: str, arguments: list[str]) -> int:
    """Runs a script in forks, as `torchrun` would; returns 0 if all end well."""
    # Nothing that is imported is garbage; neither this process nor a run needs to look for some.
    gc.disable()
    import transformers.trainer_seq2seq  # noqa: F401

    import vanilla_transformer_tools.training.run  # noqa: F401

    gc.freeze()
    gc.enable()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ["WORLD_SIZE"] = str(processes)
    sys.argv = [script, *arguments]
    children = []
    for rank in map(str, range(processes)):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            runpy.run_path(script, run_name="__main__")
            # See the end of run_sharded.py.
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


if __name__ == "__main__":
    sys.exit(fork(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
