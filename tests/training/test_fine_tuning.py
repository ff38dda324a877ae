"""What a run trains: all but what is frozen, or an adapter."""

import fnmatch
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import fast_layers_vanilla_transformer as cpu
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.adapters import merge_adapter
from vanilla_transformer_tools.training.run import train
from vanilla_transformer_tools.training.start import choose_parameters
from vanilla_transformer_tools.translation import Translator

from ..models import Model, source_of
from ..support.training_runs import (
    assert_same_weights,
    build_arguments,
    build_settings,
    read_json,
    weights_of,
)

# PEFT's wrapper asks Transformers by a name of which newer releases warn.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

LORA = {"peft": "lora", "lora_rank": 4, "lora_alpha": 16.0}


def trained(model: Model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.fixture
def freeze(tiny_config):
    """Freezes parts of a tiny model; returns the names of what it still trains."""

    def freeze(*patterns: str, **changes: object) -> set[str]:
        for name, value in changes.items():
            setattr(tiny_config, name, value)
        model = Model(tiny_config)
        choose_parameters(model, TrainSettings(freeze=list(patterns)))
        return trained(model)

    return freeze


TWO_TABLES = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
LEARNED = {**TWO_TABLES, "position_embedding_type": "learned"}


@pytest.mark.parametrize(
    ("patterns", "changes", "frozen", "trained"),
    [
        # Not the table that the encoder shares.
        (["encoder"], {}, "model.encoder.*", "model.shared.weight"),
        (["decoder"], TWO_TABLES, "model.decoder.layer*", "model.decoder.embed_tokens.weight"),
        (["embeddings"], LEARNED, "*embed*", "lm_head.weight"),
        (["*.layers.0.*", "*.bias"], {}, "*.bias", "model.encoder.layers.1.fc1.weight"),
    ],
)
def test_parts_are_frozen_and_the_rest_is_trained(freeze, patterns, changes, frozen, trained):
    left = freeze(*patterns, **changes)

    assert not fnmatch.filter(left, frozen)
    assert trained in left


def test_tied_matrix_is_frozen_by_any_of_its_names_and_the_others_are_told(freeze, capsys):
    freeze("embeddings")
    assert "model.shared.weight" not in freeze("lm_head.weight")

    by_table, by_projection = capsys.readouterr().out.splitlines()
    assert by_table.endswith(" model.shared.weight, and with it lm_head.weight, the same matrix")
    assert "frozen      lm_head.weight, and with it model.shared.weight and " in by_projection


def test_patterns_that_match_nothing_or_everything_are_refused(freeze):
    with pytest.raises(ValueError, match=r"'heads' matches no parameter") as caught:
        freeze("heads", "encoder", "layers.9*")
    with pytest.raises(ValueError, match=r"something to train, got \*, which match all \d+"):
        freeze("*")

    faults = str(caught.value).splitlines()
    assert len(faults) == 2
    assert all("such as lm_head.weight, model." in fault for fault in faults)


def with_lora(model: Model, **changes: object) -> Model:
    torch.manual_seed(0)
    choose_parameters(model, TrainSettings(**LORA | changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                # They start as zero.
                weight.normal_(std=0.3)
    return model


def test_adapters_have_rank_scale_dropout_and_places_of_their_own(tiny_model):
    model = with_lora(tiny_model, lora_dropout=0.25, lora_target_modules=["fc1"])

    layer = model.model.encoder.layers[0].fc1
    assert layer.lora_A["default"].weight.shape[0] == 4
    assert layer.scaling["default"] == 16 / 4
    assert layer.lora_dropout["default"].p == 0.25
    assert len(trained(model)) == 2 * (2 + 3)


def test_unknown_modules_are_refused_with_those_that_there_are(tiny_model):
    with pytest.raises(ValueError, match=r"fc1 fc2 kv_proj out_proj q_proj qkv_proj, got k_proj\."):
        with_lora(tiny_model, lora_target_modules=["q_proj", "k_proj"])


def test_adapted_model_computes_like_the_merged_one(tiny_model, batch, tmp_path, monkeypatch):
    # Weights are laid out anew for generation however small they are.
    monkeypatch.setattr(cpu, "FEWEST_ENTRIES", 1)
    settings = {"num_beams": 3, "max_new_tokens": 8}
    plain = tiny_model.generate(**source_of(batch), **settings)
    adapted = with_lora(tiny_model).eval()

    generated, expected = adapted.generate(**source_of(batch), **settings), adapted(**batch).logits

    merge_adapter(adapted, tmp_path, None)
    assert not any("lora" in name or "base_layer" in name for name in adapted.state_dict())
    torch.testing.assert_close(adapted(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(adapted.generate(**source_of(batch), **settings), generated)
    assert not torch.equal(generated, plain)


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model that was never trained."""
    folder = tmp_path_factory.mktemp("base")
    settings = build_settings(corpus, validated=False)
    train(settings, build_arguments(settings, folder, max_steps=1, learning_rate=0.0))
    return folder


def fine_tune(
    corpus: Path,
    base: Path,
    folder: Path,
    *,
    updates: int = 3,
    arguments: Mapping[str, object] = MappingProxyType({}),
    **changes: object,
) -> None:
    given = {"validated": False, "config": [], "init_from": str(base)} | changes
    settings = build_settings(corpus, **given)
    train(settings, build_arguments(settings, folder, max_steps=updates, **arguments))


def test_weights_in_half_precision_are_trained_in_float32(corpus, base, tmp_path):
    half = shutil.copytree(base, tmp_path / "half", ignore=shutil.ignore_patterns("run.json"))
    AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)

    fine_tune(corpus, half, tmp_path / "run", updates=1)

    assert {weight.dtype for weight in weights_of(half).values()} == {torch.bfloat16}
    assert {weight.dtype for weight in weights_of(tmp_path / "run").values()} == {torch.float32}


def test_frozen_weights_stay_the_same_to_the_last_bit(corpus, base, tmp_path, capsys):
    fine_tune(
        corpus, base, tmp_path, validated=True, freeze=["embeddings", "encoder"], moving_average=0.5
    )

    before, after = weights_of(base), weights_of(tmp_path)
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    expected = {name for name in before if name.startswith(("model.encoder.", "model.shared."))}
    assert frozen == expected
    averaged = load_file(next(tmp_path.glob("checkpoint-*")) / "moving_average.safetensors")
    assert averaged.keys() == before.keys() - frozen
    count = sum(before[name].numel() for name in averaged)
    run = read_json(tmp_path / "run.json")
    total = sum(weight.numel() for weight in before.values())
    assert (run["parameters"], run["trained_parameters"]) == (total, count)
    assert (
        f"parameters  {total:,}, of which {count:,} are trained, vocab" in capsys.readouterr().out
    )


def test_resumed_run_ends_with_the_weights_of_one_in_one_go(corpus, base, tmp_path):
    changes = LORA | {"lora_dropout": 0.1}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    fine_tune(corpus, base, whole, updates=4, **changes)
    fine_tune(corpus, base, resumed, updates=2, **changes)

    fine_tune(corpus, base, resumed, updates=4, resume=True, **changes)

    assert_same_weights(resumed, whole)


@pytest.mark.parametrize("changes", [{}, LORA], ids=["whole", "lora"])
def test_model_that_training_only_spoils_stays_as_it_was(corpus, tmp_path, changes):
    base, run = tmp_path / "base", tmp_path / "run"
    settings = build_settings(corpus, max_validation_pairs=4)
    train(settings, build_arguments(settings, base, num_train_epochs=2), given=["bf16"])
    spoiling = {"learning_rate": 0.9, "warmup_steps": 0, "lr_scheduler_type": "constant"}
    given = {"validated": True, "max_validation_pairs": 4, "average_last": 2, **changes}

    fine_tune(corpus, base, run, updates=2, arguments=spoiling, **given)
    fine_tune(corpus, base, run, updates=3, arguments=spoiling, resume=True, **given)

    record = read_json(run / "run.json")
    assert (record["updates"], record["weights"]) == (3, "start, which no update made better")
    for name, weight in weights_of(base).items():
        torch.testing.assert_close(weights_of(run)[name], weight)
    scores = read_json(run / "results.json")["validation"]
    assert scores["loss"] == pytest.approx(read_json(base / "results.json")["validation"]["loss"])


def test_adapter_is_saved_beside_the_model_that_it_makes(corpus, base, tmp_path):
    fine_tune(corpus, base, tmp_path, **LORA)

    run = read_json(tmp_path / "run.json")
    assert run["parameters"] == read_json(base / "run.json")["parameters"]
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert run["trained_parameters"] == sum(weight.numel() for weight in adapter.values())
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(adapted.state_dict()[name], weight)
    assert list(Translator.from_pretrained(str(tmp_path)).translate(["eins"]))
