"""Fine-tuning of imported models with the tokenizers of their own classes."""

from dataclasses import replace

import pytest

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.training.run import train
from vanilla_transformer_tools.translation import Translator

from ..support.pretrained import ENGLISH, GERMAN
from ..support.training_runs import build_arguments, read_json

LANGUAGES = {"nllb": ("deu_Latn", "eng_Latn"), "mbart": ("fr_XX", "en_XX")}


@pytest.fixture
def pairs(tmp_path):
    """Files of eight pairs, and of two to validate on."""
    rows = [f"{source}\t{target}\n" for source, target in zip(GERMAN, ENGLISH, strict=True)]
    (tmp_path / "train.tsv").write_text("".join(rows[1:9]))
    (tmp_path / "valid.tsv").write_text("".join(rows[9:11]))
    return tmp_path


@pytest.fixture
def settings_of(pairs, pretrained):
    def make(name, **changes):
        source, target = LANGUAGES.get(name, (None, None))
        given = {"source_language": source, "target_language": target, "max_tokens_per_batch": 200}
        # Positions of some of them end there.
        given["max_length"] = 60
        return TrainSettings(
            train=[str(pairs / "train.tsv")],
            validation=[str(pairs / "valid.tsv")],
            init_from=str(pretrained(name)[1]),
            **given | changes,
        )

    return make


def run(settings, pairs, **changes):
    arguments = build_arguments(settings, pairs / "run", max_steps=1, **changes)
    # Products in float32, whatever the processor is faster with.
    return train(settings, arguments, given=["bf16"])


@pytest.mark.parametrize("name", ["nllb", "marian"])
def test_fine_tuned_folder_has_the_tokenizer_and_its_languages(settings_of, pairs, name):
    settings = settings_of(name)

    folder = str(run(settings, pairs))

    given = Translator.from_pretrained(
        settings.init_from,
        source_language=settings.source_language,
        target_language=settings.target_language,
    )
    # Without options: a fine-tuned model has one direction.
    translator = Translator.from_pretrained(folder)
    assert translator.tokenizers.contents == given.tokenizers.contents
    assert translator.search.first_token == given.search.first_token
    assert len(list(translator.translate(GERMAN[:2]))) == 2
    assert read_json(pairs / "run" / "run.json")["updates"] == 1


def test_model_of_another_class_or_column_of_languages_is_refused(settings_of, pairs, pretrained):
    folder, _ = pretrained("bart")
    other = replace(settings_of("mbart"), init_from=str(folder))
    tagged = settings_of("nllb", target_language=None, tag_column="tag")
    for name in ("train", "valid"):
        (pairs / f"{name}.tsv").write_text("eins\tone\teng_Latn\n")

    with pytest.raises(ValueError, match="needs a model of this package, got a model of the type"):
        run(other, pairs)
    with pytest.raises(ValueError, match=r"--tag_column needs .* got NllbTokenizer in"):
        run(tagged, pairs)


def test_decoder_of_mbart_starts_with_the_language_after_fine_tuning(settings_of, pairs):
    folder = run(settings_of("mbart"), pairs)

    tokenizer = Translator.from_pretrained(str(folder)).tokenizer
    assert tokenizer.tgt_lang == "en_XX"
    for file in ("config.json", "generation_config.json"):
        first = read_json(folder / file)["decoder_start_token_id"]
        assert tokenizer.convert_ids_to_tokens(first) == "en_XX"
