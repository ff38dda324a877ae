"""Files and requests of strangers: each is refused in one sentence, soon, and leaves nothing.

A row of the table has a name, how it is made, and the command that is given it. Requests to `serve`
have a table of their own beside this one.
"""

import gzip
import json
import os
import pickle
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
from safetensors.torch import load_file, save_file

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.saved_folder import describe_model_files, write_run

from ..conftest import save_small_model

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


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Make:
    """Weights that are changed; the record of them is deleted."""

    def make(place: Path) -> None:
        weights = load_file(place / "M/model.safetensors")
        change(weights)
        save_file(weights, place / "M/model.safetensors", metadata={"format": "pt"})
        (place / "M/run.json").unlink()

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


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("never",)


def pickled(value: Any) -> Make:
    def make(place: Path) -> None:
        (place / "M/model.safetensors").unlink()
        (place / "M/run.json").unlink()
        (place / "M/pytorch_model.bin").write_bytes(pickle.dumps(value))

    return make


def bomb(place: Path) -> None:
    """A line of 80 MB in 80 kB."""
    (place / "a").write_bytes(gzip.compress(bytes(80_000_000), 1))


ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
MERGES = "m0: &m0 {k0: v}\n" + "".join(
    f"m{n}: &m{n}\n  <<: [{', '.join([f'*m{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
YAML = {
    "aliases": ALIASES,
    "merges": MERGES,
    "alias to itself": "a: &a [*a]\n",
    "brackets": "a: " + "[" * 50_000,
    "python object": "a: !!python/object/apply:os.system ['echo never']\n",
    "no such day": "a: 2026-99-99\n",
    "truth of a word": "a: !!bool x\n",
    "not UTF-8": b"a: \xff\n",
    "empty": "",
}
JSON = {
    "empty": "",
    "a list": "[]",
    "brackets": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "not UTF-8": b'{"a": "\xff"}',
    "endless number": '{"a": ' + "1" * 5_000 + "}",
}
OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "run.json",
)
NOT_FINITE = {"inf": float("inf"), "nan": float("nan"), "object": {"__float__": "Infinity"}}
HUGE = {
    "d_model": 10**9,
    "encoder_layers": 10**8,
    "decoder_layers": 10**8,
    "encoder_ffn_dim": 10**9,
    "decoder_ffn_dim": 10**9,
    "vocab_size": 10**9,
    "d_k": 10**9,
    "d_v": 10**9,
}
OUTSIDE = {
    "above": "../outside.safetensors",
    "absolute": "/etc/passwd",
    "around": "x/../../outside.safetensors",
    "zero": "a\0b",
}


def cases() -> Iterator[Case]:
    for name, value in HUGE.items():
        yield Case(f"{name} {value:.0e}", setting("config.json", **{name: value}), TRANSLATE)
        constants = f"constants:\n  vocab_size: 40\n  {name}: {value}\n"
        yield Case(f"{name} {value:.0e} mapped", content("mapping.yaml", constants), MAPPED)
    for name in ("layer_norm_eps", "position_base", "dropout"):
        for kind, value in {"inf": float("inf"), "negative": -1.0, "huge": 10**400}.items():
            yield Case(f"{name} {kind}", setting("config.json", **{name: value}), TRANSLATE)
    yield Case("norm of 1e30", setting("config.json", layer_norm_eps=1e30), TRANSLATE)
    for name in ("length_penalty", "temperature", "repetition_penalty"):
        for kind, value in NOT_FINITE.items():
            make = setting("generation_config.json", **{name: value})
            yield Case(f"{name} {kind}", make, TRANSLATE)
    for file in OBJECTS:
        # All but the tokenizer's are read by one function.
        kinds = JSON if file in ("config.json", "tokenizer.json") else ("brackets", "not UTF-8")
        for kind in kinds:
            yield Case(f"{file} {kind}", content(f"M/{file}", JSON[kind]), TRANSLATE)
    for file in (*OBJECTS, "model.safetensors", "target_tokenizer/tokenizer.json"):
        for kind in ("pipe", "zero"):
            yield Case(f"{file} {kind}", special(f"M/{file}", kind), TRANSLATE)
    yield Case("socket beside", special("M/socket", "socket"), TRANSLATE)
    for kind, name in OUTSIDE.items():
        make = setting("run.json", files={name: {"bytes": 1, "sha256": "0"}})
        yield Case(f"record {kind}", make, TRANSLATE)
        yield Case(f"shard {kind}", shards(name), TRANSLATE)
        yield Case(f"shard {kind}, import", shards(name), IMPORT)
    yield Case("shards by number", shards(7), TRANSLATE)
    for dtype in (torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64):

        def cast(weights: dict[str, torch.Tensor], dtype: torch.dtype = dtype) -> None:
            weights.update({name: one.to(dtype) for name, one in weights.items()})

        yield Case(f"weights of {dtype}", tensors(cast), TRANSLATE)
    large = {"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    for kind, change in {
        "empty": lambda _: b"",
        "cut": lambda data: data[:-9],
        "long header": lambda data: struct.pack("<Q", 2**62) + data[8:],
        "brackets": with_header(b"[" * 10_000),
        "a list": with_header([]),
        "no shape": with_header({"x": {"dtype": "F32", "data_offsets": [0, 4]}}),
        "a shape of words": with_header({"x": {"dtype": "F32", "shape": ["a"]}}),
        "more than there is": with_header(large),
    }.items():
        yield Case(f"safetensors {kind}", header(change), TRANSLATE)
    for kind, text in YAML.items():
        yield Case(f"mapping {kind}", content("mapping.yaml", text), MAPPED)
        if kind != "no such day":
            yield Case(f"recipe {kind}", content("recipe.yaml", text), RECIPE)
    yield Case("mapping pipe", special("mapping.yaml", "pipe"), MAPPED)
    yield Case("recipe pipe", special("recipe.yaml", "pipe"), RECIPE)
    yield Case("compressed weights", zipped, IMPORT)
    yield Case("weights that run code", pickled({"a": RunsCode()}), IMPORT)
    yield Case("weights of words", pickled(["a"]), IMPORT)
    for kind in ("pipe", "zero", "socket"):
        yield Case(f"corpus {kind}, test", special("a", kind), f"{EVALUATE} a b")
        yield Case(f"corpus {kind}, train", special("b", kind), f"{TRAIN} a b")
        for end in ("tsv", "jsonl", "parquet"):
            yield Case(f"{end} {kind}", special(f"c.{end}", kind), f"{EVALUATE} c.{end}")
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
