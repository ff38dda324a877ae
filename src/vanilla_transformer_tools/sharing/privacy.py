"""Secrets and paths that must not leave the machine: removed from records, found in files."""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.filters.heuristic import is_templated_secret
from detect_secrets.plugins.base import BasePlugin, RegexBasedDetector
from detect_secrets.plugins.keyword import DENYLIST, KeywordDetector

MASK = "<secret>"

# Detectors of detect-secrets that ordinary words set off, such as APARTMENTHAUS, or that are slow.
_UNUSED_DETECTORS = {
    "Artifactory Credentials",
    "Cloudant Credentials",
    "IBM COS HMAC Credentials",
    "IBM Cloud IAM Key",
    "NPM tokens",
    "Public IP (ipv4)",
    "SoftLayer Credentials",
}
# Passwords in URLs, as examples in a training text have them too.
_IN_TEXT = "Basic Auth Credentials"
_HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")
_SECRET_KEYWORD = re.compile("|".join(DENYLIST), re.IGNORECASE)
_REST_OF_WORD = re.compile(r"[\w.+/=~-]*")

# Names of options, fields and environment variables whose value is a secret.
_SECRET_NAME = r"(?:[\w-]*[_-])?(?:token|(?:api)?key|secret|password|passwd)"
_SECRET_OPTION = re.compile(rf"--{_SECRET_NAME}")
_SECRET_FIELD = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_IN_JSON = re.compile(rf'("{_SECRET_NAME}"\s*:\s*)"[^"]*"', re.IGNORECASE)
# A shorter value, such as "1" or "none", says nothing and occurs everywhere.
_SHORTEST_VALUE = 8

# Folders of Windows are mounted in WSL and Cygwin.
_HOME = (
    r"(?<![\w.~-])(?:(?:/var|/export|/mnt/[a-z]|/cygdrive/[a-z]|/[a-z])?/(?:home|Users)/[\w.-]*\w"
    r"|/(?:var/)?root(?![\w.-]))|\b[A-Za-z]:[\\/]+(?i:Users)[\\/]+[\w.-]*\w"
)

# Folders in front of a name, from the root or a home; not those of a URL.
_FOLDERS = re.compile(
    r"""(?<![\w.~\\/-])(?!(?<=:)//)"""
    r"""(?:file://)?(?:~[\w.-]*|[A-Za-z]:)?(?:[\\/]+[^\\/\s"',;]+)*[\\/]+(?=[^\\/\s"',;])"""
)

# Names on the Hub, which a folder of this machine may share.
_HUB_FIELDS = {"dataset_tags", "hub_model_id"}


def clean_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run as it may be shared: secrets masked, paths cut down to names.

    Args:
        record: Ready for JSON. Its `sha256` has the checksums by path; the result has them by
            name, and a number tells paths of one name apart: `train.de`, `train.de (2)`. Where
            else such a path is given, it becomes the same name.
    """
    checksums = record.get("sha256", {})
    names: dict[str, str] = {}
    for path in checksums:
        same = sum(_name(earlier) == _name(path) for earlier in names)
        names[path] = _name(path) + f" ({same + 1})" * (same > 0)
    cleaned = {key: _cleaned(value, key, names) for key, value in record.items()}
    if checksums:
        cleaned["sha256"] = {names[path]: checksum for path, checksum in checksums.items()}
    return cleaned


def find_disclosures(text: str, *, is_vocabulary: bool = False) -> list[tuple[int, str]]:
    """Secrets and home directories in the text of a file: lines from 1, and words without them.

    Args:
        text: Content of the file.
        is_vocabulary: Whether it holds pieces of the training text and no paths: then only what
            cannot be an ordinary word counts.
    """
    found = {(start, what) for what, start, _ in _find_secrets(text, is_vocabulary=is_vocabulary)}
    if not is_vocabulary:
        for variable, value in _secret_values():
            what = f"the value of {variable}"
            found |= {(match.start(), what) for match in re.finditer(_whole(value), text)}
        # A user without a home has the root, or the `~` stays.
        home = os.path.expanduser("~")
        homes = rf"{_HOME}|(?<![\w.~-]){re.escape(home)}(?![\w-])" if len(home) > 1 else _HOME
        for match in re.finditer(homes, text):
            found.add((match.start(), f"a home directory, {match[0]!r}"))
        start = 0
        for line in text.splitlines(keepends=True):
            values = KeywordDetector().analyze_string(line) if _SECRET_KEYWORD.search(line) else ()
            if not all(map(is_templated_secret, values)):
                found.add((start, "a value of a secret"))
            start += len(line)
    return sorted({(text.count("\n", 0, start) + 1, what) for start, what in found})


@cache
def _detectors() -> list[RegexBasedDetector]:
    """The detectors of detect-secrets that ordinary text does not set off."""
    kinds: Mapping[str, type[BasePlugin]] = get_mapping_from_secret_type_to_class()
    kept = (kind for name, kind in kinds.items() if name not in _UNUSED_DETECTORS)
    return [kind() for kind in kept if issubclass(kind, RegexBasedDetector)]


def _find_secrets(text: str, *, is_vocabulary: bool = False) -> Iterator[tuple[str, int, int]]:
    """Kind, beginning and end of each secret in a text."""
    for match in _HUB_TOKEN.finditer(text):
        yield "a token of the Hub", *match.span()
    for detector in _detectors():
        if is_vocabulary and detector.secret_type == _IN_TEXT:
            continue
        for pattern in detector.denylist:
            for match in pattern.finditer(text):
                # Checks what a pattern cannot, such as the parts of a JSON Web Token, whose pattern
                # also ends before its signature.
                if any(detector.analyze_string(match[0])):
                    end = _REST_OF_WORD.match(text, match.end())
                    yield detector.secret_type, match.start(), end.end() if end else match.end()


def _masked(text: str) -> str:
    """The text with a mask in place of each secret."""
    parts, end = [], 0
    for start, stop in sorted((start, stop) for _, start, stop in _find_secrets(text)):
        if start >= end:
            parts += [text[end:start], MASK]
        end = max(end, stop)
    return "".join([*parts, text[end:]])


def _cleaned(value: Any, field: str, names: Mapping[str, str]) -> Any:
    """A value of the field of that name; `names` replace the paths of data."""
    if isinstance(value, Mapping):
        return {key: _cleaned(inner, key, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        # The value after an option for a secret is one.
        options = [isinstance(word, str) and _SECRET_OPTION.fullmatch(word) for word in value]
        return [
            MASK if hides else _cleaned(word, field, names)
            for hides, word in zip([None, *options], value, strict=False)
        ]
    if not isinstance(value, str) or value in names:
        return names.get(value, value)
    if value and _SECRET_FIELD.fullmatch(field):
        return MASK
    for _, secret in _secret_values():
        value = re.sub(_whole(secret), MASK, value)
    value = _SECRET_IN_JSON.sub(rf'\1"{MASK}"', _masked(value))
    option, equals, argument = value.partition("=")
    if not equals or not re.fullmatch(r"[\w-]+", option):
        return value if field in _HUB_FIELDS else _without_folders(value)
    if _SECRET_OPTION.fullmatch(option):
        return f"{option}={MASK}"
    return f"{option}={names.get(argument) or _without_folders(argument)}"


def _without_folders(text: str) -> str:
    """Text without the folders of its paths."""
    is_path = re.match(r"[\\/]|[A-Za-z]:[\\/]|~[\w.-]*[\\/]|\.{1,2}[\\/]", text)
    return _name(text) if is_path or os.path.exists(text) else _FOLDERS.sub("", text)


def _name(path: str) -> str:
    """The last part of a path of any system; the root stays."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path


def _whole(value: str) -> str:
    """Pattern of a secret that is not part of a longer word."""
    return rf"(?<!\w){re.escape(value)}(?!\w)"


def _secret_values() -> Iterator[tuple[str, str]]:
    """Variables of the environment that hold secrets, with their values."""
    for variable, value in os.environ.items():
        is_secret = _SECRET_FIELD.fullmatch(variable) or variable.endswith("_ACCESS_KEY_ID")
        if is_secret and len(value) >= _SHORTEST_VALUE:
            yield variable, value
