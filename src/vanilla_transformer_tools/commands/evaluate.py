"""The `evaluate` command: scores of a model or of a file, or a comparison of two."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vanilla_transformer_tools.commands.command import (
    Parser,
    Report,
    build_parser,
    check_model,
    load_translator,
    parse,
)
from vanilla_transformer_tools.commands.outputs import check_output, check_room
from vanilla_transformer_tools.files import looks_like_a_path
from vanilla_transformer_tools.settings import EvaluateSettings

if TYPE_CHECKING:
    from vanilla_transformer_tools.translation import Translator

_EXAMPLE = """Scores are percentages, with ± half the width of a 95 % confidence interval.
Those of a model are also stored in its folder and model card.

example:
  vanilla-transformer evaluate --model runs/de-en --test test.de test.en
  vanilla-transformer evaluate --model runs/de-en --test test.de test.en --against other.en
  vanilla-transformer evaluate --hypotheses other.en --test test.de test.en
  vanilla-transformer evaluate --model runs/de-en --test sacrebleu:wmt19:de-en
"""


def evaluate(argv: list[str]) -> None:
    """Score the translations of a test set, by a model or from a file."""
    parser = build_parser(evaluate, EvaluateSettings, _EXAMPLE)
    settings = EvaluateSettings(**parse(parser, argv))
    _check(parser, settings)

    from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
    from vanilla_transformer_tools.evaluation.metrics import (
        build_metrics,
        check_bootstrap,
        compare,
        format_comparisons,
        format_scores,
        score,
    )
    from vanilla_transformer_tools.files import write_lines
    from vanilla_transformer_tools.sharing.model_card import read_results, record_results

    # Mistakes are reported before the translation, which may take an hour.
    check_bootstrap(settings.bootstrap)
    build_metrics(settings.metrics, resolve(settings.bleu_tokenize, []).name)
    test_set = _load(settings)
    sources, references = test_set.sources, test_set.references
    options = _options(settings, test_set)
    system = _system(settings, settings.hypotheses, len(references))
    if settings.against:
        other = _system(_like(system, settings), settings.against, len(references))

    texts = _translations(system, sources)
    if settings.output:
        write_lines(Path(settings.output), texts)
    scores = score(texts, references, **options)
    print(format_scores(scores))
    folder = _results_folder(settings)
    if not isinstance(system, list) and folder:
        how = {"search": str(system.search), "engine": system.engine.name}
        # A test set that is scored again and again becomes a validation set.
        name = settings.name or test_set.name
        how["scorings"] = 1 + read_results(folder).get(name, {}).get("scorings", 0)
        record_results(folder, name, scores | how)
    if settings.against:
        names = (settings.hypotheses or " + ".join(settings.model or []), settings.against)
        comparisons = compare(texts, _translations(other, sources), references, **options)
        print("\n" + format_comparisons(comparisons, *names, settings.bootstrap))


def _system(settings: EvaluateSettings, path: str | None, lines: int) -> "list[str] | Translator":
    """Translations from a file, or a translator with the models of the settings."""
    return _read(path, lines) if path and _is_no_folder(path) else load_translator(settings)


def _translations(system: "list[str] | Translator", sources: list[str]) -> list[str]:
    if isinstance(system, list):
        return system
    from vanilla_transformer_tools.progress import line_progress

    texts, report = [], Report()
    with line_progress("evaluate", len(sources)) as advance:
        for translation in system.translate(sources):
            texts.append(translation.text)
            report.count(translation)
            advance()
    report.show()
    return texts


def _like(system: "list[str] | Translator", settings: EvaluateSettings) -> EvaluateSettings:
    """Settings for the model of --against, with the search of the first system if that is one."""
    settings = replace(settings, model=[str(settings.against)])
    if isinstance(system, list):
        return settings
    search = {"num_beams": system.search.num_beams, "length_penalty": system.search.length_penalty}
    return replace(settings, search=settings.search | search)


def _check(parser: Parser, settings: EvaluateSettings) -> None:
    if not settings.test:
        parser.error("--test needs the test pairs")
    if not settings.hypotheses:
        check_model(parser, settings.model)
    elif settings.model or settings.output:
        parser.error("--hypotheses holds translations: leave out --model and --output")
    elif not _is_no_folder(settings.hypotheses):
        parser.error(f"--hypotheses: there is no file {settings.hypotheses!r}")
    if against := settings.against:
        if not settings.bootstrap:
            parser.error("--against needs the resamples of --bootstrap, got 0")
        if looks_like_a_path(against) and not Path(against).exists():
            parser.error(f"--against: there is no file or folder {against!r}")
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


def _is_no_folder(path: str) -> bool:
    """Whether the path exists and is no folder: a file, or a pipe, which reading rejects."""
    return Path(path).exists() and not Path(path).is_dir()


def _results_folder(settings: EvaluateSettings) -> Path | None:
    """Folder that keeps the scores; None for an ensemble, which has no folder of its own."""
    folders = [Path(model) for model in settings.model or []]
    return folders[0] if len(folders) == 1 and folders[0].is_dir() else None


@dataclass(frozen=True)
class _TestSet:
    """Lines to translate, all references of each, and the language that the files name, if any."""

    name: str
    sources: list[str]
    references: list[tuple[str, ...]]
    language: str | None


def _options(settings: EvaluateSettings, test_set: _TestSet) -> dict[str, Any]:
    """Options of the scores; BLEU's tokenizer is chosen once, for all systems."""
    from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
    from vanilla_transformer_tools.saved_folder import read_run

    folder = _results_folder(settings)
    trained = read_run(str(folder)).get("settings") or {} if folder else {}
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
    from vanilla_transformer_tools.evaluation.test_sets import find_test_set, is_named
    from vanilla_transformer_tools.text.parallel_text import ParallelText, load_pairs

    name, paths, further = "test", settings.test, settings.references or []
    language = language_of_file(paths[-1])
    if is_named(paths):
        name, language, files = find_test_set(paths[0])
        paths, further = files[:2], [*files[2:], *further]
    pairs = load_pairs(
        ParallelText(
            tuple(paths),
            settings.source_column,
            settings.target_column,
            settings.dataset_config,
            settings.test_split,
        )
    )
    targets = pairs["target"][:]
    streams = [targets, *(_read(path, len(targets)) for path in further)]
    return _TestSet(name, pairs["source"][:], list(zip(*streams, strict=True)), language)


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
