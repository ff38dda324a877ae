"""Runs commands in forks of this process, which has imported what takes seconds.

Reads one JSON object a line: a command to start, which is answered with the id of its process, or a
process to wait for, which is answered with its status, null after too long a time. A fork ends as
any Python program does, its exit handlers included, and signals reach it alone.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
from importlib import import_module
from typing import Any

from vanilla_transformer_tools.commands import main

# What takes seconds.
IMPORTED = (
    "ctranslate2",
    "matplotlib.figure",
    "sacrebleu",
    "transformers.trainer_seq2seq",
    "vanilla_transformer_tools.evaluation.metrics",
    "vanilla_transformer_tools.exports.export",
    "vanilla_transformer_tools.training.run",
    "vanilla_transformer_tools.translation",
)

_PR_SET_PDEATHSIG = 1
_CAPABILITY_VERSION = 0x20080522
# Held back until a fork has become its command.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def wait(pid: int, seconds: float) -> int | None:
    """Exit status of a fork, negative for a signal; None if it has not ended in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def prepare(request: dict[str, Any]) -> None:
    """Makes this fork the process of a command: its folder, its files, its limits."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Without capabilities the rights of files hold for root too.
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    os.chdir(request["folder"])
    os.environ["TMPDIR"] = request["temporary"]
    tempfile.tempdir = None
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, request["output"]), (2, request["errors"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if limit := request["most_bytes_of_a_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    sys.argv = ["vanilla-transformer", *request["argv"]]


def serve() -> None:
    """Answers until the input ends; in a fork returns at once, ready to run its command."""
    # What is imported stays; neither this process nor a fork needs to look for garbage in it.
    gc.disable()
    for module in IMPORTED:
        import_module(module)
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            answer = wait(**request)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            answer = os.fork()
            if not answer:
                prepare(request)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                main()
                return
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
