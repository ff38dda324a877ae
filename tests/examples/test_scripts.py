"""Each script of `examples/` does what it says, on a few sentences."""

import json
import os
import re
import runpy
import subprocess

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainingArguments,
)

from vanilla_transformer_tools.evaluation.metrics import TranslationScores
from vanilla_transformer_tools.exports.export import export_model
from vanilla_transformer_tools.translation import Translator

from ..support.documents import ROOT, read
from ..support.environments import build_environment
from ..support.scripts import run_script
from .conftest import SOURCES, TARGETS, pairs_of

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def run(name, *argv):
    """Runs an example and returns what it printed."""
    done = run_script(EXAMPLES / name, *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_of(name):
    """Functions and classes of an example."""
    return runpy.run_path(str(EXAMPLES / name))


def load(folder):
    return AutoModelForSeq2SeqLM.from_pretrained(folder)


def translate(folder):
    translator = Translator.from_pretrained(str(folder), num_beams=1)
    return [translation.text for translation in translator.translate(SOURCES)]


def batches_of(folder, size):
    """The sentences as batches."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [
        dict(tokenizer(source, text_target=target))
        for source, target in zip(SOURCES, TARGETS, strict=True)
    ]
    collate = DataCollatorForSeq2Seq(tokenizer)
    return [collate(rows[start : start + size]) for start in range(0, len(rows), size)]


def needed_by(script):
    """What a script needs, as pip takes it: the package, unless its row of the table says else."""
    row = next(
        line for line in read("examples/README.md").splitlines() if f"]({script.name})" in line
    )
    packages = re.search("`pip install (.+?)`", row.replace("-e .", "vanilla-transformer"))
    return packages[1].split() if packages else ["vanilla-transformer"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_script_runs_with_nothing_but_what_it_says_it_needs(place, tmp_path, script):
    needed = needed_by(script)
    python = build_environment(tmp_path / "environment", needed)
    sources = {"PYTHONPATH": str(ROOT / "src")} if "vanilla-transformer" in needed else {}
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    once = ["--max_steps", "1", "--disable_tqdm", "true", *pairs_of(place)]
    made = ["--output_dir", str(tmp_path / "made")]
    options = {
        "distil": ["--teacher", str(place / "model"), *made, *once],
        "evaluate_model": ["--model", str(place / "model"), "--test", *pairs_of(place)[1:3]],
        "finetune_with_accelerate": [
            *("--model", str(place / "model"), *made, "--epochs", "1", *pairs_of(place))
        ],
        "finetune_with_trainer": ["--model", str(place / "model"), *made, *once],
        "talking_heads": [*made, *once, "--vocab_size", "330"],
    }

    done = subprocess.run(
        # Others run for ever, or read standard input.
        [python, script, *options.get(script.stem, ["--help"])],
        cwd=tmp_path,
        env={**others, **sources, "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def tuned(place, tmp_path_factory):
    """What the script with `Seq2SeqTrainer` makes of the untrained model."""
    folder = tmp_path_factory.mktemp("tuned")
    options = ["--max_steps", "100", "--learning_rate", "0.01", "--warmup_steps", "5"]
    options += ["--eval_strategy", "steps", "--save_strategy", "steps", "--disable_tqdm", "true"]
    options += ["--eval_steps", "100", "--save_steps", "100", "--per_device_eval_batch_size", "2"]
    run(
        "finetune_with_trainer.py",
        *("--model", place / "model", "--output_dir", folder, *pairs_of(place), *options),
    )
    return folder


def test_trainer_learns_the_pairs(tuned):
    assert translate(tuned) == TARGETS


def test_loop_with_accelerate_trains_and_scores(place, tmp_path):
    (batch,) = batches_of(place / "model", len(SOURCES))
    before = load(place / "model")(**batch).loss.item()

    printed = run(
        "finetune_with_accelerate.py",
        *("--model", place / "model", "--output_dir", tmp_path, *pairs_of(place)),
        *("--epochs", 4, "--batch_size", 2, "--gradient_accumulation_steps", 1),
        *("--learning_rate", 0.01, "--warmup_steps", 1),
    )

    trained = load(tmp_path)
    assert trained(**batch).loss.item() < before - 1
    outputs = trained.generate(batch["input_ids"], attention_mask=batch["attention_mask"])
    texts = AutoTokenizer.from_pretrained(tmp_path).batch_decode(outputs, skip_special_tokens=True)
    scores = TranslationScores().compute(predictions=texts, references=TARGETS)
    assert f"chrF {scores['chrf']:.2f}" in printed.splitlines()[-1]


@pytest.mark.parametrize("size", [3, 8])
def test_accumulated_gradients_are_those_of_one_batch(place, size):
    accelerate = names_of("finetune_with_accelerate.py")
    whole, split = load(place / "model").train(), load(place / "model").train()
    (batch,) = batches_of(place / "model", len(SOURCES))
    expected = whole(**batch).loss
    expected.backward()

    loss = accelerate["add_gradients"](
        split, batches_of(place / "model", size), accelerate["Accelerator"]()
    )

    assert loss == pytest.approx(expected.item())
    for parameter, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad)


def test_model_of_ones_own_has_talking_heads(place, tmp_path):
    run(
        "talking_heads.py",
        *("--output_dir", tmp_path / "talking", *pairs_of(place)),
        *("--vocab_size", 330, "--max_steps", 2, "--disable_tqdm", "true"),
    )

    config = load(tmp_path / "talking").config
    assert (config.talking_heads, config.key_heads, config.vocab_size) == ("both", 8, 330)
    assert len(translate(tmp_path / "talking")) == len(SOURCES)


def test_distilled_model_is_smaller_and_searches_as_its_teacher(place, tmp_path):
    printed = run(
        "distil.py",
        *("--teacher", place / "model", "--output_dir", tmp_path / "student", *pairs_of(place)),
        *("--max_steps", 2, "--disable_tqdm", "true"),
    )

    student = load(tmp_path / "student")
    assert student.config.d_model == 64
    assert student.generation_config.max_length == 48
    assert f"student {student.num_parameters():,}" in printed


def test_distillation_adds_the_divergence_from_the_teacher(place, tmp_path):
    distil = names_of("distil.py")
    teacher, student = load(place / "model"), load(place / "model")
    with torch.no_grad():
        student.model.decoder.layers[0].fc1.weight.mul_(1.5)
    trainer = distil["DistillationTrainer"](
        student,
        Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, dataloader_pin_memory=False),
        teacher=teacher,
    )
    (batch,) = batches_of(place / "model", len(SOURCES))
    is_target = batch["labels"] != -100
    # Of an update that has as many targets in another batch.
    count = 2 * is_target.sum()
    logits, taught = (model.eval()(**batch).logits[is_target] for model in (student, teacher))
    own = torch.nn.functional.cross_entropy(logits, batch["labels"][is_target], reduction="sum")
    p = taught.softmax(-1)
    divergence = (p * (p.log() - logits.softmax(-1).log())).sum()

    loss = trainer.compute_loss(student.train(), batch, num_items_in_batch=count)

    torch.testing.assert_close(loss, (own + divergence) / count / 2)
    assert divergence > 0.01


def test_scores_belong_to_the_order_of_the_file(place, tuned, tmp_path):
    references = [*TARGETS[:-1], "something else"]
    (tmp_path / "test.en").write_text("".join(f"{line}\n" for line in references))

    printed = run(
        "evaluate_model.py",
        *("--model", tuned, "--batch_size", 3),
        *("--test", place / "train.de", tmp_path / "test.en"),
    )

    assert json.loads(printed) == TranslationScores().compute(
        predictions=TARGETS, references=references, metrics=["bleu", "chrf"], bootstrap=1000
    )


@pytest.fixture(scope="module")
def client(tuned, tmp_path_factory):
    """Of the service."""
    from fastapi.testclient import TestClient

    folder = tmp_path_factory.mktemp("export") / "model"
    export_model(str(tuned), folder)
    return TestClient(names_of("serve_with_ctranslate2.py")["build_app"](folder))


def test_service_translates(client):
    answer = client.post("/translate", json={"texts": [*SOURCES, ""]})

    assert answer.json() == {"translations": [*TARGETS, ""]}
    assert client.get("/health").json() == {"status": "ok"}
