"""The training command end to end, on a corpus of number words and a minute model."""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    TrainerCallback,
)

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.batches import TokenBatchSampler
from vanilla_transformer.evaluation.metrics import TranslationScores
from vanilla_transformer.files import read_lines
from vanilla_transformer.modeling.layers_vanilla_transformer import EncoderLayer
from vanilla_transformer.tokenization.tokenizer_pair import TokenizerPair
from vanilla_transformer.training import run as training
from vanilla_transformer.training.averaging import average_checkpoints
from vanilla_transformer.training.run import train
from vanilla_transformer.training.trainer import TokenBatchTrainer
from vanilla_transformer.translation import Translator
from vanilla_transformer_cli.settings import TrainSettings

from ..support.training_runs import (
    VALIDATION_LINES,
    assert_same_weights,
    build_arguments,
    build_settings,
    checkpoints_of,
    read_json,
    read_log,
    weights_of,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "train.py"

SEPARATE = {"separate_vocabularies": True, "target_vocab_size": 300}


@pytest.fixture(scope="module")
def printed() -> io.StringIO:
    """What the run of `model_folder` printed."""
    return io.StringIO()


@pytest.fixture(scope="module")
def model_folder(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, printed: io.StringIO
) -> Path:
    """A model that was trained for six epochs and translates half right."""
    folder = tmp_path_factory.mktemp("model")
    settings = build_settings(corpus)
    with contextlib.redirect_stdout(printed):
        train(settings, build_arguments(settings, folder, num_train_epochs=6))
    return folder


GREEK = dict(zip(b"abcdefghijklmnopqrstuvwxyz", "αβγδεζηθικλμνξοπρστυφχψωάέ", strict=True))


@pytest.fixture(scope="module")
def greek_corpus(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same corpus, whose target is spelled in letters that the source has not."""
    folder = tmp_path_factory.mktemp("greek")
    for path in corpus.iterdir():
        text = path.read_text(encoding="utf-8")
        is_target = path.suffix == ".en"
        (folder / path.name).write_text(text.translate(GREEK) if is_target else text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def greek_folder(greek_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two vocabularies that translates a little."""
    folder = tmp_path_factory.mktemp("model")
    settings = build_settings(greek_corpus, **SEPARATE)
    train(settings, build_arguments(settings, folder, num_train_epochs=6))
    return folder


# The folder


def test_folder_holds_what_loading_and_repeating_need_and_nothing_pickled(model_folder):
    files = {path.name for path in model_folder.iterdir() if not path.is_dir()}
    folders = {path.name for path in model_folder.iterdir() if path.is_dir()}

    assert files >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "configuration_vanilla_transformer.py",
        "modeling_vanilla_transformer.py",
        "README.md",
        "run.json",
        "log.jsonl",
        "results.json",
        "curves.svg",
    }
    assert {Path(name).suffix for name in files} == {
        ".json",
        ".jsonl",
        ".safetensors",
        ".md",
        ".py",
        ".svg",
    }
    assert all(name.startswith("checkpoint-") for name in folders)


def test_folder_generates_with_the_search_of_the_paper(model_folder):
    generation_config = read_json(model_folder / "generation_config.json")

    assert generation_config["num_beams"] == 4
    assert generation_config["length_penalty"] == 0.6


def test_log_holds_a_json_line_for_each_report(model_folder):
    reports = read_log(model_folder)

    losses = [report["loss"] for report in reports if "loss" in report]
    assert losses[-1] < losses[0] / 2
    assert [report["epoch"] for report in reports if "eval_bleu" in report] == [1, 2, 3, 4, 5, 6]
    assert all({"step", "minutes"} <= report.keys() for report in reports)


def test_run_record_tells_data_settings_and_outcome(model_folder, corpus):
    run = read_json(model_folder / "run.json")

    expected = hashlib.sha256((corpus / "train.de").read_bytes()).hexdigest()
    assert run["sha256"]["train.de"] == expected
    assert run["sha256"].keys() == {*run["settings"]["train"], *run["settings"]["validation"]}
    assert len(run["sha256"]) == 4
    assert run["settings"]["vocab_size"] == 320
    assert run["arguments"]["learning_rate"] == 1e-2
    assert run["versions"].keys() >= {"torch", "transformers", "vanilla-transformer"}
    assert (run["pairs"], run["truncated_pairs"], run["epochs"]) == (300, 0, 6)
    assert run["updates"] == read_log(model_folder)[-1]["step"]


def test_model_card_tells_the_scores_with_their_signatures(model_folder):
    scores = read_json(model_folder / "results.json")["validation"]
    card = (model_folder / "README.md").read_text(encoding="utf-8")

    assert f"| {scores['lines']} | {scores['bleu']:.2f} | {scores['chrf']:.2f} |" in card
    assert scores["bleu_signature"] in card


def test_model_card_tells_the_schedule_of_the_run(model_folder):
    card = (model_folder / "README.md").read_text(encoding="utf-8")

    assert "learning rate 0.01,\nschedule `inverse_sqrt` after 30 updates of warm-up" in card


def test_plan_tells_size_time_and_memory_before_training(model_folder, printed):
    plan = printed.getvalue().partition("{'loss'")[0]

    first_words = [line.split()[0] for line in plan.splitlines()]
    assert {"device", "pairs", "parameters", "batches", "memory", "time"} <= set(first_words)
    assert "300, 0 of them cut" in plan
    assert f"{read_json(model_folder / 'run.json')['parameters']:,}" in plan


def test_fresh_process_generates_the_same_from_the_folder(model_folder):
    code = (
        "import sys\n"
        "import vanilla_transformer\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])\n"
        "inputs = tokenizer(['zwanzigtausenddrei'], return_tensors='pt')\n"
        "print(model.generate(**inputs).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, model_folder], capture_output=True, text=True, check=True
    )

    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder)
    inputs = AutoTokenizer.from_pretrained(model_folder)(["zwanzigtausenddrei"])
    expected = model.generate(torch.tensor(inputs["input_ids"])).tolist()
    assert len(expected[0]) > 4
    assert json.loads(done.stdout) == expected


def test_separate_vocabularies_are_learned_from_a_side_each(greek_folder):
    pair = TokenizerPair.from_pretrained(str(greek_folder))
    config = read_json(greek_folder / "config.json")

    assert (len(pair.source), len(pair.target)) == (320, 300)
    assert (config["vocab_size"], config["decoder_vocab_size"]) == (320, 300)
    letters = [set("".join(side.get_vocab())) for side in (pair.source, pair.target)]
    assert not letters[0] & set(GREEK.values())
    # Byte and special tokens spell a few Latin ones.
    assert letters[1] - set("<>/0123456789ABCDEFxspadunk") <= {*GREEK.values(), " ", "-"}
    for number in checkpoints_of(greek_folder):
        checkpoint = TokenizerPair.from_pretrained(str(greek_folder / f"checkpoint-{number}"))
        assert checkpoint.contents == pair.contents


def test_plan_tells_both_vocabularies(greek_corpus, tmp_path, capsys):
    settings = build_settings(greek_corpus, validated=False, **SEPARATE)

    train(settings, build_arguments(settings, tmp_path, max_steps=1, save_strategy="no"))

    assert ", vocabularies 320 and 300\n" in capsys.readouterr().out


# The validation score and the best checkpoint


@pytest.mark.parametrize(
    "names", [("model_folder", "corpus"), ("greek_folder", "greek_corpus")], ids=["joint", "greek"]
)
def test_validation_scores_are_those_of_the_saved_model(request, names):
    folder, corpus = map(request.getfixturevalue, names)
    recorded = read_json(folder / "results.json")["validation"]

    translator = Translator.from_pretrained(str(folder), num_beams=1)
    sources, references = (list(read_lines(corpus / f"validation.{e}")) for e in ("de", "en"))
    texts = [translation.text for translation in translator.translate(sources)]
    scores = TranslationScores().compute(predictions=texts, references=references)
    # Unequal pieces in each line: a reference beside the wrong source would be seen.
    assert 20 < scores["chrf"] < 100
    assert {name: recorded[name] for name in scores} == scores


def scores_in_turn(*bleu: float) -> Iterator[dict[str, Any]]:
    for score in bleu:
        scores = TranslationScores().compute(predictions=["a"], references=["a"])
        yield dict(scores | {"bleu": score})


def test_checkpoint_of_the_best_bleu_is_saved(corpus, tmp_path, monkeypatch):
    scores = scores_in_turn(7.0, 31.0, 30.0)
    monkeypatch.setattr(training, "scorer", lambda *_: lambda prediction: next(scores))
    settings = build_settings(corpus, average_last=1)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=3))

    folders = [tmp_path / f"checkpoint-{step}" for step in checkpoints_of(tmp_path)]
    saved, *tables = (weights_of(folder)["model.shared.weight"] for folder in (tmp_path, *folders))
    assert [torch.equal(table, saved) for table in tables] == [True, False]
    result = read_json(tmp_path / "results.json")["validation"]
    assert (result["bleu"], result["epoch"]) == (31, 2)
    assert result["search"] == "greedy, best checkpoint"


def test_mean_of_the_last_checkpoints_is_saved_when_it_does_better(corpus, tmp_path, monkeypatch):
    scores = scores_in_turn(31.0, 30.0, 29.0, 31.1)
    monkeypatch.setattr(training, "scorer", lambda *_: lambda prediction: next(scores))
    settings = build_settings(corpus, average_last=2)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=3))

    last_two = [tmp_path / f"checkpoint-{step}" for step in checkpoints_of(tmp_path)[-2:]]
    expected = average_checkpoints(last_two)
    torch.testing.assert_close(weights_of(tmp_path), expected, rtol=0, atol=0)
    result = read_json(tmp_path / "results.json")["validation"]
    assert result["bleu"] == 31.1
    assert result["search"] == "greedy, mean of the last 2 checkpoints"
    assert read_json(tmp_path / "run.json")["weights"] == "mean of the last 2 checkpoints"


def test_last_checkpoint_is_saved_when_validation_is_absent(corpus, tmp_path):
    settings = build_settings(corpus, validated=False)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=2))

    assert_same_weights(tmp_path, tmp_path / f"checkpoint-{checkpoints_of(tmp_path)[-1]}")
    assert not (tmp_path / "results.json").exists()
    assert "Not evaluated yet" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_checkpoints_kept_are_the_best_one_and_the_last_ones(corpus, tmp_path, monkeypatch):
    scores = scores_in_turn(50.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    monkeypatch.setattr(training, "scorer", lambda *_: lambda prediction: next(scores))
    settings = build_settings(corpus, average_last=2)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=5))

    updates_per_epoch = read_json(tmp_path / "run.json")["updates"] // 5
    assert [step // updates_per_epoch for step in checkpoints_of(tmp_path)] == [1, 4, 5]


class RecordWeights(TrainerCallback):
    """Copies the table of the model after each update."""

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.tables.append(model.model.shared.weight.detach().clone())


def test_moving_average_weighs_each_update_by_its_age(corpus, tmp_path, monkeypatch):
    record = RecordWeights()
    build = training._build_trainer

    def build_recorded(*given):
        trainer = build(*given)
        trainer.add_callback(record)
        return trainer

    monkeypatch.setattr(training, "_build_trainer", build_recorded)
    settings = build_settings(corpus, moving_average=0.8)
    train(settings, build_arguments(settings, tmp_path, max_steps=4))
    settings = build_settings(corpus, moving_average=0.8, resume=True)
    train(settings, build_arguments(settings, tmp_path, max_steps=6))

    average = load_file(tmp_path / "checkpoint-6" / "moving_average.safetensors")
    first, *later = record.tables
    ages = [0.2 * 0.8**age for age in reversed(range(len(later)))]
    expected = 0.8 ** len(later) * first + sum(
        weight * table for weight, table in zip(ages, later, strict=True)
    )
    assert len(later) == 5
    torch.testing.assert_close(average["model.shared.weight"], expected)


@pytest.mark.parametrize(("score", "is_saved"), [(30.9, False), (31.1, True)])
def test_moving_average_is_saved_when_it_does_better(
    corpus, tmp_path, monkeypatch, score, is_saved
):
    scores = scores_in_turn(30.0, 31.0, score)
    monkeypatch.setattr(training, "scorer", lambda *_: lambda prediction: next(scores))
    settings = build_settings(corpus, average_last=1, moving_average=0.8)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=2))

    last = tmp_path / f"checkpoint-{checkpoints_of(tmp_path)[-1]}"
    average, saved = load_file(last / "moving_average.safetensors"), weights_of(tmp_path)
    assert average.keys() == saved.keys()
    assert torch.equal(average["model.shared.weight"], saved["model.shared.weight"]) == is_saved
    kept = "exponential moving average, 0.8" if is_saved else "best checkpoint"
    assert read_json(tmp_path / "run.json")["weights"] == kept


def test_run_ends_early_when_the_score_stays_behind(corpus, tmp_path, monkeypatch):
    scores = scores_in_turn(10.0, 12.0, 11.0, 12.0, 99.0, 0.0)
    monkeypatch.setattr(training, "scorer", lambda *_: lambda prediction: next(scores))
    settings = build_settings(corpus, early_stopping_patience=2, average_last=1)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=9))

    assert [report["epoch"] for report in read_log(tmp_path) if "eval_bleu" in report] == [
        1,
        2,
        3,
        4,
    ]
    assert read_json(tmp_path / "results.json")["validation"]["bleu"] == 12


@pytest.mark.parametrize("generates", [True, False])
def test_r_drop_trains_on_two_passes_and_validates_on_one(corpus, tmp_path, monkeypatch, generates):
    rows = []
    forward = VanillaTransformerForConditionalGeneration.forward

    def record(self, input_ids=None, *args, labels=None, **kwargs):
        if labels is not None:
            rows.append((self.training, len(labels)))
        return forward(self, input_ids, *args, labels=labels, **kwargs)

    monkeypatch.setattr(VanillaTransformerForConditionalGeneration, "forward", record)
    settings = build_settings(corpus, r_drop=1.0)

    metric = "bleu" if generates else "loss"
    given = {"predict_with_generate": generates, "metric_for_best_model": metric}
    train(settings, build_arguments(settings, tmp_path, **given))

    # The plan tries two batches more.
    trained = sum(count for training, count in rows[2:] if training)
    # The mean of the checkpoints of this single epoch is not scored.
    validated = sum(count for training, count in rows if not training)
    assert (trained, validated) == (2 * 300, VALIDATION_LINES)


def test_chosen_kernel_trains_without_padding_and_is_not_saved(corpus, tmp_path, monkeypatch):
    rows = []
    forward = EncoderLayer.forward

    def record(self, hidden_states, *args, **kwargs):
        rows.append((self.training, len(hidden_states)))
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(EncoderLayer, "forward", record)
    settings = build_settings(corpus, attn_implementation="varlen")

    train(settings, build_arguments(settings, tmp_path))

    # A batch lies in one row, in training as in validation.
    assert set(rows) == {(True, 1), (False, 1)}
    assert "varlen" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert read_json(tmp_path / "run.json")["settings"]["attn_implementation"] == "varlen"


def test_only_the_first_validation_pairs_are_scored_and_all_are_kept_out_of_training(
    corpus, tmp_path
):
    validation = [corpus / f"validation.{language}" for language in ("de", "en")]
    leaky = [tmp_path / path.name for path in validation]
    for path, held_out, split in zip(leaky, validation, ("de", "en"), strict=True):
        train_text = (corpus / f"train.{split}").read_text(encoding="utf-8")
        last_line = held_out.read_text(encoding="utf-8").splitlines()[-1]
        path.write_text(f"{train_text}{last_line}\n", encoding="utf-8")
    settings = replace(
        build_settings(corpus, max_validation_pairs=7, filter_overlap=[]),
        train=list(map(str, leaky)),
    )

    train(settings, build_arguments(settings, tmp_path / "run"))

    assert read_json(tmp_path / "run" / "results.json")["validation"]["lines"] == 7
    assert read_json(tmp_path / "run" / "run.json")["dropped_pairs"] == {"overlap": 1}


# Batches


def test_each_epoch_has_batches_of_its_own(corpus, tmp_path, monkeypatch):
    epochs = []
    monkeypatch.setattr(TokenBatchSampler, "set_epoch", lambda self, epoch: epochs.append(epoch))
    settings = build_settings(corpus, validated=False)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=3))

    assert epochs == [0, 1, 2]


def test_updates_are_made_from_token_batches(model_folder, printed):
    words = printed.getvalue().split()
    batches = int(words[words.index("batches") + 1])

    assert batches > 5
    assert read_json(model_folder / "run.json")["updates"] == 6 * batches


def test_training_works_when_all_pairs_fit_into_one_batch(corpus, tmp_path):
    settings = build_settings(corpus, validated=False, max_tokens_per_batch=100_000)

    train(settings, build_arguments(settings, tmp_path))

    assert read_json(tmp_path / "run.json")["updates"] == 1


def test_pairs_that_are_cut_off_are_counted(corpus, tmp_path, capsys):
    settings = build_settings(corpus, validated=False, max_length=5)

    train(settings, build_arguments(settings, tmp_path, max_steps=1))

    truncated = read_json(tmp_path / "run.json")["truncated_pairs"]
    assert 0 < truncated <= 300
    assert f"300, {truncated} of them cut" in capsys.readouterr().out


# Going on


@pytest.mark.parametrize("vocabularies", [{}, SEPARATE], ids=["joint", "separate"])
def test_resumed_run_ends_with_the_weights_of_one_in_one_go(corpus, tmp_path, vocabularies, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = build_settings(corpus, **vocabularies)
    train(settings, build_arguments(settings, whole, num_train_epochs=2))

    train(settings, build_arguments(settings, resumed, num_train_epochs=1))
    capsys.readouterr()
    settings = build_settings(corpus, resume=True, **vocabularies)
    train(settings, build_arguments(settings, resumed, num_train_epochs=2))

    assert "; 1 epochs end at" in capsys.readouterr().out
    minutes = [report["minutes"] for report in read_log(resumed)]
    assert minutes == sorted(minutes)
    # The saved model may be the first epoch's, but the second one ends in a checkpoint.
    last = f"checkpoint-{checkpoints_of(whole)[-1]}"
    assert_same_weights(resumed / last, whole / last)
    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("bpe_dropout", [0.0, 0.2])
def test_resumed_run_is_the_same_when_it_stopped_amid_an_epoch(corpus, tmp_path, bpe_dropout):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = build_settings(corpus, validated=False, bpe_dropout=bpe_dropout)
    train(settings, build_arguments(settings, whole, num_train_epochs=2))

    for epoch_fraction in (1.5, 2):
        updates = round(epoch_fraction / 2 * checkpoints_of(whole)[-1])
        settings = build_settings(
            corpus, validated=False, bpe_dropout=bpe_dropout, resume=epoch_fraction == 2
        )
        train(settings, build_arguments(settings, resumed, max_steps=updates))

    assert_same_weights(resumed, whole)


def test_fine_tuning_starts_from_the_weights_sizes_and_tokenizer_of_the_saved_model(
    model_folder, corpus, tmp_path
):
    settings = build_settings(
        corpus, validated=False, init_from=str(model_folder), config=[], vocab_size=999
    )

    train(settings, build_arguments(settings, tmp_path, max_steps=1, learning_rate=0.0))

    assert_same_weights(tmp_path, model_folder)
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in (tmp_path, model_folder)]
    assert tokenizers[0] == tokenizers[1]


def test_fine_tuning_goes_on_with_both_vocabularies(greek_folder, greek_corpus, tmp_path):
    settings = build_settings(
        greek_corpus, validated=False, init_from=str(greek_folder), config=[], bpe_dropout=0.1
    )

    train(settings, build_arguments(settings, tmp_path, max_steps=3, learning_rate=0.0))

    assert_same_weights(tmp_path, greek_folder)
    contents = [
        TokenizerPair.from_pretrained(str(one)).contents for one in (tmp_path, greek_folder)
    ]
    assert contents[0] == contents[1]
    losses = [report["loss"] for report in read_log(greek_folder) if "loss" in report]
    # Labels of another vocabulary would be news to the model.
    assert read_log(tmp_path)[-1]["train_loss"] < losses[0] - 1


def test_bpe_dropout_changes_the_text_of_each_epoch(corpus, tmp_path, monkeypatch):
    tokens = []

    def count_tokens(trainer, inputs, *args):
        tokens.append(int((inputs["labels"] != -100).sum()))
        return super(TokenBatchTrainer, trainer)._prepare_inputs(inputs, *args)

    monkeypatch.setattr(TokenBatchTrainer, "_prepare_inputs", count_tokens)
    settings = build_settings(corpus, validated=False, bpe_dropout=0.3)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=3))

    # Before the first epoch two batches are tried.
    totals = np.array(tokens[2:]).reshape(3, -1).sum(axis=1)
    assert len(set(totals)) == 3


def test_bpe_dropout_is_refused_with_workers_that_outlive_an_epoch(corpus, tmp_path):
    settings = build_settings(corpus, validated=False, bpe_dropout=0.1)
    arguments = build_arguments(
        settings, tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True
    )

    with pytest.raises(ValueError, match="Leave --dataloader_persistent_workers out"):
        train(settings, arguments)


# Ending early


def test_training_ends_scored_and_saved_when_its_minutes_are_over(corpus, tmp_path):
    settings = build_settings(corpus, max_minutes=0.0)

    train(settings, build_arguments(settings, tmp_path, num_train_epochs=9))

    assert read_json(tmp_path / "run.json")["updates"] == 1
    assert read_json(tmp_path / "results.json")["validation"]["lines"] == VALIDATION_LINES
    assert_same_weights(tmp_path, tmp_path / "checkpoint-1")


# Mistakes


def test_run_is_refused_when_its_folder_is_taken(model_folder, corpus):
    settings = build_settings(corpus)
    before = {path: path.stat().st_mtime_ns for path in model_folder.rglob("*")}

    with pytest.raises(ValueError, match=f"{model_folder} already holds a run") as caught:
        train(settings, build_arguments(settings, model_folder))

    assert "--resume" in str(caught.value)
    assert before == {path: path.stat().st_mtime_ns for path in model_folder.rglob("*")}


@pytest.mark.parametrize("trace", ["checkpoint-7", "config.json"])
def test_run_is_refused_when_its_folder_holds_a_trace_of_another(corpus, tmp_path, trace):
    (tmp_path / trace).mkdir()
    settings = build_settings(corpus)

    with pytest.raises(ValueError, match=f"{tmp_path} already holds a run"):
        train(settings, build_arguments(settings, tmp_path))


def test_resuming_is_refused_when_there_is_no_checkpoint(corpus, tmp_path):
    settings = build_settings(corpus, resume=True)

    with pytest.raises(
        ValueError, match=f"--resume needs a whole checkpoint .* got none in {tmp_path}"
    ):
        train(settings, build_arguments(settings, tmp_path))


def test_vocabulary_of_a_saved_model_is_not_split(model_folder, corpus, tmp_path):
    settings = build_settings(corpus, init_from=str(model_folder), config=[], **SEPARATE)

    with pytest.raises(ValueError, match=f"one vocabulary of 320 .* sides in '{model_folder}'"):
        train(settings, build_arguments(settings, tmp_path))


def test_files_of_unlike_length_are_refused_before_anything_is_written(corpus, tmp_path):
    longer = tmp_path / "longer.en"
    longer.write_text((corpus / "train.en").read_text() + "one\n")
    settings = TrainSettings(train=[str(corpus / "train.de"), str(longer)])

    with pytest.raises(ValueError, match=r"300 in .* and 301 in"):
        train(settings, build_arguments(settings, tmp_path / "run"))

    assert not (tmp_path / "run").exists()
