from collections.abc import Callable

import pytest

from vanilla_transformer_tools.evaluation import bleu_tokenizers
from vanilla_transformer_tools.evaluation.bleu_tokenizers import language_of_file, resolve
from vanilla_transformer_tools.evaluation.metrics import score

# Two lines each, the second one shorter than four words.
LINES = {
    "zh": ("今天天气很好。", "猫"),
    "ja": ("今日は天気がいいです。", "猫が好き"),
    "ko": ("오늘은 날씨가 아주 좋다", "고양이"),
    "th": ("วันนี้อากาศดีมาก", "แมว"),
    "lo": ("ມື້ນີ້ອາກາດດີຫຼາຍ", "ແມວ"),
    "km": ("ថ្ងៃនេះអាកាសធាតុល្អណាស់", "ឆ្មា"),
    "my": ("ဒီနေ့ ရာသီဥတု ကောင်းတယ်", "ကြောင်"),
    "bo": ("དེ་རིང་གནམ་གཤིས་ཡག་པོ་འདུག", "ཞི་མི"),
    "ar": ("الطقس جميل جدا اليوم", "قطة"),
    "hi": ("आज मौसम बहुत अच्छा है", "बिल्ली"),
    "ru": ("Сегодня очень хорошая погода", "кот"),
    "en": ("the weather is nice today", "a cat"),
}


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which tokenizers with packages of their own are usable."""

    def say(*names: str) -> None:
        others = {"ja-mecab", "ko-mecab", "flores200"} - set(names)
        monkeypatch.setattr(bleu_tokenizers, "_is_usable", lambda name: name not in others)

    say()
    return say


@pytest.mark.parametrize("language", LINES)
def test_bleu_of_a_perfect_system_is_100(language, usable):
    for lines in (LINES[language], LINES[language][1:]):
        scores = score(lines, lines, metrics=["bleu", "ter"])

        assert scores["bleu"] == pytest.approx(100)
        assert scores["ter"] == 0
    (line, _) = LINES[language]
    # The first character is missing: one word of one for 13a.
    if resolve("auto", [line]).name != "13a":
        assert score([line[1:]], [line], tokenize="13a", metrics=["bleu"])["bleu"] < 70
        assert score([line[1:]], [line], metrics=["bleu"])["bleu"] > 70


@pytest.mark.parametrize(
    ("language", "installed", "expected"),
    [
        ("zh", (), "zh"),
        ("ja", (), "char"),
        ("ja", ("flores200",), "flores200"),
        ("ja", ("flores200", "ja-mecab"), "ja-mecab"),
        ("ko", (), "13a"),
        ("ko", ("ko-mecab",), "ko-mecab"),
        ("th", (), "char"),
        ("th", ("flores200",), "flores200"),
        ("en", ("flores200", "ja-mecab", "ko-mecab"), "13a"),
    ],
)
def test_best_usable_tokenizer_is_chosen_with_its_reason(language, installed, expected, usable):
    usable(*installed)

    for name in (None, language):
        choice = resolve("auto", LINES[language], [name])
        assert choice.name == expected
        assert str(choice).startswith(f"{expected}: the ")


@pytest.mark.parametrize("code", ["ja", "jpn_Jpan", "ja-JP"])
def test_language_decides_where_scripts_are_ambiguous(code, usable):
    usable("ja-mecab")

    assert resolve("auto", ["東京都"]).name == "zh"
    choice = resolve("auto", ["東京都"], [None, code, "th"])
    assert (choice.name, choice.reason) == ("ja-mecab", f"the target language is Japanese ({code})")


def test_names_and_languages_in_another_script_do_not_decide(usable):
    assert resolve("auto", ["Xi Jinping (习近平) is the president of China"] * 9).name == "13a"
    assert resolve("auto", ["vanilla_transformer 是一个用于机器翻译的模型。"]).name == "zh"
    assert resolve("auto", ["Nǐ hǎo, shìjiè!"], ["zh"]).name == "13a"


def test_choice_of_a_person_and_tokenised_text_are_respected(usable):
    assert str(resolve("intl", LINES["zh"], ["zh"])) == "intl"
    assert resolve("auto", LINES["zh"], ["zh"], is_tokenized=True).name == "none"
    assert resolve("auto", ["", "123 ..."]).name == "13a"


@pytest.mark.parametrize(
    ("file", "language"),
    [("test.zh", "zh"), ("data/test.de-zh.zh.gz", "zh"), ("test.en", None), ("zh", None)],
)
def test_language_is_read_from_the_end_of_a_name(file, language):
    assert language_of_file(file) == language
