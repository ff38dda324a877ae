"""Files and requests of strangers: each is refused in one sentence, soon, and leaves nothing.

A row of the table has a name, how it is made, and the command that is given it. Requests to `serve`
have a table of their own beside this one.
"""

import gzip
import json
import os
import resource
import shutil
import signal
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.saved_folder import describe_model_files, write_run

from ..models import save_small_model

pytestmark = pytest.mark.slow

MOST_SECONDS = 20
MOST_BYTES = 2 * 2**30

Make = Callable[[Path], Any]

TRANSLATE = "translate --engine torch --model M wort"
IMPORT = "import M OUT"
MAPPED = "import --mapping mapping.yaml M/model.safetensors OUT"
RECIPE = "train recipe.yaml --train a b --output_dir OUT"
TRAIN = "train --preset tiny --max_steps 1 --vocab_size 30 --output_dir OUT --train"
EVALUATE = "evaluate --model M --test"


class Case(NamedTuple):
    """A row of the table.

    Attributes:
        name: What is hostile about it.
        make: Makes it, given a folder with a model `M` and a corpus `a`, `b`.
        command: What is given it, in that folder.
    """

    name: str
    make: Make
    command: str


def setting(file: str, **values: Any) -> Make:
    def make(place: Path) -> None:
        path = place / "M" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return make


def content(file: str, text: str | bytes) -> Make:
    data = text.encode() if isinstance(text, str) else text
    return lambda place: (place / file).write_bytes(data)


def special(file: str, kind: str) -> Make:
    def make(place: Path) -> None:
        path = place / file
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            # The paths of sockets are short.
            with chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
        else:
            path.symlink_to(f"/dev/{kind}")

    return make


def header(change: Callable[[bytes], bytes]) -> Make:
    """The bytes of the weights, changed."""

    def make(place: Path) -> None:
        file = place / "M/model.safetensors"
        file.write_bytes(change(file.read_bytes()))
        (place / "M/run.json").unlink()

    return make


def with_header(values: Any) -> Callable[[bytes], bytes]:
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return lambda _: struct.pack("<Q", len(text)) + text + bytes(64)


def shards(name: Any) -> Make:
    def make(place: Path) -> None:
        weights = load_file(place / "M/model.safetensors")
        (place / "M/model.safetensors").rename(place / "outside.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (place / "M/model.safetensors.index.json").write_text(json.dumps(index))
        (place / "M/run.json").unlink()

    return make


def zipped(place: Path) -> None:
    """Weights of PyTorch whose entries unpack to a hundred times their size."""
    weights = load_file(place / "M/model.safetensors")
    (place / "M/model.safetensors").unlink()
    (place / "M/run.json").unlink()
    torch.save({name: torch.zeros_like(one) for name, one in weights.items()}, place / "stored")
    with (
        zipfile.ZipFile(place / "stored") as stored,
        zipfile.ZipFile(place / "M/pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))


def bomb(place: Path) -> None:
    """A line of 80 MB in 80 kB."""
    (place / "a").write_bytes(gzip.compress(bytes(80_000_000), 1))


YAML = {
    "aliases": "a0: &a0 [x, x]\n"
    + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
    "merges": "m0: &m0 {k: v}\n"
    + "".join(f"m{n}: &m{n}\n  <<: [*m{n - 1}, *m{n - 1}]\n" for n in range(1, 40)),
    "python object": "a: !!python/object/apply:os.system ['echo never']\n",
    "truth of a word": "a: !!bool x\n",
    "not UTF-8": b"a: \xff\n",
}
JSON = {
    "brackets": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "not UTF-8": b'{"a": "\xff"}',
    "endless number": '{"a": ' + "1" * 5_000 + "}",
}


def cases() -> Iterator[Case]:
    """What the tests of `saved_folder`, `files` and `interop` do not try, file by file."""
    for name in ("d_model", "vocab_size", "encoder_layers"):
        yield Case(f"{name} of 1e8", setting("config.json", **{name: 10**8}), TRANSLATE)
        constants = f"constants:\n  vocab_size: 40\n  {name}: 100000000\n"
        yield Case(f"{name} of 1e8, mapped", content("mapping.yaml", constants), MAPPED)
    yield Case("dropout of 1e400", setting("config.json", dropout=10**400), TRANSLATE)
    yield Case("norm of 1e30", setting("config.json", layer_norm_eps=1e30), TRANSLATE)
    penalty = setting("generation_config.json", length_penalty={"__float__": "Infinity"})
    yield Case("penalty that is an object", penalty, TRANSLATE)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "run.json"):
        for kind, text in JSON.items():
            yield Case(f"{file}, {kind}", content(f"M/{file}", text), TRANSLATE)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        for kind in ("pipe", "zero"):
            yield Case(f"{file} is {kind}", special(f"M/{file}", kind), TRANSLATE)
    yield Case("pipe in a folder", special("M/target_tokenizer/tokenizer.json", "pipe"), TRANSLATE)
    yield Case("socket", special("M/socket", "socket"), TRANSLATE)
    for name in ("../outside.safetensors", "a\0b", 7):
        yield Case(f"shard {name!r}", shards(name), IMPORT)
    large = {"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    for kind, change in {
        "empty": lambda _: b"",
        "long header": lambda data: struct.pack("<Q", 2**62) + data[8:],
        "brackets": with_header(b"[" * 10_000),
        "a list": with_header([]),
        "no shape": with_header({"x": {"dtype": "F32", "data_offsets": [0, 4]}}),
        "more than there is": with_header(large),
    }.items():
        yield Case(f"safetensors {kind}", header(change), TRANSLATE)
    yield Case("compressed weights", zipped, IMPORT)
    for kind, text in YAML.items():
        yield Case(f"mapping {kind}", content("mapping.yaml", text), MAPPED)
        yield Case(f"recipe {kind}", content("recipe.yaml", text), RECIPE)
    yield Case("mapping pipe", special("mapping.yaml", "pipe"), MAPPED)
    yield Case("recipe pipe", special("recipe.yaml", "pipe"), RECIPE)
    for kind in ("pipe", "zero", "socket"):
        yield Case(f"corpus {kind}, test", special("a", kind), f"{EVALUATE} a b")
        yield Case(f"corpus {kind}, train", special("b", kind), f"{TRAIN} a b")
    for end in ("tsv", "jsonl", "parquet"):
        yield Case(f"{end} pipe", special(f"c.{end}", "pipe"), f"{EVALUATE} c.{end}")
    yield Case("corpus bomb, test", bomb, f"{EVALUATE} a b")
    yield Case("corpus bomb, train", bomb, f"{TRAIN} a b")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a record of its files."""
    tokenizer = VanillaTransformerTokenizer.train(
        ["ein wort und noch eins"], vocab_size=40, kind="char"
    )
    folder = tmp_path_factory.mktemp("hostile")
    save_small_model(folder, tokenizer)
    write_run(folder, {"files": describe_model_files(folder)})
    return folder


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Path:
    """An empty folder with a copy of the model, `M`, and a corpus, `a` and `b`."""
    shutil.copytree(model, tmp_path / "M")
    for name in ("a", "b"):
        (tmp_path / name).write_text("ein wort\n" * 30)
    return tmp_path


@contextmanager
def limited() -> Iterator[None]:
    """Ends what takes long, and refuses memory to what takes much."""

    def end(*_: int | FrameType | None) -> None:
        raise TimeoutError(f"took more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    signal.alarm(MOST_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_hostile_file_is_refused_in_a_sentence(case, place, run, monkeypatch):
    monkeypatch.chdir(place)
    case.make(place)

    with limited():
        outcome = run(*case.command.split())

    assert outcome.status == 2
    assert outcome.err.splitlines()[-1].strip()
    assert "vanilla-transformer: " in outcome.err
    for word in ("Traceback", "never", "not enough memory", "TimeoutError", "took more than"):
        assert word not in outcome.out + outcome.err
    assert not (place / "OUT/config.json").exists()
    assert not list(place.glob(".OUT*"))
