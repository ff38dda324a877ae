"""Validation sets and their scores."""

import pytest

from vanilla_transformer_tools.settings import TrainSettings
from vanilla_transformer_tools.text.filters import read_corpus

from ..support.training_runs import build_settings, read_json, read_log, run_training

CHINESE = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002"


@pytest.fixture
def chinese(tmp_path):
    """A validation set with Chinese targets, as paths of its two files."""
    paths = [tmp_path / "news.de", tmp_path / "news.txt"]
    for path, line in zip(paths, ("eins zwei", CHINESE), strict=True):
        path.write_text(f"{line}\n" * 3, encoding="utf-8")
    return ",".join(map(str, paths))


def test_each_validation_set_has_scores_of_its_own(corpus, tmp_path, capsys, chinese):
    pair = ",".join(str(corpus / f"train.{language}") for language in ("de", "en"))
    sets = [f"news={chinese}", f"known={pair}"]
    settings = {"validation_sets": sets, "average_last": 2, "max_validation_pairs": 5}
    given = {"num_train_epochs": 2, "metric_for_best_model": "news_bleu"}

    run_training(corpus, tmp_path / "run", settings | {"max_tokens_per_batch": 4000}, **given)

    reports = [report for report in read_log(tmp_path / "run") if "eval_loss" in report]
    assert len(reports) == 2
    for report in reports:
        assert report["eval_lines"] == report["eval_known_lines"] == 5
        assert report["eval_news_lines"] == 3
        assert len({report[f"eval_{name}loss"] for name in ("", "news_", "known_")}) == 3
    results = read_json(tmp_path / "run/results.json")
    assert list(results) == ["validation", "news", "known"]
    assert not any(name.startswith(("news", "known")) for name in results["validation"])
    assert "|tok:zh|" in results["news"]["bleu_signature"]
    assert "|tok:13a|" in results["known"]["bleu_signature"]
    card = (tmp_path / "run/README.md").read_text(encoding="utf-8")
    assert "### news\n" in card
    assert "; tokenizer zh: the references are Chinese\n" in card
    out = capsys.readouterr().out
    assert "BLEU        tokenizer 13a: the references have blanks" in out
    assert "BLEU        news, tokenizer zh: the references are Chinese" in out
    assert f"news loss {reports[0]['eval_news_loss']:.3f}  bleu " in out


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["news"], "takes NAME=SOURCE,TARGET.* got 'news'"),
        (["ne_ws=a,b"], "letters, digits and hyphens in the name, got 'ne_ws=a,b'"),
        (["news=a,b", "news=c.tsv"], "another name for the set 'news=c.tsv'"),
        (["validation=a,b"], "another name"),
    ],
)
def test_sets_that_cannot_be_named_so_are_refused(sets, message):
    with pytest.raises(ValueError, match=message):
        assert TrainSettings(validation=["v.tsv"], validation_sets=sets).paths_of_validation


def test_further_sets_are_kept_out_of_training(corpus, tmp_path):
    pair = ",".join(str(corpus / f"train.{language}") for language in ("de", "en"))
    settings = build_settings(corpus, validation_sets=[f"news={pair}"], filter_overlap=[])

    with pytest.raises(ValueError, match="got all 300 dropped: overlap 300"):
        read_corpus(settings)


def test_paths_of_further_sets_begin_with_the_data_folder():
    settings = TrainSettings(validation_sets=["news=a.de,a.en", "b=c.tsv"], data="d")

    assert settings.paths_of_validation == {"news": ["d/a.de", "d/a.en"], "b": ["d/c.tsv"]}
