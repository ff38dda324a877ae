"""Secrets and paths that must not leave the machine: removed from records, found in files."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MASK = "<secret>"

# Patterns that only secrets match, by their names in messages.
_SECRETS = {
    "a token of the Hub": r"\bhf_[A-Za-z0-9]{20,}",
    "a token of GitHub": r"\b(?:gh[a-z]_[A-Za-z0-9]{36,}|github_pat_\w{20,})",
    "an access key of AWS": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "an API key": r"(?<![\w-])sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}",
    # A digit distinguishes a token from words, as in "bearer authentication/authorisation".
    "a bearer token": r"\bBearer\s+(?=[\w.~+/-]*\d)[\w.~+/-]{20,}=*",
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
}
# Examples in ordinary text match these too.
_SECRETS_IN_URLS = {
    "a password in a URL": r"(?<=://)[^\s/:@\"'<>]*:[^\s/:@\"'<>]+(?=@)",
    "a token in a URL": r"(?<=[?&])(?:[\w-]*token|api_?key|sig|[\w-]*signature)=[\w.~%+/-]{16,}=*",
}
_SECRET = re.compile(
    "|".join(f"(?:{pattern})" for pattern in (_SECRETS | _SECRETS_IN_URLS).values())
)

# Names of options, fields and environment variables whose value is a secret.
_SECRET_NAME = r"(?:[\w-]*[_-])?(?:token|(?:api)?key|secret|password|passwd)"
_SECRET_OPTION = re.compile(rf"--{_SECRET_NAME}")
_SECRET_FIELD = re.compile(_SECRET_NAME, re.IGNORECASE)
_SECRET_IN_JSON = re.compile(rf'("{_SECRET_NAME}"\s*:\s*)"[^"]*"', re.IGNORECASE)
# A shorter value, such as "1" or "none", says nothing and occurs everywhere.
_SHORTEST_VALUE = 8

_HOME = (
    r"(?<![\w.~-])(?:/(?:home|Users)/[\w.-]*\w|/root(?=/))|\b[A-Za-z]:[\\/]+Users[\\/]+[\w.-]*\w"
)

# Folders in front of a name, from the root or a home; not those of a URL.
_FOLDERS = re.compile(
    r"""(?<![\w.~\\/-])(?!(?<=:)//)"""
    r"""(?:file://)?(?:~[\w.-]*|[A-Za-z]:)?(?:[\\/]+[^\\/\s"',;]+)*[\\/]+(?=[^\\/\s"',;])"""
)

# Names on the Hub, which a folder of this machine may share.
_HUB_FIELDS = {"dataset_tags", "hub_model_id"}


@dataclass(frozen=True)
class Disclosure:
    """Something in a file that should not be shared.

    Attributes:
        line: Of the file, counted from 1.
        what: In words, without the secret itself.
    """

    line: int
    what: str


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
        name = _name(path)
        same = sum(_name(earlier) == name for earlier in names)
        names[path] = f"{name} ({same + 1})" if same else name
    cleaner = _Cleaner(names, list(_secret_values()))
    cleaned = {key: cleaner.clean(value, key) for key, value in record.items()}
    if checksums:
        cleaned["sha256"] = {names[path]: checksum for path, checksum in checksums.items()}
    return cleaned


def find_disclosures(text: str, *, is_vocabulary: bool = False) -> list[Disclosure]:
    """Secrets and home directories in the text of a file, by line.

    Args:
        text: Of the file.
        is_vocabulary: Whether it holds pieces of the training text and no paths: then only what
            cannot be an ordinary word counts.
    """
    patterns = dict(_SECRETS)
    if not is_vocabulary:
        patterns |= _SECRETS_IN_URLS
        # A user without a home has the root, or the `~` stays.
        home = os.path.expanduser("~")
        homes = rf"{_HOME}|(?<![\w.~-]){re.escape(home)}(?![\w-])" if len(home) > 1 else _HOME
        patterns["a home directory"] = homes
        for variable, value in _secret_values():
            patterns[f"the value of {variable}"] = _whole(value)
    found = []
    for what, pattern in patterns.items():
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            shown = f", {match[0]!r}" if what == "a home directory" else ""
            found.append(Disclosure(line, what + shown))
    return sorted(set(found), key=lambda disclosure: (disclosure.line, disclosure.what))


@dataclass(frozen=True)
class _Cleaner:
    """Cleans the values of a record.

    Attributes:
        names: Names that replace the paths of data, by path.
        secrets: Variables of the environment that hold a secret, with their values.
    """

    names: Mapping[str, str]
    secrets: list[tuple[str, str]]

    def clean(self, value: Any, field: str = "") -> Any:
        """A value, of the field of that name."""
        if isinstance(value, Mapping):
            return {key: self.clean(inner, key) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return list(self._words(value, field))
        if not isinstance(value, str):
            return value
        if value and _SECRET_FIELD.fullmatch(field):
            return MASK
        return self._text(value, is_path=field not in _HUB_FIELDS)

    def _words(self, words: list[Any] | tuple[Any, ...], field: str) -> Iterator[Any]:
        """Members of a list, without the value after an option for a secret."""
        hides_next = False
        for word in words:
            yield MASK if hides_next else self.clean(word, field)
            hides_next = isinstance(word, str) and _SECRET_OPTION.fullmatch(word) is not None

    def _text(self, text: str, is_path: bool) -> str:
        if text in self.names:
            return self.names[text]
        for _, secret in self.secrets:
            text = re.sub(_whole(secret), MASK, text)
        text = _SECRET_IN_JSON.sub(rf'\1"{MASK}"', _SECRET.sub(MASK, text))
        option, equals, argument = text.partition("=")
        if not equals or not re.fullmatch(r"[\w-]+", option):
            return self._path(text) if is_path else text
        if _SECRET_OPTION.fullmatch(option):
            return f"{option}={MASK}"
        return f"{option}={self._path(argument)}"

    def _path(self, text: str) -> str:
        """Text without the folders of its paths."""
        if text in self.names:
            return self.names[text]
        is_path = re.match(r"[\\/]|[A-Za-z]:[\\/]|~[\w.-]*[\\/]|\.{1,2}[\\/]", text)
        if is_path or os.path.exists(text):
            return _name(text)
        return _FOLDERS.sub("", text)


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
