"""Models of Marian with random weights, in its own files, and the engine itself.

The names and shapes are those that `marian train` writes (1.12.42). `pymarian` is an engine of a
gigabyte, which only the slow tests install, into an environment of its own.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

PACKAGE = "pymarian==1.12.42"
WIDTH, ENTRIES = 64, 90
POST_NORM = {
    "version": "v1.12.42",
    "type": "transformer",
    "dim-emb": WIDTH,
    "dim-vocabs": [ENTRIES, ENTRIES],
    "enc-depth": 2,
    "dec-depth": 2,
    "tied-embeddings": False,
    "tied-embeddings-all": True,
    "tied-embeddings-src": False,
    "transformer-heads": 4,
    "transformer-dim-ffn": 96,
    "transformer-decoder-dim-ffn": 0,
    "transformer-ffn-activation": "swish",
    "transformer-ffn-depth": 2,
    "transformer-decoder-ffn-depth": 0,
    "transformer-decoder-autoreg": "self-attention",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-no-projection": False,
    "transformer-tied-layers": [],
    "transformer-guided-alignment-layer": "last",
    "transformer-aan-activation": "swish",
    "transformer-aan-depth": 2,
    "transformer-aan-nogate": False,
    "transformer-dim-aan": 2048,
    "transformer-attention-mask": "default",
    "transformer-alibi-shift": False,
    "transformer-alibi-trainable": False,
    "transformer-disable-position-embeddings": False,
    "transformer-train-position-embeddings": False,
    "transformer-no-affine": False,
    "transformer-no-bias": False,
    "transformer-pool": False,
    "transformer-rnn-projection": False,
    "output-omit-bias": False,
    "lemma-dim-emb": 0,
    "lemma-dependency": "",
    "factors-combine": "sum",
    "factors-dim-emb": 0,
    "input-types": [],
    "layer-normalization": False,
    "right-left": False,
    "skip": False,
    "ulr": False,
    "ulr-dim-emb": 0,
    "ulr-trainable-transformation": False,
    "bert-train-type-embeddings": True,
    "bert-type-vocab-size": 2,
    "dec-cell": "gru",
    "dec-cell-base-depth": 2,
    "dec-cell-high-depth": 1,
    "enc-cell": "gru",
    "enc-cell-depth": 1,
    "enc-type": "bidirectional",
    "dim-rnn": 1024,
    "separator-symbol": "[eos]",
}
PRE_NORM = {
    "transformer-preprocess": "n",
    "transformer-postprocess": "da",
    "transformer-postprocess-top": "n",
}
UNTIED = {"tied-embeddings-all": False}
SHAPES = {
    "post_norm": {},
    "pre_norm": {**PRE_NORM, "transformer-ffn-activation": "relu"},
    "separate": {**UNTIED, "tied-embeddings": True, "dim-vocabs": [ENTRIES, ENTRIES - 9]},
    "deep_encoder": {"enc-depth": 6, "dec-depth": 2, "transformer-ffn-activation": "gelu"},
    "untied": {
        **UNTIED,
        "transformer-postprocess-emb": "nd",
        "transformer-decoder-dim-ffn": 80,
        "output-omit-bias": True,
    },
    "own_projection": {**UNTIED, **PRE_NORM, "tied-embeddings-src": True},
}


def random_arrays(settings: dict) -> dict[str, np.ndarray]:
    """Every tensor of a model, all of which matter."""
    random = np.random.default_rng(7)
    arrays = {}
    width, (source, target) = settings["dim-emb"], settings["dim-vocabs"]

    def add(name, *shape, scale=1.0, mean=0.0):
        arrays[name] = (mean + scale * random.standard_normal(shape)).astype(np.float32)

    def norm(name, suffix=""):
        add(f"{name}_ln_scale{suffix}", 1, width, scale=0.2, mean=1)
        add(f"{name}_ln_bias{suffix}", 1, width, scale=0.2)

    def dense(name, suffix, rows, columns):
        add(f"{name}_W{suffix}", rows, columns, scale=1.5 * rows**-0.5)
        add(f"{name}_b{suffix}", 1, columns, scale=0.2)

    is_all = settings["tied-embeddings-all"]
    if is_all or settings["tied-embeddings-src"]:
        add("Wemb", source, width, scale=width**-0.5)
    else:
        add("encoder_Wemb", source, width, scale=width**-0.5)
        add("decoder_Wemb", target, width, scale=width**-0.5)
    if not (is_all or settings["tied-embeddings"]):
        add("decoder_ff_logit_out_Wt", target, width, scale=width**-0.5)
    if not settings["output-omit-bias"]:
        add("decoder_ff_logit_out_b", 1, target, scale=0.5)
    suffix = "_pre" if "n" in settings["transformer-preprocess"] else ""
    inner = settings["transformer-dim-ffn"]
    for stack, depth, ffn, attentions in (
        ("encoder", settings["enc-depth"], inner, ["self"]),
        (
            "decoder",
            settings["dec-depth"],
            settings["transformer-decoder-dim-ffn"] or inner,
            ["self", "context"],
        ),
    ):
        if "n" in settings["transformer-postprocess-emb"]:
            norm(f"{stack}_emb", "_pre")
        if settings["transformer-postprocess-top"]:
            norm(f"{stack}_top")
        for layer in range(1, depth + 1):
            for attention in attentions:
                name = f"{stack}_l{layer}_{attention}"
                for part in "qkvo":
                    dense(name, part, width, width)
                norm(f"{name}_Wo", suffix)
            name = f"{stack}_l{layer}_ffn"
            dense(name, "1", width, ffn)
            dense(name, "2", ffn, width)
            norm(f"{name}_ffn", suffix)
    return arrays


def words(side: str, count: int) -> list[str]:
    """Tokens of a vocabulary, `</s>` and `<unk>` first."""
    return ["</s>", "<unk>", *(f"{side}{number}" for number in range(2, count))]


def write_npz(file: Path, arrays: dict[str, np.ndarray], settings: dict | None) -> None:
    """As Marian writes it, with a zero at the end of the settings."""
    extra = {}
    if settings is not None:
        text = yaml.safe_dump(settings).encode() + b"\0"
        extra = {"special:model.yml": np.frombuffer(text, np.int8)}
    np.savez(file, **arrays, **extra)


def save_marian(folder: Path, changes: dict | None = None) -> Path:
    """A folder with a model, its vocabularies and its decoder.yml."""
    settings = POST_NORM | (changes or {})
    folder.mkdir(parents=True)
    write_npz(folder / "model.npz", random_arrays(settings), settings)
    is_joint = settings["tied-embeddings-all"] or settings["tied-embeddings-src"]
    names = ["vocab.yml", "vocab.yml"] if is_joint else ["source.yml", "target.yml"]
    for name, side, count in zip(names, "st", settings["dim-vocabs"], strict=True):
        if not (folder / name).exists():
            lines = [f"{token}: {row}\n" for row, token in enumerate(words(side, count))]
            (folder / name).write_text("".join(lines))
    decoder = {"models": ["model.npz"], "vocabs": names, "beam-size": 4, "normalize": 1}
    (folder / "decoder.yml").write_text(yaml.safe_dump(decoder))
    return folder


@dataclass
class Engine:
    """Marian itself.

    Attributes:
        python: Of an environment that has it.
        path: Where its package lies if the environment lacks it.
    """

    python: Path
    path: str = ""

    def run(self, command: str, folder: Path, *options: object, lines: str = "") -> list[str]:
        arguments = ["--cpu-threads", "1", "-w", "100", *map(str, options)]
        found = subprocess.run(
            [self.python, "-m", "pymarian", command, *arguments],
            cwd=folder,
            input=lines,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": self.path, "OMP_NUM_THREADS": "1"},
        )
        assert found.returncode == 0, found.stderr[-2000:]
        return found.stdout.splitlines()

    def translate(self, folder: Path, lines: list[str], beams: int) -> list[tuple[str, float]]:
        """The best output of each line, and the sum of its log-probabilities."""
        options = ["-c", "decoder.yml", "-b", beams, "--n-best", "--normalize", int(beams > 1)]
        options += ["--mini-batch", 1, "--maxi-batch", 1, "--quiet"]
        found: dict[str, tuple[str, float]] = {}
        for line in self.run("decode", folder, *options, lines="\n".join([*lines, ""])):
            number, text, features, _ = line.split(" ||| ")
            found.setdefault(number, (text, float(features.split("=")[1])))
        return [found[str(number)] for number in range(len(lines))]

    def score(self, folder: Path, sources: list[str], targets: list[str]) -> list[float]:
        """Log-probability of each target with its `</s>`."""
        for name, lines in (("s.txt", sources), ("t.txt", targets)):
            (folder / name).write_text("\n".join([*lines, ""]))
        vocabularies = yaml.safe_load((folder / "decoder.yml").read_text())["vocabs"]
        options = ["-m", "model.npz", "-v", *vocabularies, "-t", "s.txt", "t.txt", "--quiet"]
        return [float(line) for line in self.run("score", folder, *options)]


def random_lines(vocabulary: list[str], lengths: list[int]) -> list[str]:
    random = np.random.default_rng(3)
    return [
        " ".join(vocabulary[row] for row in random.integers(2, len(vocabulary), length))
        for length in lengths
    ]
