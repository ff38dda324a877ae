"""Commands on hostile days: killed, cut off from the disk, given damaged files.

Each round draws one event from its seed. After it nothing half-written has been loaded, no line is
lost or doubled, a resumed run has the bits of an undisturbed one, exit statuses tell the truth, and
the next ordinary command finds nothing in its way.

`STORM_ROUNDS=100` has more rounds than usual; `STORM_SEED=57 STORM_ROUNDS=1` repeats one.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from number_words import write_corpus
from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.training.checkpoints import closed_checkpoints

from ..support.commands import ENVIRONMENT, CommandServer, RunningCommand, command_server
from ..support.training_runs import checkpoints_of, read_json, training_options

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("STORM_ROUNDS", "11"))
FIRST_SEED = int(os.environ.get("STORM_SEED", "0"))

UPDATES = 30
LINES = 2100
SEARCH = ["--num_beams", "1", "--max_extra_tokens", "1"]


@dataclass
class Calm:
    """What undisturbed commands made; the run in `folder` kept the checkpoint of each update."""

    corpus: Path
    folder: Path
    translation: bytes = b""
    scores: str = ""
    exported: bytes = b""
    seconds: dict[str, float] = field(default_factory=dict)

    def training(self, folder: Path, save_steps: int = 4) -> list[Any]:
        options = ["train", *training_options(self.corpus)]
        options += ["--logging_steps", "1", "--max_steps", str(UPDATES), "--save_strategy", "steps"]
        options += ["--save_steps", str(save_steps), "--save_total_limit", str(12 // save_steps)]
        return [*options, "--average_last", "0", "--bpe_dropout", "0.1", "--output_dir", folder]

    def translating(self, model: Path, output: Path) -> list[Any]:
        files = ["--input", self.corpus / "test.de", "--output", output]
        return ["translate", "--model", model, *SEARCH, *files]

    def evaluating(self, model: Path) -> list[Any]:
        files = ["--test", self.corpus / "test.de", self.corpus / "test.en"]
        return ["evaluate", "--model", model, *SEARCH, *files, "--bootstrap", "0"]

    def exporting(self, model: Path, output: Path) -> list[Any]:
        return ["export", "--format", "ctranslate2", model, output]


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    with command_server() as server:
        yield server


@pytest.fixture(scope="module")
def calm(server: CommandServer, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    home = tmp_path_factory.mktemp("calm")
    write_corpus(home / "corpus", train=300, validation=1, test=LINES)
    calm = Calm(home / "corpus", home / "model")
    # In an interpreter of its own, so that the forks of the server are compared with one.
    training = calm.training(calm.folder, save_steps=1)
    training[training.index("--save_total_limit") + 1] = str(UPDATES)
    command = [sys.executable, "-m", "vanilla_transformer_tools.commands", *training]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **ENVIRONMENT})
    output, export = home / "calm.en", home / "export"
    for arguments in (
        calm.training(home / "again"),
        calm.translating(calm.folder, output),
        calm.evaluating(calm.folder),
        calm.exporting(calm.folder, export),
    ):
        started = time.monotonic()
        command = server.run(home, *arguments)
        calm.seconds[arguments[0]] = time.monotonic() - started
        assert command.status == 0, command.errors
        calm.scores = command.output if arguments[0] == "evaluate" else calm.scores
    assert_finished(home / "again", calm)
    calm.translation = output.read_bytes()
    assert calm.translation.count(b"\n") == LINES
    calm.exported = (export / "model.bin").read_bytes()
    return calm


@dataclass
class Round:
    """One event in an empty folder; `draw` decides on everything."""

    server: CommandServer
    calm: Calm
    home: Path
    draw: random.Random

    def start(self, arguments: list[Any], **limits: Any) -> RunningCommand:
        return self.server.start(self.home, *arguments, **limits)

    def run(self, arguments: list[Any], **limits: Any) -> RunningCommand:
        """Runs a command to its end, which must be success or one line about a mistake."""
        command = self.start(arguments, **limits)
        command.wait()
        assert command.status in (0, 2), (command.status, command.errors)
        assert_told(command)
        return command

    def run_to_success(self, arguments: list[Any]) -> None:
        command = self.run(arguments)
        assert command.status == 0, command.errors

    def wait_a_moment(self, command: RunningCommand) -> None:
        """Until some moment of a command's life; now and then just after its end."""
        command.wait(self.draw.uniform(0, 1.1) * self.calm.seconds[command.name])

    def disturb(self, arguments: list[Any], signum: int) -> RunningCommand:
        """Sends a signal to a command at some moment and waits for its end."""
        command = self.start(arguments)
        self.wait_a_moment(command)
        command.signal(signum)
        command.wait()
        # What Python has no handler for yet ends a process by itself.
        statuses = {0, -signum} | ({128 + signum} if signum != signal.SIGKILL else set())
        assert command.status in statuses, (command.status, command.errors)
        assert_told(command)
        return command

    def train_to_the_end(self, folder: Path) -> None:
        """Goes on with a run however it was left, as its user would."""
        training = self.calm.training(folder)
        assert_nothing_half_written(folder, self.calm)
        command = self.run([*training, "--resume"])
        if command.status:
            assert "needs a whole checkpoint" in command.errors, command.errors
            command = self.run(training)
        if command.status:
            assert "already holds a run" in command.errors, command.errors
            shutil.rmtree(folder)
            command = self.run(training)
        assert command.status == 0, command.errors
        assert_finished(folder, self.calm)

    def translate_to_the_end(self, output: Path) -> None:
        """Goes on with a translation however it was left."""
        translating = self.calm.translating(self.calm.folder, output)
        self.run_to_success([*translating, *["--resume"] * output.exists()])
        assert output.read_bytes() == self.calm.translation

    def copy(self) -> Path:
        """A copy of the calm run's model alone."""
        folder = self.home / "model"
        return shutil.copytree(
            self.calm.folder, folder, ignore=shutil.ignore_patterns("checkpoint-*")
        )

    def damage(self, file: Path) -> str:
        """Cuts a file, removes it, or flips one of its bits."""
        content = bytearray(file.read_bytes())
        how = self.draw.choice(["cut", "removed", "flipped"])
        place = self.draw.randrange(len(content))
        if how == "removed":
            file.unlink()
            return how
        if how == "cut":
            del content[place:]
        else:
            content[place] ^= 1 << self.draw.randrange(8)
        file.write_bytes(content)
        return how


def assert_told(command: RunningCommand) -> None:
    """A command has told its mistake, if any, once and without a traceback."""
    assert "Traceback" not in command.errors, command.errors
    if command.status == 2:
        lines = command.errors.splitlines()
        # Transformers warns of file systems whose clock is coarse.
        ours = [line for line in lines if not line.startswith(("[transformers] ", "exporting "))]
        assert ours[0].startswith("vanilla-transformer: "), command.errors


def assert_finished(folder: Path, calm: Calm) -> None:
    """A run has the weights and the log of the calm one, and nothing half-written."""
    assert read_json(folder / "run.json")["updates"] == UPDATES
    for name in ("model.safetensors", f"checkpoint-{UPDATES}/model.safetensors"):
        assert (folder / name).read_bytes() == (calm.folder / name).read_bytes()
    hidden = {path.name for path in folder.rglob(".*")}
    assert hidden <= {".lock"}


def assert_nothing_half_written(folder: Path, calm: Calm) -> None:
    """Each model in a folder is refused or has the weights of some update."""
    for place in (folder, *folder.glob("checkpoint-*")):
        try:
            weights = load_model(str(place)).state_dict()
        except (ValueError, OSError):
            continue
        assert weights_are_of_an_update(weights, calm), place


def weights_are_of_an_update(weights: dict[str, torch.Tensor], calm: Calm) -> bool:
    for update in checkpoints_of(calm.folder):
        saved = load_file(calm.folder / f"checkpoint-{update}" / "model.safetensors")
        if all(torch.equal(weights[name], tensor) for name, tensor in saved.items()):
            return True
    return False


# Training


def kill_training(event: Round) -> None:
    folder = event.home / "run"
    for leg in range(event.draw.randint(1, 3)):
        # Without a whole checkpoint there is nothing to resume from.
        resume = ["--resume"] * bool(leg and closed_checkpoints(folder))
        event.disturb([*event.calm.training(folder), *resume], signal.SIGKILL)
    event.train_to_the_end(folder)


def stop_training(event: Round) -> None:
    folder = event.home / "run"
    signum = event.draw.choice([signal.SIGTERM, signal.SIGINT])
    command = event.disturb(event.calm.training(folder), signum)
    if command.status == 0:
        assert_finished(folder, event.calm)
    elif "Stopping after this update" in command.output:
        assert command.status == 128 + signum
        assert checkpoints_of(folder)[-1] == read_json(folder / "run.json")["updates"]
        assert (folder / "model.safetensors").exists()
    event.train_to_the_end(folder)


def fill_disk_while_training(event: Round) -> None:
    folder = event.home / "run"
    largest = (event.calm.folder / f"checkpoint-{UPDATES}" / "optimizer.pt").stat().st_size
    limit = int(2 ** event.draw.uniform(10, 1 + largest.bit_length()))
    command = event.run(event.calm.training(folder), most_bytes_of_a_file=limit)
    assert command.status == (0 if limit > largest else 2), command.errors
    event.train_to_the_end(folder)


def damage_checkpoint(event: Round) -> None:
    """Also two at once; the run was killed before it put its model into its folder."""
    folder = event.home / "run"
    newest = event.draw.randrange(8, UPDATES)
    for update in (newest - 6, newest - 3, newest):
        name = f"checkpoint-{update}"
        shutil.copytree(event.calm.folder / name, folder / name)
    for name in ("run.json", "log.jsonl"):
        shutil.copy(event.calm.folder / name, folder)
    for update in event.draw.sample([newest - 3, newest], event.draw.randint(1, 2)):
        files = (folder / f"checkpoint-{update}").rglob("*")
        file = event.draw.choice(sorted(path for path in files if path.is_file()))
        print(file.relative_to(folder), event.damage(file))
    event.train_to_the_end(folder)


def start_two_trainings(event: Round) -> None:
    folder = event.home / "run"
    training = event.calm.training(folder)
    both = [event.start(training), event.start(training)]
    if event.draw.random() < 0.5:
        event.wait_a_moment(both[0])
        both[0].signal(signal.SIGKILL)
        # Until somebody has asked how it ended, its number is that of a process.
        both[0].wait()
        assert both[1].wait() in (0, 2), both[1].errors
        assert_told(both[1])
    else:
        assert sorted(command.wait() for command in both) == [0, 2], both[0].errors + both[1].errors
        assert_finished(folder, event.calm)
    event.train_to_the_end(folder)


# With a model


def kill_translation(event: Round) -> None:
    output = event.home / "output.en"
    signums = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    for _ in range(event.draw.randint(1, 3)):
        resume = ["--resume"] * output.exists()
        translating = event.calm.translating(event.calm.folder, output)
        command = event.disturb([*translating, *resume], event.draw.choice(signums))
        if command.status == 0:
            break
        # A disk that was cut off may have kept less than was written.
        if output.exists() and event.draw.random() < 0.5:
            with output.open("r+b") as file:
                file.truncate(event.draw.randint(0, output.stat().st_size))
        assert event.calm.translation.startswith(output.read_bytes() if output.exists() else b"")
    event.translate_to_the_end(output)


def fill_disk_while_translating(event: Round) -> None:
    output = event.home / "output.en"
    limit = event.draw.randrange(1, len(event.calm.translation))
    translating = event.calm.translating(event.calm.folder, output)
    assert event.run(translating, most_bytes_of_a_file=limit).status == 2
    assert len(output.read_bytes()) <= limit
    assert event.calm.translation.startswith(output.read_bytes())
    event.translate_to_the_end(output)


def kill_evaluation(event: Round) -> None:
    model = event.copy()
    event.disturb(event.calm.evaluating(model), signal.SIGKILL)
    command = event.run(event.calm.evaluating(model))
    assert (command.status, command.output) == (0, event.calm.scores), command.errors
    assert list(read_json(model / "results.json")) == ["test"]
    assert_nothing_half_written(model, event.calm)


def kill_export(event: Round) -> None:
    model, output = event.copy(), event.home / "export"
    exporting = event.calm.exporting(model, output)
    event.disturb(exporting, event.draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    if not output.exists():
        event.run_to_success(exporting)
    assert (output / "model.bin").read_bytes() == event.calm.exported
    assert "run.json" in {path.name for path in output.iterdir()}


def damage_model(event: Round) -> None:
    model = event.copy()
    output = event.home / "output.en"
    recorded = sorted(read_json(model / "run.json")["files"])
    others = ["config.json", "generation_config.json", "run.json", "tokenizer_config.json"]
    name = event.draw.choice([*recorded, *recorded, *others])
    if name == "model.safetensors" and event.draw.random() < 0.3:
        weights = load_file(model / name)
        del weights[event.draw.choice(sorted(weights))]
        save_file(weights, model / name, metadata={"format": "pt"})
        how = "without a tensor"
    else:
        how = event.damage(model / name)
    print(name, how)
    command = event.run(event.calm.translating(model, output))
    if name in recorded:
        assert command.status == 2
    if command.status:
        assert not output.exists() or not output.read_bytes()
    else:
        assert output.read_bytes().count(b"\n") == LINES


EVENTS = (
    kill_training,
    kill_translation,
    damage_checkpoint,
    stop_training,
    damage_model,
    fill_disk_while_training,
    kill_export,
    start_two_trainings,
    fill_disk_while_translating,
    kill_evaluation,
    kill_training,
)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + ROUNDS))
def test_storm_leaves_nothing_false_and_loses_nothing(
    server: CommandServer, calm: Calm, tmp_path: Path, seed: int
) -> None:
    event = EVENTS[seed % len(EVENTS)]
    print(f"STORM_SEED={seed} STORM_ROUNDS=1: {event.__name__}")

    event(Round(server, calm, tmp_path, random.Random(seed)))

    # Each event ends with an undisturbed command, which removes what killed ones left.
    assert list((tmp_path / "tmp").iterdir()) == []
    assert {path.name for path in tmp_path.rglob(".*")} <= {".lock"}
