"""Compressed files, known by their first bytes: unpacked if Python can, named otherwise."""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

# By these, a compressed file may be named.
SUFFIXES = (".gz", ".bz2", ".xz")

# Number of first bytes of a file that show its kind.
HEAD = 10

# What the modules raise for damaged data; of bz2, an OSError without a number.
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)


@dataclass(frozen=True)
class Compression:
    """A kind of compressed file.

    Attributes:
        name: For messages.
        magic: Pattern of its first bytes; none begins a text in UTF-8.
        open: Reads its content from a file that can seek; None: not supported.
    """

    name: str
    magic: bytes
    open: Callable[[BinaryIO], Any] | None = None


def compression_of(head: bytes) -> Compression | None:
    """The kind of a file that begins with these bytes; None: it is not compressed."""
    return next((kind for kind in _KINDS if re.match(kind.magic, head)), None)


def without_suffix(name: str) -> str:
    """The name that a file had before it was compressed."""
    return next((name.removesuffix(end) for end in SUFFIXES if name.lower().endswith(end)), name)


_KINDS = (
    Compression("gzip", rb"\x1f\x8b", gzip.open),
    Compression("bzip2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", bz2.open),
    Compression("xz", rb"\xfd7zXZ\0", lzma.open),
    Compression("zip", rb"PK\x03\x04"),
    Compression("Zstandard", rb"\x28\xb5\x2f\xfd"),
)
