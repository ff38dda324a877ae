"""Sharing through the real client of the Hub, against a server on loopback."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import transformers.utils.hub
from huggingface_hub import ModelCard
from safetensors.torch import load as load_weights
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.sharing.model_card import write_model_card
from vanilla_transformer_tools.sharing.push import push
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.plan import describe_run
from vanilla_transformer_tools.translation import Translator

from ..models import Model, build_variant
from ..plugin.test_remote_code import HUB_FILES
from ..support.hub_server import TOKEN, Hub, serve_hub
from ..text.test_tokenizer_pair import GREEK, LATIN, learn, save_latin_to_greek

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
    "checkpoint-4/config.json",
    "checkpoint-4/model.safetensors",
    "checkpoint-4/optimizer.pt",
]
TEXTS = ["ein hund rennt.", "ja"]
NORM = "model.encoder.layer_norm.weight"
SECRET = "hf_" + "aB3" * 11

# Runs where the package is not installed: the Hub is all that this process knows. Code of a model
# card may follow.
CLIENT = """
import json
import sys

sys.modules["vanilla_transformer"] = sys.modules["vanilla_transformer_tools"] = None

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

trust = {"trust_remote_code": True}
places, texts = map(json.loads, sys.argv[1:])
for repository, revision in places:
    tokenizer = AutoTokenizer.from_pretrained(repository, revision=revision, **trust)
    model = AutoModelForSeq2SeqLM.from_pretrained(repository, revision=revision, **trust)
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    generated = model.generate(**inputs, num_beams=3, max_new_tokens=9).tolist()
    print(json.dumps([type(model).__module__, generated]))
"""


def make_model(factor: float = 1.0) -> Model:
    model = build_variant()
    model.model.encoder.layer_norm.weight.data *= factor
    return model


def generate(model: Model) -> list[list[int]]:
    inputs = learn(LATIN)(TEXTS, return_tensors="pt", padding=True)
    return model.generate(**inputs, num_beams=3, max_new_tokens=9).tolist()


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory) -> Callable[..., Path]:
    """Writes a run folder: model, tokenizer, record, and what else may lie there."""

    def write_folder(name: str = "run", factor: float = 1.0, **settings: object) -> Path:
        folder = tmp_path_factory.mktemp("shared") / name
        make_model(factor).save_pretrained(folder)
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


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub that this process's client is led to, although the tests as a whole are offline."""
    with serve_hub() as hub, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path_factory.mktemp("hf")),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }.items():
            patch.setattr(huggingface_hub.constants, name, value)
        # Earlier tests may have made Transformers' client, which keeps its endpoint.
        patch.setattr(transformers.utils.hub, "_hf_api", None)
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


def command(*arguments: object) -> str:
    """Runs `vanilla-transformer push`; gives what it prints, or the message it fails with."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(["push", *map(str, arguments)])
        except SystemExit:
            return err.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def latin_to_greek(hub, tmp_path_factory) -> str:
    """Folder of a model with two tokenizers, which is shared as `me/greek`."""
    folder = save_latin_to_greek(tmp_path_factory.mktemp("greek") / "run")
    search = GenerationConfig.from_pretrained(folder)
    search.max_length = 9
    search.save_pretrained(folder)
    command("--model", folder, "me/greek")
    return folder


def card_of(hub: Hub, repository: str) -> str:
    return hub.repositories[repository].files()["README.md"].decode()


# Loading where the package is not installed


@pytest.fixture(scope="module")
def published(hub, make_folder) -> str:
    """How users of Transformers publish: with the package, without our command."""
    make_model().push_to_hub("me/published")
    learn(LATIN).push_to_hub("me/published")
    return "me/published"


@pytest.fixture(scope="module")
def branches(hub, make_folder) -> str:
    """A repository made by the command, with other weights on the branch `other`."""
    command("--model", make_folder(), "me/branches")
    command("--model", make_folder(factor=-1.0), "me/branches", "--revision", "other")
    return "me/branches"


@pytest.fixture(scope="module")
def client(hub, published, branches, latin_to_greek, tmp_path_factory):
    """Lines of a process that loads from two places, then runs the code of a card."""
    repository = hub.repositories[published]
    # To be left alone: unpickling it would fail.
    repository.commit("main", "poison", repository.files() | {"pytorch_model.bin": b"no pickle"})
    first, _, code = re.search("```python\n(.*?)```", card_of(hub, "me/greek"), re.DOTALL)[
        1
    ].partition("\n")
    assert "trust_remote_code=True in the calls below" in first
    called = 'from_pretrained("me/greek"'
    assert code.count(called) == 3
    code = code.replace(called, f"{called}, **trust").replace("...", TEXTS[0])
    places = [(published, "main"), (branches, "other")]
    hub.requests.clear()
    finished = subprocess.run(
        [sys.executable, "-c", CLIENT + code, json.dumps(places), json.dumps(TEXTS)],
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path_factory.mktemp("client")),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    *loaded, printed = finished.stdout.splitlines()
    return [json.loads(line) for line in loaded], printed, list(hub.requests)


@pytest.mark.slow
def test_each_revision_generates_the_same_where_the_package_is_not_installed(client):
    main_branch, other = generate(make_model()), generate(make_model(factor=-1.0))

    assert main_branch != other
    assert [generated for _, generated in client[0]] == [main_branch, other]
    assert all(module.startswith("transformers_modules.") for module, _ in client[0])
    names = {path.rpartition("/")[2] for path in client[2] if "/resolve/" in path}
    assert "model.safetensors" in names
    assert not {name for name in names if name.endswith((".bin", ".pt", ".pkl"))}


@pytest.mark.slow
def test_code_of_the_card_translates_where_the_package_is_not_installed(
    hub, client, latin_to_greek
):
    pair = TokenizerPair.from_pretrained(latin_to_greek)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(latin_to_greek)
    outputs = model.generate(**pair.source(TEXTS[:1], return_tensors="pt"))

    assert client[1] == str(pair.target.batch_decode(outputs, skip_special_tokens=True))
    assert "vocabularies 37 and 40" in card_of(hub, "me/greek")


def test_translator_loads_both_tokenizers_from_the_hub(hub, latin_to_greek):
    expected, found = (
        [one.text for one in Translator.from_pretrained(place).translate(TEXTS)]
        for place in (latin_to_greek, "me/greek")
    )

    assert found == expected
    assert "".join(found).strip(GREEK) == ""
    files = hub.repositories["me/greek"].files()
    added = {f"target_tokenizer/{name}" for name in ("tokenizer.json", "tokenizer_config.json")}
    assert files.keys() - {".gitattributes"} == MODEL_FILES | added


# What goes up


def test_push_to_hub_uploads_what_a_saved_folder_promises(hub, published):
    files = hub.repositories[published].files()

    # The poison of the client aside; the card is Transformers' own.
    assert files.keys() - {"pytorch_model.bin", ".gitattributes"} == MODEL_FILES


def test_push_uploads_the_model_and_its_record_only(hub, make_folder):
    folder = make_folder()

    told = command("--model", folder, "me/only", "--commit_message", "Zahlen", "--private")

    assert told == f"The model is at {hub.url}/me/only\n"
    repository, files = hub.repositories["me/only"], hub.repositories["me/only"].files()
    assert repository.messages == ["initial commit", "Zahlen"]
    assert repository.private
    assert files.keys() - {".gitattributes"} == MODEL_FILES | {"run.json"}
    for name in files.keys() - {".gitattributes", "README.md"}:
        assert files[name] == (folder / name).read_bytes()


def test_push_removes_what_an_earlier_model_had_more(hub, make_folder):
    folder = make_folder()
    command("--model", folder, "me/changing")
    repository = hub.repositories["me/changing"]
    repository.commit("main", "notes", {**repository.files(), "docs/config.json": b"1", "a": b"2"})
    (folder / "model.safetensors").unlink()
    (folder / "run.json").unlink()
    make_model().save_pretrained(folder, max_shard_size="20KB")

    command("--model", folder, "me/changing")

    files = repository.files()
    shards = set(json.loads(files["model.safetensors.index.json"])["weight_map"].values())
    assert len(shards) > 1
    assert shards <= files.keys()
    assert files.keys().isdisjoint({"model.safetensors", "run.json"})
    # What no upload of ours brings is left alone.
    assert {"docs/config.json", "a", ".gitattributes"} <= files.keys()


def test_push_to_a_branch_leaves_the_main_one(hub, branches):
    norm = make_model().model.encoder.layer_norm.weight

    for branch, expected in (("main", norm), ("other", -norm)):
        weights = load_weights(hub.repositories[branches].files(branch)["model.safetensors"])
        assert weights[NORM].equal(expected)
    assert not hub.repositories[branches].private


# The card


def test_missing_card_is_written_and_loads_the_repository(hub, make_folder):
    folder = make_folder("my folder", language=["de", "en"])
    (folder / "README.md").unlink()

    command("--model", folder, "me/named")

    card = card_of(hub, "me/named")
    assert ModelCard(card).data.language == ["de", "en"]
    assert card.count('from_pretrained("me/named")') == 2
    assert 'from_pretrained("my folder")' not in card


def test_pushed_card_keeps_what_was_edited(hub, make_folder):
    folder = make_folder()
    edited = '---\nlicense: mit  # mine\n---\n\nEigene Worte: ä `Auto.from_pretrained("run")`\n'
    (folder / "README.md").write_text(edited, "utf-8")

    command("--model", folder, "me/edited")

    assert card_of(hub, "me/edited") == edited


def test_model_is_not_uploaded_when_the_hub_refuses_its_metadata(hub, make_folder):
    folder = make_folder(language=["German", "en"])
    hub.requests.clear()

    message = command("--model", folder, "me/german")

    assert message.startswith("vanilla-transformer: Invalid metadata in README.md")
    assert "'German' is not valid" in message
    assert "Traceback" not in message
    assert hub.repositories["me/german"].messages == ["initial commit"]
    tree = "/api/models/me/german/tree/main"
    assert hub.requests == ["/api/repos/create", tree, "/api/validate-yaml"]


# What stays on the machine


def write_json(file: Path, **values: object) -> None:
    known = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(known | values, indent=2), "utf-8")


def line_of(text: str, file: Path) -> int:
    (number,) = [n for n, line in enumerate(file.read_text().split("\n"), 1) if text in line]
    return number


def test_push_refuses_secrets_and_home_directories_by_file_and_line(hub, make_folder, monkeypatch):
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

    head, header, *found, advice = command("--model", folder, "me/open").splitlines()

    places = {
        "config.json": [("/Users", "a home directory, '/Users/jo'")],
        "generation_config.json": [("AKIA", "AWS Access Key")],
        "tokenizer.json": [(SECRET, "a token of the Hub")],
        "mine_vanilla_transformer.py": [("BEGIN", "Private Key")],
        "run.json": [("/home", "a home directory, '/home/jo'"), (SECRET, "a token of the Hub")],
        "results.json": [("sesame", "the value of WANDB_API_KEY")],
        "README.md": [("C:", "a home directory, 'C:\\\\Users\\\\jo'")],
    }
    assert head == (
        f"vanilla-transformer: {str(folder)!r} must hold no secrets and no home directories, got"
    )
    assert header == "  model.safetensors, header: a token of the Hub"
    assert found == [
        f"  {name}, line {line_of(text, folder / name)}: {what}"
        for name, disclosures in places.items()
        for text, what in disclosures
    ]
    assert advice.startswith("Nothing was uploaded. Cut these paths down to names")
    assert "me/open" not in hub.repositories


def test_push_refuses_all_but_regular_files_of_the_folder_and_names_them(
    hub, make_folder, tmp_path
):
    folder, outside = make_folder("odd"), tmp_path / "credentials"
    outside.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (outside / file).write_text("{}")
    (folder / "README.md").unlink()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("url")
    for name, target in {
        "vocab.txt": outside / "tokenizer.json",
        "README.md": outside / "tokenizer.json",
        "target_tokenizer": outside,
        "vocab.json": folder / ".git" / "config",
    }.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "added_tokens.json")
    (folder / "merges.txt").mkdir()

    message = command("--model", folder, "me/odd")

    assert "must hold all of its model in regular files of its own, got\n" in message
    for name in ("vocab.txt", "README.md", "target_tokenizer/tokenizer.json"):
        assert f"  {name}: a link to {str(outside / 'tokenizer.json')!r}\n" in message
    assert "  vocab.json: a link to " in message
    assert "  added_tokens.json: not a regular file\n" in message
    assert "  merges.txt: not a regular file\n" in message
    assert (outside / "tokenizer.json").read_text() == "{}"
    assert "me/odd" not in hub.repositories


def test_push_uploads_what_links_lead_to_inside_a_folder_and_nothing_hidden(hub, make_folder):
    folder = make_folder("inside")
    (folder / "real").mkdir()
    (folder / "model.safetensors").rename(folder / "real" / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("real/weights.safetensors")
    (folder / ".hidden.model").write_text("mine")

    command("--model", folder, "me/inside")

    files = hub.repositories["me/inside"].files()
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert ".hidden.model" not in files


def test_push_takes_a_snapshot_of_the_hubs_cache(hub, make_folder, tmp_path):
    repository = tmp_path / "models--me--base"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in make_folder().iterdir():
        if file.is_file():
            file.rename(blobs / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")

    assert command("--model", snapshot, "me/snapshot").startswith("The model is at ")

    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    assert "regular files of its own" in command("--model", snapshot, "me/snapshot")


@pytest.mark.parametrize("name", ["run.json", "model.safetensors"])
def test_push_uploads_no_bytes_that_were_not_checked(hub, make_folder, monkeypatch, name):
    folder = make_folder("moving")
    checked = (folder / name).read_bytes()

    def load_and_write(model):
        with (folder / name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"?")

    monkeypatch.setattr("vanilla_transformer_tools.sharing.push.load_model", load_and_write)
    message = command("--model", folder, f"me/moving-{name}")

    repository = hub.repositories[f"me/moving-{name}"]
    if name == "run.json":
        assert repository.files()[name] == checked
    else:
        assert "model.safetensors' was changed while it was checked" in message
        assert repository.messages == ["initial commit"]


def test_push_of_what_was_trained_here_and_of_words_about_paths_is_not_refused(
    hub, make_folder, tmp_path, monkeypatch
):
    folder = make_folder("clean")
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = Seq2SeqTrainingArguments(str(folder), use_cpu=True, hub_token=SECRET)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "vanilla-transformer"), "--x", SECRET])
    pair = [str(tmp_path / "a.de"), str(tmp_path / "a.en")]
    settings = TrainSettings(train=pair, max_tokens_per_batch=8192)
    write_json(folder / "run.json", **describe_run(settings, arguments, 0))
    words = "/home/jo/file.txt C:\\Users\\jo /root/x hf_hub_download sk-learn Bearer AKIA"
    learn(words, kind="word").save_pretrained(folder)
    assert '"/home/jo/file.txt"' in (folder / "tokenizer.json").read_text("utf-8")

    assert command("--model", folder, "me/clean").startswith("The model is at ")


@pytest.mark.parametrize(
    ("factor", "fault"), [(float("nan"), "all finite, got 1 not finite"), (None, "got 1 missing")]
)
def test_push_refuses_weights_that_are_not_finite_or_not_complete(hub, make_folder, factor, fault):
    folder = make_folder()
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop(NORM)
    if factor is not None:
        weights[NORM] = norm * factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    message = command("--model", folder, "me/part")

    assert f"{fault} ({NORM})" in message
    assert "me/part" not in hub.repositories


# Mistakes


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (["model.safetensors"], r"no model\*.safetensors"),
        (["target_tokenizer/tokenizer.json"], r"no target_tokenizer/tokenizer\.json"),
        (["config.json", "tokenizer.json"], "no config.json and no tokenizer.json"),
    ],
)
def test_folder_without_a_needed_file_is_refused(tmp_path, names, lacks):
    folder = Path(save_latin_to_greek(tmp_path / "half"))
    for name in names:
        (folder / name).unlink()

    with pytest.raises(ValueError, match=rf"half' must hold a saved model .*got {lacks}\. Give"):
        push(folder, "me/half")


def test_push_refuses_a_model_of_another_kind(hub, make_folder):
    folder = make_folder("other")
    write_json(folder / "config.json", model_type="marian")

    with pytest.raises(ValueError, match=r"got a model of another kind\. .* `hf upload me/other "):
        push(folder, "me/other")

    assert "me/other" not in hub.repositories


def test_push_without_a_token_tells_how_to_log_in(hub, make_folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))

    message = command("--model", make_folder(), "me/anonymous")

    assert message.startswith("vanilla-transformer: An upload needs a token of the Hub, got none.")
    assert "hf auth login" in message


def test_hub_out_of_reach_is_told_alone(hub, make_folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")

    message = command("--model", make_folder(), "me/nowhere")

    assert message.startswith("vanilla-transformer: the Hub cannot be reached: ")
