"""`TokenBatchTrainer` on sixteen pairs: batches, losses, the summary, and what it saves."""

import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Seq2SeqTrainer

from vanilla_transformer import VanillaTransformerTokenizer, backend_vanilla_transformer
from vanilla_transformer_tools.saved_folder import TARGET_FOLDER
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.batches import TokenBatchSampler
from vanilla_transformer_tools.text.token_ids import pair_lengths
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.text.training_data import in_epochs
from vanilla_transformer_tools.training import build as building
from vanilla_transformer_tools.training import reports
from vanilla_transformer_tools.training import trainer as module
from vanilla_transformer_tools.training.checkpoints import close_checkpoint, closed_checkpoints
from vanilla_transformer_tools.training.plan import RunPlan, with_tokens
from vanilla_transformer_tools.training.trainer import DivergedError, TokenBatchTrainer

from ..plugin.test_fast_search import patch_forward
from ..support.gradients_of_one_update import VOCAB_SIZE, build_arguments, build_model, ragged_pairs
from ..support.pretended_device import DEVICE, move, pretended_device, put
from ..support.training_runs import checkpoints_of


@pytest.fixture(scope="module")
def tokenizer():
    words = " ".join(f"w{number}" for number in range(VOCAB_SIZE))
    return VanillaTransformerTokenizer.train([words], kind="word", vocab_size=VOCAB_SIZE)


@pytest.fixture
def build(tmp_path, tokenizer):
    def build_trainer(*, alpha=0.0, tokenizers=None, sources=("w1",) * 16, **changes):
        pairs = ragged_pairs()
        sampler = TokenBatchSampler(pair_lengths(pairs), 120, seed=0)
        return TokenBatchTrainer(
            RunPlan(TrainSettings(r_drop=alpha), build_arguments(tmp_path, **changes), None, None),
            in_epochs(pairs, sampler, truncated_pairs=1),
            tokenizers or TokenizerPair.joint(tokenizer),
            model=build_model(label_smoothing=0.0),
            eval_dataset=pairs.add_column("source", sources).add_column("target", sources),
        )

    return build_trainer


def test_batches_are_those_of_the_sampler_with_labels_padded_to_no_token(build):
    trainer = build()
    rows = [ragged_pairs().select(batch) for batch in trainer.data.batching["batch_sampler"]]

    batches = list(trainer.get_train_dataloader())

    assert [batch["input_ids"].shape[0] for batch in batches] == [len(batch) for batch in rows]
    for batch, expected in zip(batches, rows, strict=True):
        kept = [[token for token in row if token != -100] for row in batch["labels"].tolist()]
        assert kept == expected["labels"][:]


def test_epochs_of_the_data_are_those_of_the_run(build):
    trainer = build(num_train_epochs=3, save_strategy="steps", save_steps=4)
    epochs = []
    trainer.data = dataclasses.replace(trainer.data, set_epoch=epochs.append)
    assert 1 < 4 / trainer.data.batches < 2

    trainer.train()
    trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir, "checkpoint-4")))

    assert epochs == [0, 1, 2, 1, 2]


def test_validation_loss_is_that_of_a_token_however_batches_are_cut(build):
    trainer = build(per_device_eval_batch_size=3, label_smoothing_factor=0.25)
    model = trainer.model.eval()
    assert trainer.label_smoother is None
    total = tokens = 0
    for pair in ragged_pairs():
        loss = model(**{name: torch.tensor([ids]) for name, ids in pair.items()}).loss.item()
        total += loss * len(pair["labels"])
        tokens += len(pair["labels"])

    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize(("alpha", "is_training", "passes"), [(1.0, True, 2), (1.0, False, 1)])
def test_r_drop_makes_two_passes_in_training_only(build, alpha, is_training, passes):
    trainer = build(alpha=alpha)
    rows = []
    trainer.model.register_forward_pre_hook(
        lambda model, args, inputs: rows.append(len(inputs["labels"])), with_kwargs=True
    )
    batch = next(iter(trainer.get_train_dataloader()))

    trainer.compute_loss(trainer.model.train(is_training), batch)

    assert rows == [passes * len(batch["labels"])]


def test_loss_that_was_not_finite_is_remembered_in_training_alone(build, monkeypatch):
    trainer = build()
    losses = iter([1.0, float("nan"), float("nan"), 2.0])
    monkeypatch.setattr(Seq2SeqTrainer, "compute_loss", lambda *_: torch.tensor(next(losses)))

    seen = []
    for is_training in (True, False, True, True):
        trainer.compute_loss(trainer.model.train(is_training), {})
        seen.append(trainer.loss_is_finite.item())

    assert seen == [True, True, False, False]


# What it saves


def save(trainer):
    """Saves a checkpoint, as after an update."""
    trainer._save_checkpoint(trainer.model, None)
    trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


def test_older_checkpoints_are_kept_until_a_new_one_is_closed(build, tmp_path, monkeypatch):
    trainer = build(save_total_limit=1)
    trainer.create_optimizer_and_scheduler(num_training_steps=9)
    before = []

    def close(folder):
        before.append(checkpoints_of(tmp_path))
        close_checkpoint(folder)

    monkeypatch.setattr(module, "close_checkpoint", close)
    for update in (8, 9, 10):
        trainer.state.global_step = update
        save(trainer)

    assert before == [[8], [8, 9], [9, 10]]
    assert closed_checkpoints(tmp_path) == [tmp_path / "checkpoint-10"]


def test_checkpoint_of_weights_that_are_not_finite_is_refused(build, tmp_path):
    trainer = build()
    trainer.state.global_step = 7
    with torch.no_grad():
        trainer.model.model.encoder.layers[0].fc1.weight[0, 0] = torch.nan

    with pytest.raises(DivergedError, match=r"1 weights, .*fc1\.weight .* after update 7"):
        trainer._save_checkpoint(trainer.model, None)

    assert list(tmp_path.iterdir()) == []


def test_checkpoint_has_the_tokenizer_of_the_target_if_it_is_another(build, tokenizer, tmp_path):
    target = VanillaTransformerTokenizer.train(["x y z"], kind="word", vocab_size=9)
    for update, pair in enumerate(
        (TokenizerPair.joint(tokenizer), TokenizerPair(tokenizer, target))
    ):
        trainer = build(tokenizers=pair)
        trainer.create_optimizer_and_scheduler(num_training_steps=9)
        trainer.state.global_step = update
        save(trainer)

    joint, two = closed_checkpoints(tmp_path)
    for folder, expected in ((two, tokenizer), (two / TARGET_FOLDER, target)):
        saved = VanillaTransformerTokenizer.from_pretrained(folder)
        assert saved.get_vocab() == expected.get_vocab()
    assert not (joint / TARGET_FOLDER).exists()


# The summary


@pytest.fixture
def summarized(build):
    """Lines of the summary by their first word."""

    def lines_of(*, minutes_left=None, **changes):
        lines = reports.summary(build(**changes), minutes_left)
        return dict(line.split(maxsplit=1) for line in lines)

    return lines_of


def test_summary_describes_the_run(summarized):
    lines = summarized(num_train_epochs=30)

    assert lines["pairs"] == "16, 1 of them cut to the maximal length"
    assert lines["parameters"].endswith(", vocabulary 37")
    assert re.match(r"\d+ an epoch, ", lines["batches"])
    assert "time" not in lines
    assert re.match(r"the run ends on \w+day, \d\d:\d\d", summarized(minutes_left=9)["time"])


def test_summary_names_what_a_vocabulary_lacks(summarized):
    sources = ["w1 b", "c c", "d e f g", *["w2"] * 13]

    assert "unknown" not in summarized()
    unknown = summarized(sources=sources)["unknown"]
    assert unknown.startswith("7 tokens of the validation targets: 'c' (2), 'b' (1), 'd' (1), ")
    assert unknown.endswith("'f' (1), ...")


def test_summary_warns_of_a_warmup_that_takes_most_of_the_run(summarized):
    said = "21 updates, of 40 in all: train longer, or shorten it with --warmup_steps"

    assert summarized(max_steps=40, warmup_steps=21)["warm-up"] == said
    assert "warm-up" not in summarized(max_steps=40, warmup_steps=20)
    # The length of a run of some minutes is unknown, and its warm-up fits it.
    assert "warm-up" not in summarized(minutes_left=9, max_steps=40, warmup_steps=21)


@pytest.mark.parametrize(("least", "tokens"), [(50, 50), (120, 120)])
def test_batches_shrink_until_a_gpu_holds_them_and_all_others_do(monkeypatch, least, tokens):
    plan = RunPlan(TrainSettings(max_tokens_per_batch=200), None, None, None, batch_reason="x")
    tried = []

    def run_out(trainer):
        tried.append(trainer.plan.settings.max_tokens_per_batch)
        if tried[-1] > 150:
            raise RuntimeError("CUDA out of memory.")

    monkeypatch.setattr(building, "_try", run_out)
    monkeypatch.setattr(building, "gather_object", lambda own: [*own, 130, least])

    trainer = building.fitted(200, lambda size: SimpleNamespace(plan=with_tokens(plan, size)))

    assert tried[0] == 200
    assert 100 < tried[-1] <= 150
    assert trainer.plan.settings.max_tokens_per_batch == min(tokens, tried[-1])
    assert trainer.plan.batch_reason == "because 200 do not fit the memory"
    assert with_tokens(plan, 200) is plan


def test_update_waits_for_a_gpu_three_times(build, monkeypatch):
    trainer = build()
    monkeypatch.setattr(type(trainer.args), "device", DEVICE)
    with pretended_device() as device:
        move(trainer.model).train()
        trainer.loss_is_finite = put({"loss": trainer.loss_is_finite})["loss"]
        device.waits.clear()

        batches = iter(trainer.get_train_dataloader())
        samples, count = trainer.get_batch_samples(batches, 1, DEVICE)
        trainer.training_step(trainer.model, samples[0], count)

        assert trainer.model.lm_head.weight.grad.device == DEVICE
    assert device.waits == ["_local_scalar_dense"] * 2 + ["nonzero"]


# The name that replaces the deprecated one does not exist in Transformers 5.17.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("changes", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_model_is_validated_by_our_search(build, caplog, changes):
    trainer = build(**changes, predict_with_generate=True, eval_strategy="epoch")
    trainer.compute_metrics = lambda _: {}
    name = backend_vanilla_transformer.__name__

    with caplog.at_level(logging.DEBUG, logger=name):
        trainer.train()

    assert ("forward" in vars(trainer.model)) == changes.get("bf16", False)
    assert {record.message for record in caplog.records if record.name == name} == {
        "`generate` runs the search of vanilla_transformer."
    }


@pytest.mark.parametrize("when", ["before", "after"])
def test_patched_model_in_mixed_precision_is_called(build, when):
    trainer = build(bf16=True)
    if when == "before":
        patch_forward(trainer.model)
    trainer.accelerator.prepare_model(trainer.model)
    if when == "after":
        patch_forward(trainer.model)

    assert backend_vanilla_transformer.reason_against(trainer.model.eval())
