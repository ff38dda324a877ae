"""The script that reranks with a model that writes from right to left."""

import json
from functools import partial
from itertools import product

import torch

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.translation import Translator

from ..conftest import save_small_model
from ..support.documents import ROOT
from ..support.scripts import run_script

rerank = partial(run_script, ROOT / "scripts" / "rerank.py")
SOURCES = [" ".join(letters) for length in range(2, 5) for letters in product("ab", repeat=length)]


def write_pairs(path, pairs):
    rows = [json.dumps({"source": source, "target": target}) for source, target in pairs]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@torch.no_grad()
def score(translator, source, target):
    """Log-probability of a target for each of its tokens."""
    tokenizer, model = translator.tokenizer, translator.engine.model
    inputs = tokenizer([source], text_target=[target], return_tensors="pt")
    log_probs = model(**inputs).logits.log_softmax(-1)[0]
    return log_probs.gather(-1, inputs["labels"][0][:, None]).mean().item()


def test_weight_of_the_reverse_model_is_chosen_on_validation(tmp_path):
    words = ["c d e f g h i j k", *SOURCES] * 3
    tokenizer = VanillaTransformerTokenizer.train(words, kind="word")
    model, reverse = (
        save_small_model(tmp_path / str(size), tokenizer, d_model=size) for size in (24, 32)
    )
    forward = Translator.from_pretrained(
        str(model), engine="torch", num_beams=6, num_hypotheses=6, scores=True
    )
    backward = Translator.from_pretrained(str(reverse), engine="torch")
    usual, reranked, misread = [], [], []
    for source, found in zip(SOURCES, forward.translate(SOURCES), strict=True):
        usual.append(found.text)
        outputs = [found.text, *(other.text for other in found.alternatives)]
        as_read, as_written = (
            [score(backward, source, text[::step]) for text in outputs] for step in (-1, 1)
        )
        reranked.append(outputs[as_read.index(max(as_read))])
        misread.append(outputs[as_written.index(max(as_written))])
    others = sum(one != other for one, other in zip(usual, reranked, strict=True))
    assert others >= 3
    assert misread != reranked
    wrong = f"{100 * others / len(SOURCES):.2f}"
    for name, targets in (("validation", reranked), ("test", usual)):
        write_pairs(tmp_path / f"{name}.jsonl", zip(SOURCES, targets, strict=True))

    done = rerank(
        *("--model", model, "--reverse", reverse, "--n_best", 6, "--weights", 1e-9, 1e9),
        *("--metric", "wer", "--test", tmp_path / "test.jsonl"),
        *("--validation", tmp_path / "validation.jsonl"),
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "| weight | wer on validation | on test |",
        "| --- | --- | --- |",
        f"| 0 | {wrong} | 0.00 |",
        f"| 1e-09 | {wrong} |  |",
        f"| 1e+09 (chosen) | 0.00 | {wrong} |",
    ]
