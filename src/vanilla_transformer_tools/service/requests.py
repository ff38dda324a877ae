"""Requests to `/translate`: LibreTranslate's fields, as JSON or as a form."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import Any, Self
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException

from vanilla_transformer_tools.settings import ServeSettings
from vanilla_transformer_tools.translation.segments import without_surrogates

JSON, FORM = "application/json", "application/x-www-form-urlencoded"

# A character takes at most 12 bytes: as two escapes in JSON, as four of its bytes in a form.
_BYTES_PER_CHARACTER = 12
# Of quotes and commas, or of a name and `&`.
_BYTES_PER_TEXT = 16
_OTHER_BYTES = 2**16

_LINE_END = re.compile(r"(\r\n|\n|\r)")


class RefusedError(HTTPException):
    """A request that is not translated: the status of the response, and the message in it."""


def most_bytes(settings: ServeSettings) -> int:
    """Bytes of the largest body; no request within the other limits has more."""
    characters, texts = settings.max_characters, settings.max_texts
    return characters * _BYTES_PER_CHARACTER + texts * _BYTES_PER_TEXT + _OTHER_BYTES


@dataclass(frozen=True)
class TranslationRequest:
    """The body of a request.

    Attributes:
        texts: To translate.
        is_list: Whether they came as a list, and go back as one.
        source: Language of the texts.
        target: Language to translate into.
        alternatives: Wanted besides the best translation.
        is_html: Whether the texts are HTML.
    """

    texts: tuple[str, ...]
    is_list: bool
    source: str
    target: str
    alternatives: int = 0
    is_html: bool = False

    @classmethod
    def of(cls, body: bytes, content_type: str, settings: ServeSettings) -> Self:
        """Reads a body.

        Args:
            body: Body of the request, within `most_bytes`.
            content_type: Its header of that name.
            settings: Limits of a request.

        Raises:
            RefusedError: If it is not one that can be translated.
        """
        fields = _fields(body, content_type)
        texts = fields.get("q")
        is_list = isinstance(texts, list)
        texts = texts if isinstance(texts, list) else [texts]
        faults = []
        if not all(isinstance(text, str) for text in texts):
            faults.append("`q` must be the text to translate, or a list of texts")
        for name in ("source", "target"):
            if not isinstance(fields.get(name), str):
                faults.append(f"`{name}` must be a language; /languages lists them")
        # Some clients send an empty one.
        if (text_format := fields.get("format") or "text") not in ("text", "html"):
            faults.append(f"`format` must be text or html, got {text_format!r:.60}")
        alternatives = str(fields.get("alternatives", 0))
        if not re.fullmatch(r"[0-9]{1,9}", alternatives):
            faults.append(f"`alternatives` must be a whole number, got {alternatives!r:.60}")
        if faults:
            raise RefusedError(400, f"{'; '.join(faults)}.")
        must = "A request must have at most"
        if len(texts) > settings.max_texts:
            raise RefusedError(413, f"{must} {settings.max_texts:,} texts, got {len(texts):,}.")
        if (characters := sum(map(len, texts))) > settings.max_characters:
            most = f"{settings.max_characters:,} characters"
            raise RefusedError(413, f"{must} {most}, got {characters:,}. Send it in parts.")
        return cls(
            # JSON can have them.
            tuple(map(without_surrogates, texts)),
            is_list,
            fields["source"],
            fields["target"],
            int(alternatives),
            text_format == "html",
        )


def _fields(body: bytes, content_type: str) -> dict[str, Any]:
    kind, _, parameters = (part.strip().lower() for part in content_type.partition(";"))
    if kind not in (JSON, FORM):
        raise RefusedError(415, f"The Content-Type must be {JSON} or {FORM}, got {kind!r:.60}.")
    charset = re.search(r"charset\s*=\s*\"?([^\";\s]*)", parameters)
    if charset and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        got = f"{charset[1]!r:.60}"
        raise RefusedError(415, f"The charset of the Content-Type must be UTF-8, got {got}.")
    try:
        text = body.decode()
        if kind == JSON:
            fields = json.loads(text, object_pairs_hook=_unrepeated)
        else:
            found = parse_qs(text, keep_blank_values=True, errors="strict")
            fields = {
                name: values[0] if len(values) == 1 else values for name, values in found.items()
            }
    except UnicodeDecodeError as error:
        got = f"{error.reason} at byte {error.start:,}"
        raise RefusedError(400, f"The body must be UTF-8, got {got}.") from error
    except (ValueError, RecursionError) as error:
        got = f"something that cannot be parsed: {error}"
        raise RefusedError(400, f"The body must be {kind}, got {got}.") from error
    if not isinstance(fields, dict):
        raise RefusedError(400, f"The body must be a JSON object, got {fields!r:.60}.")
    return fields


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name occurs twice in an object")
    return fields


def split_lines(text: str) -> tuple[list[str], Callable[[list[str]], str]]:
    """The lines of a text, and what joins their translations with the ends of these lines."""
    pieces = _LINE_END.split(text)
    ends = [*pieces[1::2], ""]
    return pieces[::2], lambda lines: "".join(map(add, lines, ends))
