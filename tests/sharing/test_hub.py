"""What `push` sends to the Hub, through the calls of its client."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi, ModelCard, RepoUrl
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.sharing.model_card import write_model_card
from vanilla_transformer_tools.training.record import describe_run

from ..models import build_variant
from ..plugin.test_remote_code import HUB_FILES
from ..text.test_tokenizer_pair import LATIN, learn, save_latin_to_greek

MODEL_FILES = HUB_FILES.keys() | {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
# What Trainer and its user may leave beside a model; to unpickle one of them is an error.
PRIVATE_FILES = [
    "log.jsonl",
    "notes.pkl",
    "optimizer.pt",
    "pytorch_model.bin",
    "trainer_state.json",
    "training_args.bin",
    ".hidden.model",
    "checkpoint-4/config.json",
    "checkpoint-4/model.safetensors",
    "checkpoint-4/optimizer.pt",
]
NORM = "model.encoder.layer_norm.weight"
SECRET = "hf_" + "aB3" * 11


@dataclass
class Hub:
    """Repositories, with the calls that made and filled them.

    Attributes:
        made: Arguments of `create_repo` by repository.
        branches: Repository and name of each new branch.
        commits: Arguments of each `upload_folder`.
        files: Content of each file by branch.
    """

    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    branches: list[tuple[str, str]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str | None, dict[str, bytes]] = field(default_factory=dict)

    def create_repo(self, repo_id: str, **arguments: Any) -> RepoUrl:
        self.made[repo_id] = arguments
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        self.branches.append((repo_id, branch))

    def upload_folder(
        self, *, folder_path: Path, allow_patterns: list[str], delete_patterns: list[str], **rest
    ) -> None:
        self.commits.append(rest)
        there = self.files.setdefault(rest["revision"], {})
        for name in filter_repo_objects([*there], allow_patterns=delete_patterns):
            del there[name]
        names = [path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*")]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            there[name] = (folder_path / name).read_bytes()


@pytest.fixture
def hub(monkeypatch) -> Hub:
    hub = Hub()
    for name in ("create_repo", "create_branch", "upload_folder"):
        monkeypatch.setattr(
            HfApi, name, lambda _, *given, _n=name, **by: getattr(hub, _n)(*given, **by)
        )
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    return hub


@pytest.fixture
def run(capsys) -> Callable[..., str]:
    """Runs a command; gives what it prints."""

    def run_command(*argv: object) -> str:
        main([str(argument) for argument in argv])
        return capsys.readouterr().out

    return run_command


@pytest.fixture
def make_folder(tmp_path) -> Callable[..., Path]:
    """Writes a run folder: model, tokenizer, record, and what else may be in it."""

    def write_folder(name: str = "run", **settings: object) -> Path:
        folder = tmp_path / name
        build_variant().save_pretrained(folder)
        learn(LATIN).save_pretrained(folder)
        for path in PRIVATE_FILES:
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_bytes(b"not a pickle")
        record = {
            "settings": {"max_tokens_per_batch": 800, "max_length": 9, **settings},
            "arguments": {"learning_rate": 0.1, "warmup_steps": 2, "seed": 3},
            **{"parameters": 4, "pairs": 5, "epochs": 6, "updates": 7, "minutes": 8},
            "hardware": "an abacus",
        }
        (folder / "run.json").write_text(json.dumps(record))
        write_model_card(folder)
        return folder

    return write_folder


def write_json(file: Path, **values: object) -> None:
    known = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(known | values, indent=2), "utf-8")


def test_push_uploads_the_model_and_its_record_only(hub, make_folder, run):
    folder = make_folder("my folder", language=["de", "en"])
    (folder / "README.md").unlink()
    there = ["model-00001-of-2.safetensors", "results.json", "notes.md", "docs/config.json"]
    hub.files["other"] = dict.fromkeys(there, b"earlier")

    arguments = ["--private", "--revision", "other", "--commit_message", "Zahlen"]
    out = run("push", "--model", folder, "me/only", *arguments)

    assert out == "The model is at https://huggingface.co/me/only\n"
    assert hub.made == {"me/only": {"private": True, "exist_ok": True}}
    assert hub.branches == [("me/only", "other")]
    assert hub.commits == [{"repo_id": "me/only", "commit_message": "Zahlen", "revision": "other"}]
    files = hub.files["other"]
    # What an earlier model had more is gone; what no upload of ours brings is left alone.
    assert files.keys() == MODEL_FILES | {"run.json", "notes.md", "docs/config.json"}
    card = ModelCard(files["README.md"].decode())
    assert card.data.language == ["de", "en"]
    assert card.text.count('from_pretrained("me/only")') == 2
    assert 'from_pretrained("my folder")' not in card.text


def test_pushed_card_keeps_what_was_edited_and_both_tokenizers_go_along(hub, tmp_path, run):
    folder = Path(save_latin_to_greek(tmp_path / "greek"))
    edited = '---\nlicense: mit  # mine\n---\n\nEigene Worte: ä `Auto.from_pretrained("run")`\n'
    (folder / "README.md").write_text(edited, "utf-8")

    run("push", "--model", folder, "me/edited")

    assert hub.made["me/edited"]["private"] is None
    assert hub.files[None]["README.md"].decode() == edited
    target = {f"target_tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json")}
    assert hub.files[None].keys() == MODEL_FILES | target


def line_of(text: str, file: Path) -> int:
    (number,) = [n for n, line in enumerate(file.read_text().split("\n"), 1) if text in line]
    return number


def test_push_refuses_secrets_and_home_directories_by_file_and_line(
    hub, make_folder, monkeypatch, refused
):
    folder = make_folder("open")
    monkeypatch.setenv("WANDB_API_KEY", "open sesame")
    weights, vocabulary = folder / "model.safetensors", folder / "tokenizer.json"
    save_file(load_file(weights), weights, metadata={"format": "pt", "note": f"by {SECRET}"})
    renamed = re.sub(r'"\w": (?=\d)', f'"{SECRET}": ', vocabulary.read_text("utf-8"), count=1)
    vocabulary.write_text(renamed, "utf-8")
    write_json(folder / "run.json", command=["--train=/home/jo/train.de", "--hub_token", SECRET])
    write_json(folder / "results.json", test={"lines": 2, "search": "open sesame"})
    write_json(folder / "config.json", _name_or_path="/Users/jo/runs/base")
    write_json(folder / "generation_config.json", note="AKIA" + "Z9" * 8)
    (folder / "mine_vanilla_transformer.py").write_text("\n# -----BEGIN PRIVATE KEY-----\n")
    card = (folder / "README.md").read_text("utf-8")
    (folder / "README.md").write_text(card + "\nIts folder is C:\\Users\\jo.\n", "utf-8")

    head, *found, advice = refused("push", "--model", folder, "me/open").splitlines()

    places = {
        "config.json": [("/Users", "a home directory, '/Users/jo'")],
        "generation_config.json": [("AKIA", "AWS Access Key")],
        "tokenizer.json": [(SECRET, "a token of the Hub")],
        "mine_vanilla_transformer.py": [("BEGIN", "Private Key")],
        "README.md": [("C:", "a home directory, 'C:\\\\Users\\\\jo'")],
        "run.json": [("/home", "a home directory, '/home/jo'"), (SECRET, "a token of the Hub")],
        "results.json": [("sesame", "the value of WANDB_API_KEY")],
    }
    expected = [
        f"  {name}, line {line_of(text, folder / name)}: {what}"
        for name, disclosures in places.items()
        for text, what in disclosures
    ]
    expected.insert(1, "  model.safetensors, line 1: a token of the Hub")
    assert head.endswith(f"{str(folder)!r} must hold no secrets and no home directories, got")
    assert found == expected
    assert advice.startswith("Nothing was uploaded. Cut these paths down to names")
    assert hub.made == {}


def test_push_of_what_was_trained_here_and_of_words_about_paths_is_not_refused(
    hub, make_folder, tmp_path, monkeypatch, run
):
    folder = make_folder("clean")
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = Seq2SeqTrainingArguments(str(folder), use_cpu=True, hub_token=SECRET)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "vanilla-transformer"), "--x", SECRET])
    pair = [str(tmp_path / "a.de"), str(tmp_path / "a.en")]
    settings = TrainSettings(train=pair, max_tokens_per_batch=8192)
    write_json(folder / "run.json", **describe_run(settings, arguments, 0))
    words = "/home/jo/file.txt C:\\Users\\jo /root/x hf_hub_download sk-learn Bearer AKIA"
    vocabulary = folder / "tokenizer.json"
    text = vocabulary.read_text("utf-8")
    vocabulary.write_text(
        re.sub(r'"\w": (?=\d)', lambda _: f"{json.dumps(words)}: ", text, count=1)
    )

    assert run("push", "--model", folder, "me/clean").startswith("The model is at ")


def not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[NORM] *= float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def not_complete(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[NORM]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (not_finite, f"all finite, got 1 not finite ({NORM})"),
        (not_complete, f"got 1 missing ({NORM})"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "must hold a tokenizer"),
        (
            lambda folder: (folder / "README.md").write_bytes(b"na\xefve"),
            "README.md' must be UTF-8, got byte 0xEF at byte 3 of line 1",
        ),
        (
            lambda folder: write_json(folder / "config.json", model_type="marian"),
            "got a model of another kind. Upload other models with `hf upload me/part ",
        ),
        (lambda folder: (folder / "config.json").unlink(), "got no config.json. Upload other"),
    ],
)
def test_folder_that_is_no_whole_model_is_refused(hub, make_folder, refused, change, fault):
    folder = make_folder()
    change(folder)

    assert fault in refused("push", "--model", folder, "me/part")
    assert hub.made == {}


def test_push_without_a_token_tells_how_to_log_in(hub, make_folder, monkeypatch, tmp_path, refused):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))

    message = refused("push", "--model", make_folder(), "me/anonymous")

    assert "An upload needs a token of the Hub, got none. Run `hf auth login`" in message
