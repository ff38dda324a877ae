"""The training command end to end, on a corpus of number words and a minute model."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.evaluation.metrics import score
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.sharing.model_card import record_results
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training import build
from vanilla_transformer_tools.training import run as training
from vanilla_transformer_tools.training.finish import average_checkpoints
from vanilla_transformer_tools.training.run import train
from vanilla_transformer_tools.translation import Translator

from ..support.training_runs import (
    SIZES,
    assert_same_weights,
    build_arguments,
    build_settings,
    checkpoints_of,
    read_json,
    read_log,
    run_training,
    weights_of,
)

SEPARATE = {"separate_vocabularies": True, "target_vocab_size": 300}
UNVALIDATED = {"validated": False}
# After six epochs none of its outputs on validation is endless: limits are not the same everywhere.
SEED = 2
GREEK = dict(zip(b"abcdefghijklmnopqrstuvwxyz", "αβγδεζηθικλμνξοπρστυφχψωάέ", strict=True))


@pytest.fixture(scope="module")
def model_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for six epochs and translates half right."""
    # Batches of validation whose translations are of unequal length.
    given = {"num_train_epochs": 6, "seed": SEED, "per_device_eval_batch_size": 7}
    return run_training(corpus, tmp_path_factory.mktemp("model"), **given)


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
    return run_training(greek_corpus, folder, SEPARATE, num_train_epochs=6, seed=SEED)


both_models = pytest.mark.parametrize(
    "names", [("model_folder", "corpus"), ("greek_folder", "greek_corpus")], ids=["joint", "greek"]
)


# The folder


def test_folder_holds_what_loading_and_repeating_need_and_nothing_pickled(model_folder):
    files = {path.name for path in model_folder.iterdir() if not path.is_dir()}
    folders = {path.name for path in model_folder.iterdir() if path.is_dir()}

    assert files >= {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
        *("configuration_vanilla_transformer.py", "modeling_vanilla_transformer.py"),
        *("README.md", "run.json", "log.jsonl", "results.json"),
    }
    suffixes = {Path(name).suffix for name in files}
    assert suffixes == {".json", ".jsonl", ".safetensors", ".md", ".py"}
    assert all(name.startswith("checkpoint-") for name in folders)
    # The weights of checkpoints, too, can be read by whoever can read the rest.
    weights = list(model_folder.rglob("model.safetensors"))
    modes = {path.stat().st_mode for path in [*weights, model_folder / "config.json"]}
    assert len(weights) == 1 + len(folders)
    assert len(modes) == 1
    # The greedy search of the validation is not that of the model.
    assert read_json(model_folder / "generation_config.json")["num_beams"] == 4


def test_log_and_record_tell_data_settings_and_outcome(model_folder, corpus):
    reports, run = read_log(model_folder), read_json(model_folder / "run.json")

    losses = [report["loss"] for report in reports if "loss" in report]
    assert losses[-1] < losses[0] / 2
    assert [report["epoch"] for report in reports if "eval_bleu" in report] == [1, 2, 3, 4, 5, 6]
    assert all({"step", "minutes"} <= report.keys() for report in reports)
    expected = hashlib.sha256((corpus / "train.de").read_bytes()).hexdigest()
    assert run["sha256"]["train.de"] == expected
    assert run["sha256"].keys() == {*run["settings"]["train"], *run["settings"]["validation"]}
    assert len(run["sha256"]) == 4
    assert run["settings"]["vocab_size"] == 320
    assert run["arguments"]["learning_rate"] == 1e-2
    assert run["versions"].keys() >= {"torch", "transformers", "vanilla-transformer"}
    assert (run["pairs"], run["truncated_pairs"], run["epochs"]) == (300, 0, 6)
    assert run["updates"] == reports[-1]["step"]


# The validation score and the weights that are saved


@both_models
def test_validation_scores_are_those_of_the_saved_model(request, names):
    folder, corpus = map(request.getfixturevalue, names)
    recorded = read_json(folder / "results.json")["validation"]

    translator = Translator.from_pretrained(str(folder), num_beams=1)
    sources, references = (list(read_lines(corpus / f"validation.{e}")) for e in ("de", "en"))
    texts = [translation.text for translation in translator.translate(sources)]
    scores = score(texts, references)
    # Unequal pieces in each line: a reference beside the wrong source would be seen.
    assert 20 < scores["chrf"] < 100
    assert {name: recorded[name] for name in scores} == scores


@pytest.fixture
def run_scored(corpus, tmp_path, monkeypatch):
    """Trains with BLEU scores that a test makes up; returns the epochs whose checkpoints are kept.

    There must be one score for each epoch, and one for each try of averaged weights.
    """

    def run(bleu, epochs, **settings):
        other = score(["a"], ["a"])
        scores = iter([other | {"bleu": value} for value in bleu])
        monkeypatch.setattr(
            build, "compute_scores", lambda *_, **__: lambda prediction: next(scores)
        )
        given = {"max_validation_pairs": 1, "average_last": 1, "max_tokens_per_batch": 4000}
        settings = given | settings
        run_training(corpus, tmp_path, settings, num_train_epochs=epochs)
        assert not list(scores)
        updates = [report["step"] for report in read_log(tmp_path) if "eval_bleu" in report]
        return [updates.index(update) + 1 for update in checkpoints_of(tmp_path)]

    return run


def assert_saved(folder: Path, bleu: float, weights: str) -> None:
    """The record of a run names these weights and their score."""
    assert read_json(folder / "run.json")["weights"] == weights
    result = read_json(folder / "results.json")["validation"]
    assert (result["bleu"], result["search"]) == (bleu, f"greedy, {weights}")


def test_mean_of_the_last_checkpoints_is_saved_when_it_does_better(run_scored, tmp_path):
    kept = run_scored([31.0, 30.0, 29.0, 28.0, 31.1], epochs=4, average_last=2)

    # Beside the best one those that the mean needs.
    assert kept == [1, 3, 4]
    last_two = [tmp_path / f"checkpoint-{update}" for update in checkpoints_of(tmp_path)[-2:]]
    expected = average_checkpoints(last_two)
    torch.testing.assert_close(weights_of(tmp_path), expected, rtol=0, atol=0)
    assert_saved(tmp_path, 31.1, "mean of the last 2 checkpoints")


def test_moving_average_is_saved_when_it_does_better(run_scored, tmp_path):
    run_scored([30.0, 31.0, 31.1], epochs=2, moving_average=0.8)

    last = tmp_path / f"checkpoint-{checkpoints_of(tmp_path)[-1]}"
    average = load_file(last / "moving_average.safetensors")
    torch.testing.assert_close(weights_of(tmp_path), average, rtol=0, atol=0)
    assert_saved(tmp_path, 31.1, "exponential moving average, 0.8")


def test_run_that_gets_no_better_goes_on_counting_when_it_is_resumed(
    run_scored, tmp_path, monkeypatch
):
    run_scored([12.0, 11.0], epochs=2, early_stopping_patience=2)

    resumed = {"early_stopping_patience": 2, "resume": True}
    assert run_scored([10.0], epochs=9, **resumed)[-1] == 3
    # It has ended, and trains no further.
    assert run_scored([], epochs=9, **resumed)[-1] == 3


def test_scores_of_the_weights_before_a_resumed_run_are_forgotten(corpus, tmp_path):
    run_training(corpus, tmp_path, UNVALIDATED, max_steps=2)
    scores = {"bleu": 1.0, "bleu_signature": "s", "lines": 1, "search": "greedy"}
    record_results(tmp_path, "test", scores)

    run_training(corpus, tmp_path, UNVALIDATED | {"resume": True}, max_steps=2)
    assert "test" in read_json(tmp_path / "results.json")

    run_training(corpus, tmp_path, UNVALIDATED | {"resume": True}, max_steps=4)
    assert not (tmp_path / "results.json").exists()


def test_mean_that_was_asked_for_is_saved_when_validation_is_absent(corpus, tmp_path):
    by_updates = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    run_training(corpus, tmp_path, UNVALIDATED | {"average_last": 2}, **by_updates)

    assert checkpoints_of(tmp_path) == [2, 3]
    folders = [tmp_path / f"checkpoint-{update}" for update in checkpoints_of(tmp_path)]
    expected = average_checkpoints(folders)
    torch.testing.assert_close(weights_of(tmp_path), expected, rtol=0, atol=0)
    assert read_json(tmp_path / "run.json")["weights"] == "mean of the last 2 checkpoints"
    assert not (tmp_path / "results.json").exists()
    assert "Not evaluated yet" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_moving_average_weighs_each_update_by_its_age(corpus, tmp_path):
    settings = {"moving_average": 0.8, "max_validation_pairs": 1, "average_last": 9}
    by_updates = {"save_strategy": "steps", "save_steps": 1}
    by_updates |= {"eval_strategy": "steps", "eval_steps": 1}
    run_training(corpus, tmp_path, settings, max_steps=3, **by_updates)
    run_training(corpus, tmp_path, settings | {"resume": True}, max_steps=5, **by_updates)

    folders = [tmp_path / f"checkpoint-{update}" for update in range(1, 6)]
    first, *later = (weights_of(folder)["model.shared.weight"] for folder in folders)
    expected = 0.8**4 * first
    expected += sum(0.2 * 0.8**age * table for age, table in enumerate(reversed(later)))
    average = load_file(folders[-1] / "moving_average.safetensors")["model.shared.weight"]
    torch.testing.assert_close(average, expected)
    assert "moving_average.safetensors" in read_json(folders[-1] / "files.json")


def test_some_validation_pairs_are_scored_and_all_are_kept_out_of_training(
    corpus, tmp_path, capsys
):
    leaky = [tmp_path / f"train.{language}" for language in ("de", "en")]
    for path in leaky:
        train_text, held_out = (
            (corpus / f"{split}{path.suffix}").read_text() for split in ("train", "validation")
        )
        path.write_text(f"{train_text}{held_out.splitlines()[-1]}\n")
    settings = build_settings(corpus, max_validation_pairs=7, filter_overlap=[])
    settings = replace(settings, train=list(map(str, leaky)))

    given = {"generation_num_beams": 3, "max_steps": 1}
    train(settings, build_arguments(settings, tmp_path / "run", **given))

    result = read_json(tmp_path / "run" / "results.json")["validation"]
    assert (result["lines"], result["search"]) == (7, "beam 3, best checkpoint")
    run = read_json(tmp_path / "run" / "run.json")
    assert (run["pairs"], run["dropped_pairs"]) == (300, {"overlap": 1})
    assert len(list(read_lines(tmp_path / "run" / "dropped.jsonl"))) == 1
    assert "dropped     1 of 301 pairs" in capsys.readouterr().out


# What an update is made from


def test_threads_are_chosen_once_before_the_plan(corpus, tmp_path, monkeypatch):
    counted = []
    cores = SimpleNamespace(use=lambda: counted.append(len(counted)))
    monkeypatch.setattr(training, "IdleCores", lambda: cores)
    monkeypatch.setattr(training, "plan_run", lambda *_, **named: counted.append("plan") or 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run_training(corpus, tmp_path, UNVALIDATED, max_steps=2, save_strategy="no")

    assert counted == [0, "plan"]


def test_symbols_are_in_the_vocabulary_and_pairs_that_are_cut_off_are_counted(
    corpus, tmp_path, capsys
):
    (tmp_path / "symbols").write_text("<ph>\n{name}\n")
    settings = UNVALIDATED | {"symbols": str(tmp_path / "symbols"), "max_length": 5}
    # All fit into one batch.
    folder = run_training(corpus, tmp_path / "run", settings | {"max_tokens_per_batch": 100_000})

    run = read_json(folder / "run.json")
    assert run["updates"] == 1
    assert 0 < run["truncated_pairs"] <= 300
    assert f"300, {run['truncated_pairs']} of them cut" in capsys.readouterr().out
    trained = VanillaTransformerTokenizer.from_pretrained(folder)
    assert trained.tokenize("{name}<ph>")[-2:] == ["{name}", "<ph>"]


def test_evaluation_of_an_early_stop_counts_only_until_the_run_goes_on(run_scored, tmp_path):
    settings = {"early_stopping_patience": 2}
    run_scored([10.0, 12.0], epochs=1.5, **settings)
    checkpoints = [tmp_path / f"checkpoint-{update}" for update in checkpoints_of(tmp_path)]
    # It is the best one of the run that ended there.
    assert_same_weights(tmp_path, checkpoints[1])

    # Neither the best one of the run that goes on, nor the first of two that were no better; the
    # log keeps it, so the checkpoint of the third epoch is that of the fourth evaluation.
    assert run_scored([9.0, 8.0], epochs=9, resume=True, **settings) == [1, 4]

    assert_same_weights(tmp_path, checkpoints[0])
    assert_saved(tmp_path, 10.0, "best checkpoint")
    assert read_json(tmp_path / "results.json")["validation"]["epoch"] == 1


def test_evaluations_change_no_update(corpus, tmp_path):
    settings = {"average_last": 1, "max_validation_pairs": 2}
    given = {"max_steps": 3, "load_best_model_at_end": False}

    for folder, strategy in (("never", "no"), ("often", "steps")):
        run_training(
            corpus, tmp_path / folder, settings, eval_strategy=strategy, eval_steps=1, **given
        )

    assert_same_weights(tmp_path / "never", tmp_path / "often")


def test_learned_positions_must_hold_the_longest_text(corpus, tmp_path):
    sizes = [*SIZES, "position_embedding_type=learned", "max_position_embeddings=40"]
    settings = {"config": sizes, "max_length": 40, "max_validation_pairs": 2}

    with pytest.raises(ValueError, match=r"--max_length 41 is longer .* Give --max_length 40, or"):
        run_training(corpus, tmp_path, settings | {"max_length": 41}, max_steps=1)

    # Validation ends where they do.
    run_training(corpus, tmp_path, settings, max_steps=1)
    assert (tmp_path / "model.safetensors").exists()


def test_tokenizer_of_another_kind_is_refused_with_what_is_possible(corpus, tmp_path):
    (tmp_path / "spm.model").write_bytes(b"x")
    backend = VanillaTransformerTokenizer.train(["a"], vocab_size=300).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "fast")

    for name, got in (("spm.model", "the file"), ("fast", "a [A-Za-z]+ in")):
        message = f"--tokenizer needs a model .*, got {got} .*import.*--symbols"
        settings = {"tokenizer": str(tmp_path / name)}
        with pytest.raises(ValueError, match=message):
            run_training(corpus, tmp_path / "run", UNVALIDATED | settings, max_steps=1)


def test_saved_tokenizer_that_has_changed_or_is_contradicted_is_refused(
    model_folder, corpus, tmp_path
):
    saved = shutil.copytree(model_folder, tmp_path / "saved")
    for option, changes, message in (
        ("tokenizer", {"config": [*SIZES, "eos_token_id=3"]}, "must leave out eos_token_id with"),
        ("init_from", {"config": [], **SEPARATE}, f"one vocabulary of 320 .* sides in '{saved}'"),
        ("tokenizer", {}, r"tokenizer\.json of .* not the one in run\.json"),
    ):
        settings = UNVALIDATED | {option: str(saved)} | changes
        if not changes:
            with (saved / "tokenizer.json").open("a", encoding="utf-8") as file:
                file.write(" ")
        with pytest.raises(ValueError, match=message):
            run_training(corpus, tmp_path / "run", settings, max_steps=1)


@both_models
def test_fine_tuning_starts_from_the_weights_sizes_and_tokenizers_of_the_saved_model(
    request, names, tmp_path
):
    folder, corpus = map(request.getfixturevalue, names)
    settings = {"init_from": str(folder), "config": [], "vocab_size": 999, "bpe_dropout": 0.1}

    run_training(corpus, tmp_path, UNVALIDATED | settings, max_steps=3, learning_rate=0.0)

    assert_same_weights(tmp_path, folder)
    pairs = [TokenizerPair.from_pretrained(str(one)) for one in (tmp_path, folder)]
    assert pairs[0].contents == pairs[1].contents
    losses = [report["loss"] for report in read_log(folder) if "loss" in report]
    # Labels of another vocabulary would be news to the model.
    assert read_log(tmp_path)[-1]["train_loss"] < losses[0] - 1
