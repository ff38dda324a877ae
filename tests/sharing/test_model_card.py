"""The metadata block of a model card, which the Hub validates and searches."""

import json

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from vanilla_transformer.sharing.model_card import record_results
from vanilla_transformer_cli.settings import TrainSettings

from ..support.hub_server import card_faults, serve_hub

SCORES = {
    "bleu": 37.1264,
    "bleu_signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
    "chrf": 61.5,
    "chrf_signature": "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0",
    "exact_match": 12.0,
    "lines": 1000,
    "search": "beam 4, length penalty 0.6",
}


@pytest.fixture
def make_card(tiny_config, tmp_path):
    """Writes the card of a run with these metadata and one test set, and reads it back."""

    def write_card(test_set="test_2016", **settings):
        tiny_config.save_pretrained(tmp_path)
        run = {
            "settings": {"max_tokens_per_batch": 800, "max_length": 9, **settings},
            "arguments": {"learning_rate": 0.1, "warmup_steps": 2, "seed": 3},
            **{"parameters": 4, "pairs": 5, "epochs": 6, "updates": 7, "minutes": 8},
            "hardware": "an abacus",
        }
        (tmp_path / "run.json").write_text(json.dumps(run))
        record_results(tmp_path, test_set, SCORES)
        return ModelCard.load(tmp_path / "README.md")

    return write_card


def test_card_tells_where_the_model_belongs(make_card):
    data = make_card().data

    assert (data.library_name, data.pipeline_tag) == ("transformers", "translation")
    assert "vanilla_transformer" in data.tags


# Norwegian's code is a boolean to a careless reader of YAML.
def test_card_tells_what_only_the_user_knows(make_card):
    data = make_card(language=["de", "no"], dataset_tags=["me/pairs"], license="mit").data

    assert (data.language, data.datasets, data.license) == (["de", "no"], ["me/pairs"], "mit")


def test_card_says_nothing_of_what_was_not_told(make_card):
    metadata = make_card(language=[], dataset_tags=[], license=None).data.to_dict()

    assert metadata.keys().isdisjoint({"language", "datasets", "license"})


def test_card_of_an_older_run_has_no_such_settings(make_card):
    assert make_card().data.language is None


@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_card_gives_each_metric_with_its_signature(make_card, metric):
    data = make_card().data

    (result,) = [result for result in data.eval_results if result.metric_type == metric]
    assert result.metric_value == round(SCORES[metric], 2)
    assert result.metric_args == {"signature": SCORES[f"{metric}_signature"]}
    assert (result.dataset_type, result.dataset_name) == ("test_2016", "test_2016")
    assert result.task_type == "translation"
    assert metric in data.metrics


def test_dataset_type_has_the_form_of_an_id_whatever_the_name(make_card):
    (result, _) = make_card("Straße & Co: test").data.eval_results

    assert result.dataset_name == "Straße & Co: test"
    assert result.dataset_type == "Stra-e-Co-test"


@pytest.mark.skipif(
    huggingface_hub.__version__.startswith("1."), reason="validates at huggingface.co only"
)
def test_card_is_valid_to_the_hub(make_card, monkeypatch):
    card = make_card("my test", language=["de", "no"], dataset_tags=["me/pairs"], license="mit")

    with serve_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        card.validate()
        card.data.language = "German"
        with pytest.raises(ValueError, match="'German' is not valid"):
            card.validate()

    assert hub.requests == [("POST", "/api/validate-yaml")] * 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("language: [de, German]", "\"language\" with value 'German'"),
        ("language: no", '"language" with value False'),
        ("datasets: [my data]", "\"datasets\" with value 'my data'"),
        ("metrics: [1]", '"metrics" with value 1'),
        ("license: My Own", "\"license\" with value 'My Own'"),
        ("model-index: [{name: x, results: [{metrics: []}]}]", "Invalid `model_index`"),
        ("[", "expected the node content"),
    ],
)
def test_hub_server_refuses_bad_metadata(fault, message):
    (told,) = card_faults(f"---\n{fault}\n---\n")

    assert message in told


# Where the metadata come from


def test_dataset_that_was_trained_on_is_the_one_that_the_card_names():
    assert TrainSettings(train=["me/pairs"]).dataset_tags == ["me/pairs"]


def test_dataset_that_is_told_goes_before_the_one_that_was_trained_on():
    settings = TrainSettings(train=["me/pairs"], dataset_tags=["wmt14"])

    assert settings.dataset_tags == ["wmt14"]


def test_local_data_are_no_dataset_on_the_hub(tmp_path):
    (tmp_path / "pairs.tsv").touch()

    for train in ([], ["a.de", "a.en"], [str(tmp_path)], [str(tmp_path / "pairs.tsv")]):
        assert TrainSettings(train=train).dataset_tags == []
