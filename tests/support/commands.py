"""Real processes of `vanilla-transformer`, to be killed and to be waited for."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("command_server.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class CommandServer:
    """Starts commands in a fraction of the time that importing torch takes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )

    def ask(self, **request: Any) -> Any:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(
        self, folder: Path, *argv: Any, most_bytes_of_a_file: int | None = None
    ) -> "RunningCommand":
        """Starts a command in a folder, which gets its output and `tmp` for temporary files.

        Args:
            folder: Where it runs.
            argv: The command and its options.
            most_bytes_of_a_file: Where writing fails, as on a full disk.
        """
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.stdout")))
        output, errors = folder / f"{number}.stdout", folder / f"{number}.stderr"
        pid = self.ask(
            argv=list(map(str, argv)),
            folder=str(folder),
            temporary=str(temporary),
            output=str(output),
            errors=str(errors),
            most_bytes_of_a_file=most_bytes_of_a_file,
        )
        return RunningCommand(self, argv[0], pid, output, errors)

    def run(self, folder: Path, *argv: Any, **limits: Any) -> "RunningCommand":
        """Runs a command to its end."""
        command = self.start(folder, *argv, **limits)
        command.wait()
        return command


@dataclass
class RunningCommand:
    """A process and what it prints."""

    server: CommandServer
    name: str
    pid: int
    output_file: Path
    errors_file: Path
    status: int | None = None

    @property
    def output(self) -> str:
        return self.output_file.read_text(encoding="utf-8")

    @property
    def errors(self) -> str:
        return self.errors_file.read_text(encoding="utf-8")

    def wait(self, seconds: float = 120) -> int | None:
        """Its exit status, negative for a signal; None if it has not ended by then."""
        if self.status is None:
            self.status = self.server.ask(pid=self.pid, seconds=seconds)
        return self.status

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Waits for a condition or for the end of the process, whatever comes first."""
        end = time.monotonic() + seconds
        while self.wait(0.01) is None and not condition() and time.monotonic() < end:
            pass

    def signal(self, signum: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.status is None:
            os.kill(self.pid, signum)


@contextmanager
def command_server() -> Iterator[CommandServer]:
    """A server, ended with all its commands."""
    server = CommandServer()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()
