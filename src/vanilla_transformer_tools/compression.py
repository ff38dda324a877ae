"""Compressed files, told by their first bytes: what Python reads is unpacked, the rest is named."""

import bz2
import gzip
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

# By these, a compressed file of any kind may be named.
SUFFIXES = (".gz", ".bz2", ".xz", ".zip", ".zst")

# Bytes of a file that suffice to tell its kind.
HEAD = 10

# What the modules raise for damaged data; of bz2, an OSError without a number.
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Compression:
    """A kind of compressed file.

    Attributes:
        name: For messages.
        magic: Pattern of its first bytes; none begins a text in UTF-8.
        unpack: Command that writes its content to standard output.
        open: Reads its content from a file that can seek; None: Python's library cannot.
    """

    name: str
    magic: bytes
    unpack: str
    open: Callable[[BinaryIO], Any] | None = None


def compression_of(head: bytes) -> Compression | None:
    """The kind of a file that begins with these bytes; None: it is not compressed."""
    return next((kind for kind in _KINDS if re.match(kind.magic, head)), None)


def without_suffix(name: str) -> str:
    """The name that a file had before it was compressed."""
    return next((name.removesuffix(end) for end in SUFFIXES if name.lower().endswith(end)), name)


def _only_member(file: BinaryIO) -> IO[bytes]:
    archive = zipfile.ZipFile(file)
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1 or members[0].flag_bits & 1:
        got = "an encrypted one" if len(members) == 1 else f"{len(members)}"
        raise ValueError(f"must hold one file that needs no password, got {got}")
    return archive.open(members[0])


_KINDS = (
    Compression("gzip", rb"\x1f\x8b", "gzip -dc", gzip.open),
    Compression("bzip2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", "bzip2 -dc", bz2.open),
    Compression("xz", rb"\xfd7zXZ\0", "xz -dc", lzma.open),
    Compression("zip", rb"PK(?:\x03\x04|\x05\x06)", "unzip -p", _only_member),
    Compression("Zstandard", rb"\x28\xb5\x2f\xfd", "zstd -dc"),
    Compression("LZ4", rb"\x04\x22\x4d\x18", "lz4 -dc"),
    Compression("7z", rb"7z\xbc\xaf\x27\x1c", "7z x -so"),
    Compression("RAR", rb"Rar!\x1a\x07", "unrar p -inul"),
)
