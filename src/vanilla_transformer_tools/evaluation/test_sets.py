"""Test sets by name, from sacreBLEU's list."""

import difflib
from typing import Any

from sacrebleu import DATASETS

# Of a test set that `--test` names, such as `sacrebleu:wmt19:de-en`.
PREFIX = "sacrebleu:"


def find_test_set(test: str) -> tuple[str, str, list[str]]:
    """Name, target language, and files of a test set, which are downloaded on first use.

    Of `sacrebleu:wmt19:de-en`, the name is `wmt19 de-en`, and the language `en`. The first file has
    the sources, the others, at least one, the references.

    Raises:
        ValueError: If sacreBLEU has no such test set, or not with these languages.
        OSError: If it cannot be downloaded.
    """
    name, _, languages = test.removeprefix(PREFIX).partition(":")
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
            f"{PREFIX}{name}:{known.split(', ')[0]}, got {languages!r}. Choose from: {known}."
        )
    listed: Any = DATASETS[name]
    try:
        files = [listed.get_source_file(languages), *listed.get_reference_files(languages)]
    # sacreBLEU ends the program if a checksum is wrong.
    except (OSError, SystemExit) as error:
        raise OSError(
            f"sacreBLEU's test set {name} {languages} cannot be downloaded: {error}. Check the "
            "network, or copy the folder of a machine that has it and name it by SACREBLEU."
        ) from error
    return f"{name} {languages}", languages.rpartition("-")[2], files
