"""A model card: the metadata that the Hub validates and searches, and what a person edits."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.commands.translate import translate
from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.sharing.model_card import (
    forget_results,
    name_repository,
    record_results,
    write_model_card,
)

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
            **{"parameters": 4, "trained_parameters": 3, "pairs": 5, "epochs": 6, "updates": 7},
            **{"minutes": 8, "hardware": "an abacus"},
        }
        (tmp_path / "run.json").write_text(json.dumps(run))
        record_results(tmp_path, test_set, SCORES)
        return ModelCard.load(tmp_path / "README.md")

    return write_card


# Norwegian's code is a boolean to a careless reader of YAML.
def test_card_is_valid_to_the_hub_and_tells_what_only_the_user_knows(make_card):
    card = make_card(
        "Straße & Co: test", language=["de", "no"], dataset_tags=["me/pairs"], license="mit"
    )

    data = card.data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "translation")
    assert "vanilla_transformer" in data.tags
    assert (data.language, data.datasets, data.license) == (["de", "no"], ["me/pairs"], "mit")
    (result, _) = data.eval_results
    assert (result.dataset_name, result.dataset_type) == ("Straße & Co: test", "Stra-e-Co-test")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "(https://arxiv.org/abs/1706.03762), trained from scratch\nwith `vanilla"),
        ({"init_from": "org/base"}, "abs/1706.03762), fine-tuned from org/base\nwith `vanilla"),
        ({"freeze": ["encoder", "*.bias"]}, "3 parameters were trained: encoder, *.bias were"),
    ],
)
def test_card_tells_how_the_weights_came_about(make_card, settings, told):
    card = make_card(**settings)

    assert told in card.content
    assert ("trained-from-scratch" in card.data.tags) == ("init_from" not in settings)


def test_card_gives_each_metric_with_its_signature(make_card):
    data = make_card().data

    assert data.metrics == ["bleu", "chrf"]
    for metric, result in zip(data.metrics, data.eval_results, strict=True):
        assert (result.metric_type, result.metric_value) == (metric, round(SCORES[metric], 2))
        assert result.metric_args == {"signature": SCORES[f"{metric}_signature"]}
        assert (result.dataset_type, result.dataset_name) == ("test_2016", "test_2016")
        assert result.task_type == "translation"


def test_card_of_two_vocabularies_loads_both_tokenizers(make_card, tmp_path):
    assert "target_tokenizer" not in str(make_card())
    (tmp_path / "target_tokenizer").mkdir()
    (tmp_path / "target_tokenizer" / "tokenizer.json").touch()

    card = str(make_card())

    assert f'from_pretrained("{tmp_path.name}", subfolder="target_tokenizer")' in card
    assert "print(target_tokenizer.batch_decode(" in card


def test_commands_of_the_card_are_those_of_the_package(make_card, monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(
        "vanilla_transformer_tools.commands.__main__.run", lambda *call: called.append(call)
    )
    make_card()

    for line in re.search("```bash\n(.*?)```", card_in(tmp_path), re.DOTALL)[1].splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "vanilla-transformer"
        main(arguments)

    named = ["--model", tmp_path.name]
    assert called == [(translate, [*named, "..."])]


# A card that a person edits


@pytest.fixture
def folder(make_card, tmp_path):
    """Of a model with a card; the results of a test set are not in it yet."""
    make_card()
    for name in ("results.json", "README.md"):
        (tmp_path / name).unlink()
    write_model_card(tmp_path)
    return tmp_path


def card_in(folder):
    return (folder / "README.md").read_bytes().decode("utf-8")


def test_scores_go_into_their_section_and_leave_what_a_person_wrote(folder):
    card = card_in(folder)
    edits = {
        r"^# .*$": "# Mein Modell: ä",
        r"(?=^<!-- vanilla_transformer:begin scores)": "## Intended use\n\n`x --model FOLDER`\n\n",
        r"^## Limits": "## Grenzen",
        r"^library_name": "license: mit\nlibrary_name",
    }
    for pattern, text in edits.items():
        card, number = re.subn(pattern, text, card, flags=re.MULTILINE)
        assert number == 1
    (folder / "README.md").write_bytes(card.encode())

    record_results(folder, "test_2016", SCORES)

    before, begin, rest = card.partition("<!-- vanilla_transformer:begin scores -->")
    *_, end, after = rest.partition("<!-- vanilla_transformer:end scores -->")
    body = before.split("---\n")[2]
    written = card_in(folder)
    assert written.endswith(end + after)
    assert body + begin in written
    assert "| 1,000 | 37.13 | 61.50 | 12.00 | beam 4, length penalty 0.6 |" in written
    assert "Not evaluated yet" not in written
    assert ModelCard(written).data.license == "mit"
    assert len(ModelCard(written).data.eval_results) == 2


def test_scores_of_a_second_test_set_are_added_to_those_of_the_first(folder):
    record_results(folder, "first", SCORES)
    record_results(folder, "second", SCORES)
    # All scores of an earlier evaluation go, also those that the later one has not.
    later = {name: value for name, value in SCORES.items() if not name.startswith("chrf")}
    record_results(folder, "first", later | {"bleu": 40.0})

    card = card_in(folder)
    values = [
        (one.dataset_name, one.metric_type, one.metric_value)
        for one in ModelCard(card).data.eval_results
    ]
    assert values == [("first", "bleu", 40.0), ("second", "bleu", 37.13), ("second", "chrf", 61.5)]
    assert card.count("\nmodel-index:") == card.count("\nmetrics:") == 1
    assert re.findall("^### (.*)$", card, re.MULTILINE) == ["first", "second"]


def test_scores_that_a_person_added_stay_in_the_metadata(folder):
    task = {"task": {"type": "translation"}, "dataset": {"name": "test_2016", "type": "x"}}
    metrics = [{"type": "comet", "value": 0.8}, {"type": "bleu", "value": 1}]
    index = [{"name": "mine", "results": [{**task, "metrics": metrics}]}]
    metadata = yaml.safe_dump({"metrics": "comet", "license": "mit", "model-index": index, "a": 1})
    _, _, body = card_in(folder).split("---\n")
    (folder / "README.md").write_text(f"---\n{metadata}---\n{body}")

    record_results(folder, "test_2016", SCORES)

    data = ModelCard(card_in(folder)).data
    results = {one.metric_type: one.metric_value for one in data.eval_results}
    assert results == {"bleu": 37.13, "chrf": 61.5, "comet": 0.8}
    assert (data.metrics, data.model_name) == (["comet", "bleu", "chrf"], "mine")
    assert (data.license, data.a) == ("mit", 1)


def without_marks(card):
    return re.sub("<!-- vanilla_transformer:(begin|end) scores -->\n", "", card)


def with_returns(card):
    return card.replace("\n", "\r\n")


@pytest.mark.parametrize("change", [without_marks, with_returns])
def test_form_that_a_person_gave_a_card_stays(folder, change):
    (folder / "README.md").write_bytes(change(card_in(folder)).encode())

    record_results(folder, "test_2016", SCORES)

    card = card_in(folder)
    assert ("| 37.13 |" in card) == (change is not without_marks)
    assert ("Not evaluated yet" in card) == (change is without_marks)
    assert card.count("\r\n") == (card.count("\n") if change is with_returns else 0)


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (b"# My notes\n", "it has none of the marks between which scores are written. Delete"),
        (b"# Stra\xdfe\n", "can't decode byte 0xdf"),
        (b"---\n[\n---\nMARKED", "expected the node content"),
        (b"---\nmodel-index: [{name: x}]\n---\nMARKED", "Invalid `model_index`"),
    ],
)
def test_card_that_is_not_ours_stays_and_results_are_stored(folder, caplog, card, reason):
    section = b"<!-- vanilla_transformer:begin scores -->\n<!-- vanilla_transformer:end scores -->"
    card = card.replace(b"MARKED", section)
    (folder / "README.md").write_bytes(card)

    record_results(folder, "test_2016", SCORES)

    assert (folder / "README.md").read_bytes() == card
    assert json.loads((folder / "results.json").read_text()) == {"test_2016": SCORES}
    message = caplog.messages[-1]
    assert message.startswith(f"{folder / 'README.md'} stays as it is: ")
    assert reason in message


def test_example_of_the_card_alone_loads_the_repository(folder):
    mine = '\n`AutoTokenizer.from_pretrained("me/other")`, `evaluate --model "me/other"`\n'
    begin = "<!-- vanilla_transformer:begin model"
    card = card_in(folder).replace(begin, mine + begin) + mine

    (folder / "README.md").write_bytes(card.encode())

    name_repository(folder, "me/model")

    renamed = card_in(folder)

    example = re.search("begin use -->(.*?)<!-- vanilla_transformer:end use", renamed, re.DOTALL)[1]
    assert example.count('from_pretrained("me/model"') == 2
    assert example.count('--model "me/model"') == 1
    assert renamed.count('"me/model"') == 3
    assert renamed.replace('"me/model"', f'"{folder.name}"') == card


# Where the metadata come from


@pytest.mark.parametrize(
    ("train", "told", "tags"),
    [
        (["me/pairs"], [], ["me/pairs"]),
        (["me/pairs"], ["wmt14"], ["wmt14"]),
        (["a.de", "a.en"], [], []),
        (["folder"], [], []),
    ],
)
def test_card_names_the_dataset_that_is_told_or_else_the_one_on_the_hub(
    tmp_path, monkeypatch, train, told, tags
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()

    assert TrainSettings(train=train, dataset_tags=told).dataset_tags == tags


def test_scores_of_earlier_weights_are_forgotten(make_card, tmp_path):
    make_card()
    card = ModelCard.load(tmp_path / "README.md")
    (ours,) = {result.dataset_name for result in card.data.eval_results}
    (result, *_) = card.data.eval_results
    card.data.eval_results.append(replace(result, dataset_name="of a person", dataset_type="own"))
    card.save(tmp_path / "README.md")

    forget_results(tmp_path)

    card = ModelCard.load(tmp_path / "README.md")
    assert not (tmp_path / "results.json").exists()
    assert ours == "test_2016"
    assert [result.dataset_name for result in card.data.eval_results] == ["of a person"]
    assert "Not evaluated yet" in card.text
    forget_results(tmp_path)
    record_results(tmp_path, "test_2017", SCORES)
    card = ModelCard.load(tmp_path / "README.md")
    names = {result.dataset_name for result in card.data.eval_results}
    assert names == {"test_2017", "of a person"}
    (tmp_path / "README.md").unlink()
    write_model_card(tmp_path)
    forget_results(tmp_path)
    assert "model-index" not in card_in(tmp_path)


def test_card_of_an_imported_model_tells_its_source_and_no_training(tiny_config, tmp_path):
    tiny_config.save_pretrained(tmp_path)
    run = {"imported_from": {"name": "opus-mt-de-en", "model_type": "marian"}, "files": {}}
    (tmp_path / "run.json").write_text(json.dumps(run))

    record_results(tmp_path, "test_2016", SCORES)

    card = ModelCard.load(tmp_path / "README.md")
    assert "imported from `opus-mt-de-en` (`marian`)\n" in card.text
    assert "## Training" not in card.text
    assert "trained-from-scratch" not in card.data.tags


def test_model_of_another_kind_gets_no_card(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')

    record_results(tmp_path, "test_2016", SCORES)

    assert json.loads((tmp_path / "results.json").read_text()) == {"test_2016": SCORES}
    assert not (tmp_path / "README.md").exists()
