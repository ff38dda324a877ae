"""The script that scores by length: which line is in which group, means over models."""

import json
from functools import partial

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.translation import Translator

from ..models import save_small_model
from ..support.documents import ROOT
from ..support.scripts import run_script

score = partial(run_script, ROOT / "scripts" / "score_by_length.py")
SOURCES = ["a", "b a", "a b a", "b b a b", "a a a b a", "b a a b a b b a"]


def write_pairs(path, pairs):
    rows = [json.dumps({"source": source, "target": target}) for source, target in pairs]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def test_groups_are_scored_apart_and_models_averaged(tmp_path):
    tokenizer = VanillaTransformerTokenizer.train([*SOURCES, "x y"] * 3, vocab_size=280)
    models = [save_small_model(tmp_path / str(size), tokenizer, d_model=size) for size in (16, 32)]
    first, second = (
        [
            output.text
            for output in Translator.from_pretrained(str(model), num_beams=1).translate(SOURCES)
        ]
        for model in models
    )
    assert all(one.split() != other.split() for one, other in zip(first, second, strict=True))
    # Up to three tokens the first model is right, beyond none is.
    targets = [*first[:3], "x y", "x y", "x y"]
    write_pairs(tmp_path / "test.jsonl", zip(SOURCES, targets, strict=True))

    done = score(*models, "--test", tmp_path / "test.jsonl", "--up_to", 3, 1, 7, 5)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "| source tokens | lines | wer | range |",
        "| --- | --- | --- | --- |",
        "| 1 to 1 | 1 | 50.00 | 0.00-100.00 |",
        "| 2 to 3 | 2 | 50.00 | 0.00-100.00 |",
        "| 4 to 5 | 2 | 100.00 | 100.00-100.00 |",
        "| 8 and more | 1 | 100.00 | 100.00-100.00 |",
    ]
