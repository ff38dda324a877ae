"""The `evaluate` command: scores of a model or of a file, or a comparison of two."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, cast

from vanilla_transformer_tools.commands.command import (
    Parser,
    Report,
    build_parser,
    check_models,
    load_translator,
    parse,
)
from vanilla_transformer_tools.commands.outputs import check_output, check_room, write_rows
from vanilla_transformer_tools.files import looks_like_a_path
from vanilla_transformer_tools.search import Search
from vanilla_transformer_tools.settings import (
    BLEU_TOKENIZE,
    DEFAULT_METRICS,
    METRICS,
    SearchSettings,
    option,
)

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translator

_METRICS = "\n".join(f"{name:<15} {metric.definition}" for name, metric in METRICS.items())
_EXAMPLE = f"""Scores are percentages, with ± half the width of a 95 % confidence interval.
Those of a model are also stored in its folder and model card.

{_METRICS}
wer, per and codexglue_bleu separate tokens at white space.

example:
  vanilla-transformer evaluate --model runs/de-en --test test.de test.en
  vanilla-transformer evaluate --model runs/de-en --test test.de test.en --against other.en
  vanilla-transformer evaluate --hypotheses other.en --test test.de test.en
  vanilla-transformer evaluate --model runs/de-en --test sacrebleu:wmt19:de-en
  vanilla-transformer evaluate --model runs/de-en --test test.de test.en --score_pairs
"""


@dataclass(frozen=True)
class EvaluateSettings(SearchSettings):
    """Settings of an evaluation."""

    test: list[str] = option(
        "Test pairs: two parallel text files, or one .tsv, .jsonl or .parquet file, or a dataset, "
        "or one of sacreBLEU's test sets, which are downloaded, with its languages: "
        "sacrebleu:wmt19:de-en.",
        [],
    )
    references: list[str] | None = option(
        "Files with further references, one for each test pair a line.", nargs="+", metavar="FILE"
    )
    source_column: str = option("Column of the source text.", "source")
    target_column: str = option("Column of the target text.", "target")
    dataset_config: str | None = option("Configuration of a Hub dataset, such as de-en.")
    test_split: str = option("Split of a dataset that --test reads.", "test")
    tag_column: str | None = option(
        "Column with the target language of each test pair, of a model of several directions; of a "
        ".tsv file the third. Each direction is scored, and all together."
    )
    score_pairs: bool = option(
        "Instead of scores, writes a JSON object for each test pair: the log-probability of the "
        "target given its source, and that of each of its tokens.",
        False,
    )
    hypotheses: str | None = option(
        "File of translations to score, one a line, instead of a --model."
    )
    against: str | None = option(
        "Other system to compare with on the same lines, by paired bootstrap: a file of its "
        "translations, one a line, or the folder or Hub name of a model."
    )
    metrics: list[str] = option(
        "Scores to compute, as defined below. For COMET see docs/evaluate.md.",
        DEFAULT_METRICS,
        choices=tuple(METRICS),
    )
    bleu_tokenize: str = option(BLEU_TOKENIZE, "auto")
    lowercase: bool = option("Lower-cases both sides for BLEU and chrF.", False)
    bootstrap: int = option(
        "Number of bootstrap resamples for confidence intervals and --against; 0: no intervals. "
        "1,000 resamples of 1,000 lines take about 70 MB of memory.",
        1000,
    )
    output: str | None = option("File for the translations, one a line. It is replaced.")
    name: str | None = option(
        "Name of the test set in results.json and the model card. Default: test, or the name of "
        "sacreBLEU's test set."
    )


def evaluate(argv: list[str]) -> None:
    """Score the translations of a test set, by a model or from a file."""
    parser = build_parser(evaluate, EvaluateSettings, _EXAMPLE)
    settings = EvaluateSettings(**parse(parser, argv))
    _check(parser, settings)

    from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
    from vanilla_transformer_tools.evaluation.metrics import build_metrics, check_bootstrap
    from vanilla_transformer_tools.evaluation.significance import compare, format_comparisons

    # Mistakes are reported before the translation, which may take an hour.
    check_bootstrap(settings.bootstrap)
    build_metrics(settings.metrics, resolve(settings.bleu_tokenize, []).name)
    test_set = _load(settings)
    system = _system(settings, settings.hypotheses, test_set)
    if settings.score_pairs:
        _score_pairs(system, test_set, settings)
        return
    if settings.against:
        other = _system(_like(system, settings), settings.against, test_set)
    texts = _translations(system, test_set)
    _score(texts, system, test_set, settings)
    if settings.against:
        names = (settings.hypotheses or " + ".join(settings.model or []), settings.against)
        options = _options(settings, test_set)
        references = test_set.references
        comparisons = compare(texts, _translations(other, test_set), references, **options)
        print("\n" + format_comparisons(comparisons, *names, settings.bootstrap))


def _score(
    texts: list[str],
    system: "list[str] | Translator",
    test_set: "_TestSet",
    settings: EvaluateSettings,
) -> None:
    """Writes translations, prints their scores, and stores those of a model."""
    from vanilla_transformer_tools.evaluation.metrics import (
        equal_in_canonical_form,
        format_scores,
        score,
    )
    from vanilla_transformer_tools.files import write_lines

    if settings.output:
        write_lines(Path(settings.output), texts)
    for name, part, rows in test_set.directions():
        scores = score([texts[row] for row in rows], part.references, **_options(settings, part))
        print(f"\n{name}:" * (name != test_set.name) + format_scores(scores))
        _record(settings, system, name, scores)
    if number := equal_in_canonical_form(texts, test_set.references):
        print(
            f"{number:,} translations differ from a reference in Unicode's canonical form alone; "
            "exact match counts them as wrong.",
            file=sys.stderr,
        )


def _record(
    settings: EvaluateSettings, system: "list[str] | Translator", name: str, scores: dict[str, Any]
) -> None:
    """Stores the scores of one model in its folder."""
    from vanilla_transformer_tools.sharing.model_card import read_results, record_results

    folder = _results_folder(settings)
    if isinstance(system, list) or not folder:
        return
    how = {"search": str(system.search), "engine": system.engine.name}
    # A test set that is scored again and again becomes a validation set.
    how["scorings"] = 1 + read_results(folder).get(name, {}).get("scorings", 0)
    record_results(folder, name, scores | how)


def _score_pairs(
    system: "list[str] | Translator", test_set: "_TestSet", settings: EvaluateSettings
) -> None:
    """Writes the log-probability of each test pair, as JSON."""
    from vanilla_transformer_tools.translation.teacher_forcing import PairScore, score_pairs

    scored: dict[int, PairScore] = {}
    for tag, rows in test_set.rows_by_tag().items():
        sources = [test_set.sources[row] for row in rows]
        targets = [test_set.references[row][0] for row in rows]
        scored |= zip(rows, score_pairs(_towards(system, tag), sources, targets), strict=True)
    lines = [
        json.dumps(
            {
                "line": row + 1,
                "score": round(pair.score, 4),
                "tokens": pair.tokens,
                "token_scores": [round(one, 4) for one in pair.token_scores],
            },
            ensure_ascii=False,
        )
        for row, pair in sorted(scored.items())
    ]
    write_rows(settings.output, lines)


def _towards(system: "list[str] | Translator", tag: str | None) -> "Translator":
    """The translator, into the language of a tag."""
    translator = cast("Translator", system)
    return translator if tag is None else translator.changed(target_language=tag)


def _system(
    settings: EvaluateSettings, path: str | None, test_set: "_TestSet"
) -> "list[str] | Translator":
    """Translations from a file, or a translator with the models of the settings."""
    if path and Path(path).is_file():
        return _read(path, len(test_set.references))
    if test_set.tags:
        settings = replace(settings, target_language=test_set.tags[0])
    return load_translator(settings)


def _translations(system: "list[str] | Translator", test_set: "_TestSet") -> list[str]:
    if isinstance(system, list):
        return system
    from vanilla_transformer_tools.progress import line_progress

    texts, report = [""] * len(test_set.sources), Report()
    with line_progress("evaluate", len(texts)) as advance:
        for tag, rows in test_set.rows_by_tag().items():
            lines = [test_set.sources[row] for row in rows]
            numbers = [row + 1 for row in rows]
            found = _towards(system, tag).translate(lines, numbers=numbers)
            for row, translation in zip(rows, found, strict=True):
                texts[row] = translation.text
                report.count(translation)
                advance()
    report.show()
    return texts


def _like(system: "list[str] | Translator", settings: EvaluateSettings) -> EvaluateSettings:
    """Settings for the model of --against, with the search of the first system if that is one."""
    settings = replace(settings, model=[str(settings.against)])
    if isinstance(system, list):
        return settings
    names = [item.name for item in fields(Search) if item.metadata.get("of_model")]
    search = {name: getattr(system.search, name) for name in names}
    return replace(settings, search=settings.search | search)


def _check(parser: Parser, settings: EvaluateSettings) -> None:
    if not settings.test:
        parser.error("--test needs the test pairs")
    if settings.tag_column and settings.target_language:
        parser.error("--tag_column names the target languages: leave out --target_language")
    if settings.score_pairs and settings.against:
        parser.error("--score_pairs compares nothing: leave out --against")
    if not settings.hypotheses:
        check_models(parser, settings.model)
    elif settings.model or settings.output or settings.score_pairs:
        parser.error(
            "--hypotheses holds translations: leave out --model, --output and --score_pairs"
        )
    elif not S_ISREG(os.stat(settings.hypotheses).st_mode):
        parser.error(f"--hypotheses must be a regular file, got {settings.hypotheses!r}")
    if against := settings.against:
        if not settings.bootstrap:
            parser.error("--against needs the resamples of --bootstrap, got 0")
        if looks_like_a_path(against):
            os.stat(against)
    if settings.output:
        others = [settings.against] if settings.against else []
        check_output(
            Path(settings.output),
            inputs=[*settings.test, *(settings.references or []), *others],
            models=[*(settings.model or []), *others],
        )
    if folder := _results_folder(settings):
        from vanilla_transformer_tools.saved_folder import CARD_FILE, RESULTS_FILE
        from vanilla_transformer_tools.sharing.model_card import read_results

        read_results(folder)
        for name in (RESULTS_FILE, CARD_FILE):
            check_room(folder / name, "The scores of --model")


def _results_folder(settings: EvaluateSettings) -> Path | None:
    """Folder that keeps the scores; None for an ensemble, which has no folder of its own."""
    folders = [Path(model) for model in settings.model or []]
    return folders[0] if len(folders) == 1 and folders[0].is_dir() else None


@dataclass(frozen=True)
class _TestSet:
    """Lines to translate, all references of each, and the language that the files name, if any.

    `trained` are the settings of the model's training, as far as they are on record.
    """

    name: str
    sources: list[str]
    references: list[tuple[str, ...]]
    language: str | None
    tags: list[str]
    trained: dict[str, Any]

    def rows_by_tag(self) -> dict[str | None, list[int]]:
        """Numbers of the lines into each language; None where the file does not say."""
        rows: dict[str | None, list[int]] = {}
        for row in range(len(self.sources)):
            rows.setdefault(self.tags[row] if self.tags else None, []).append(row)
        return rows

    def directions(self) -> Iterator[tuple[str, "_TestSet", list[int]]]:
        """The whole set, and the lines into each language if there are several; with a name."""
        yield self.name, self, list(range(len(self.sources)))
        rows_by_tag = self.rows_by_tag()
        for tag, rows in rows_by_tag.items() if len(rows_by_tag) > 1 else ():
            references = [self.references[row] for row in rows]
            name = f"{self.name} {tag}"
            yield name, replace(self, name=name, references=references, language=tag), rows


def _options(settings: EvaluateSettings, test_set: _TestSet) -> dict[str, Any]:
    """Options of the scores; BLEU's tokenizer is chosen once, for all systems."""
    from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve

    trained = test_set.trained
    languages = [settings.target_language, test_set.language, *trained.get("language", [])[1:2]]
    references = [line for lines in test_set.references for line in lines]
    is_tokenized = trained.get("pretokenized", False)
    return {
        "metrics": settings.metrics,
        "tokenize": resolve(settings.bleu_tokenize, references, languages, is_tokenized),
        "lowercase": settings.lowercase,
        "bootstrap": settings.bootstrap,
    }


def _load(settings: EvaluateSettings) -> _TestSet:
    from vanilla_transformer_tools.evaluation.bleu_tokenizers import language_of_file
    from vanilla_transformer_tools.evaluation.swapped import warning_of_swapped
    from vanilla_transformer_tools.evaluation.test_sets import PREFIX, find_test_set
    from vanilla_transformer_tools.saved_folder import read_run
    from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs

    name, paths, further = "test", settings.test, settings.references or []
    language = language_of_file(paths[-1])
    if len(paths) == 1 and paths[0].startswith(PREFIX):
        name, language, files = find_test_set(paths[0])
        paths, further = files[:2], [*files[2:], *further]
    pairs = load_pairs(
        ParallelText(
            tuple(paths),
            settings.source_column,
            settings.target_column,
            settings.dataset_config,
            settings.test_split,
            tag_column=settings.tag_column,
        )
    )
    sources, targets = pairs["source"][:], pairs["target"][:]
    record = read_run(settings.model[0]) if settings.model else {}
    if warning := warning_of_swapped(sources, targets, record):
        print(warning, file=sys.stderr)
    streams = [targets, *(_read(path, len(targets)) for path in further)]
    tags = pairs["tag"][:] if settings.tag_column else []
    references = list(zip(*streams, strict=True))
    trained = record.get("settings") or {}
    return _TestSet(settings.name or name, sources, references, language, tags, trained)


def _read(path: str, lines: int) -> list[str]:
    """Translations or further references from a file: one for each test pair."""
    from vanilla_transformer_tools.files import read_lines
    from vanilla_transformer_tools.text.parallel_text import warn_of_carriage_returns

    texts = list(read_lines(path))
    if texts[0].endswith("\r"):
        warn_of_carriage_returns(repr(path))
    if len(texts) != lines:
        raise ValueError(
            f"{path!r} must hold one line for each of the {lines:,} test pairs, got "
            f"{len(texts):,} lines. Check that it belongs to the same file."
        )
    return texts
