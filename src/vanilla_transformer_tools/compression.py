"""Compressed files, known by their first bytes."""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

# By these, a compressed file may be named.
SUFFIXES = (".gz", ".bz2", ".xz")
# Number of first bytes of a file that show its kind.
HEAD = 10
# What the modules raise for damaged data, besides an OSError without a number.
DAMAGE = (EOFError, zlib.error, lzma.LZMAError)

# First bytes, none of which begins a text in UTF-8, and how to read what follows.
_KINDS: dict[bytes, Callable[[BinaryIO], Any]] = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9]1AY&SY": bz2.open,
    rb"\xfd7zXZ\0": lzma.open,
}


def compression_of(head: bytes) -> Callable[[BinaryIO], Any] | None:
    """Opens a file that begins with these bytes, and can seek; None: it is not compressed."""
    return next((opener for magic, opener in _KINDS.items() if re.match(magic, head)), None)


def without_suffix(name: str) -> str:
    """The name that a file had before it was compressed."""
    return next((name.removesuffix(end) for end in SUFFIXES if name.lower().endswith(end)), name)
