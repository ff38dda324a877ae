"""Test sets by name, from sacreBLEU's list."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu import DATASETS

_PREFIX = "sacrebleu:"


@dataclass(frozen=True)
class NamedTestSet:
    """Files of a test set in sacreBLEU's folder.

    Attributes:
        name: Name of the test set and its languages, such as `wmt19 de-en`.
        source: File of the sources.
        references: Files of the references, at least one.
        language: Code of the target language.
    """

    name: str
    source: str
    references: list[str]
    language: str


def is_named(test: Sequence[str]) -> bool:
    """Whether the value of `--test` is a name, such as `sacrebleu:wmt19:de-en`."""
    return len(test) == 1 and test[0].startswith(_PREFIX)


def named_test_set(test: str) -> NamedTestSet:
    """Files of a test set, which are downloaded on first use.

    Args:
        test: Name and languages, such as `sacrebleu:wmt19:de-en`.

    Raises:
        ValueError: If sacreBLEU has no such test set, or not with these languages.
        OSError: If it cannot be downloaded.
    """
    name, _, languages = test.removeprefix(_PREFIX).partition(":")
    if name not in DATASETS:
        similar = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.3) or ["wmt19"]
        raise ValueError(
            f"--test {test} must name one of sacreBLEU's test sets, such as {', '.join(similar)}, "
            f"got {name!r}. `sacrebleu --list` names them all."
        )
    if languages not in DATASETS[name].langpairs:
        known = ", ".join(DATASETS[name].langpairs)
        raise ValueError(
            f"--test {test} must name two languages of {name} after a colon, as in "
            f"{_PREFIX}{name}:{known.split(', ')[0]}, got {languages!r}. Choose from: {known}."
        )
    listed: Any = DATASETS[name]
    try:
        source = listed.get_source_file(languages)
        references = listed.get_reference_files(languages)
    # sacreBLEU ends the program if a checksum is wrong.
    except (OSError, SystemExit) as error:
        raise OSError(
            f"sacreBLEU's test set {name} {languages} cannot be downloaded: {error}. Check the "
            "network, or copy the folder of a machine that has it and name it by SACREBLEU."
        ) from error
    return NamedTestSet(f"{name} {languages}", source, references, languages.rpartition("-")[2])
