"""Text files: lines in, and files that appear whole or not at all."""

import gzip
import hashlib
import os
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    r"""Yields the lines of a plain or gzipped UTF-8 file, without their line ends.

    A line ends at `\n` only: a carriage return, a form feed or U+2028 stays inside its line, so
    that both sides of a parallel corpus count the same lines whatever stands in them. The last `\n`
    is optional, and a byte order mark at the beginning is dropped.

    Args:
        path: The file; whether it is gzipped is read from its first bytes, not from its name.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty, is not UTF-8, or is a damaged gzip file.
    """
    number = 0
    with open(path, "rb") as raw:
        is_gzip = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
        try:
            for number, line in enumerate(stream, start=1):
                content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if number == 1 and _is_utf16(content):
                    raise ValueError(
                        f"{os.fspath(path)!r} must be UTF-8, got what looks like UTF-16: every "
                        "second byte of line 1 is 0. Convert the file first: iconv -f UTF-16LE "
                        "(or UTF-16BE) -t UTF-8 old.txt > new.txt"
                    )
                yield decode_line(content.removesuffix(b"\n"), path, number)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{os.fspath(path)!r} is a damaged gzip file: {error} (after line {number}). "
                "Copy or compress it again."
            ) from error
    if number == 0:
        raise ValueError(f"{os.fspath(path)!r} is empty: expected at least one line of text.")


def decode_line(line: bytes, path: str | os.PathLike[str], number: int) -> str:
    """Text of one line, or a ValueError that names the bad byte and where it stands.

    Args:
        line: The line without its line end.
        path: Where the line comes from, as the error shall call it.
        number: Number of the line, counted from 1.
    """
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "ISO-8859-1"
        raise ValueError(
            f"{os.fspath(path)!r} must be UTF-8, got byte 0x{line[error.start]:02X} at byte "
            f"{error.start + 1} of line {number}. Convert the file first, for example: "
            f"iconv -f {encoding} -t UTF-8 old.txt > new.txt"
        ) from error


def _is_utf16(line: bytes) -> bool:
    """Whether the zeros of Latin letters tell of UTF-16 without a byte order mark."""
    return len(line) > 2 and any(not any(line[start::2]) for start in (0, 1))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write a file: a reader of `path` sees the old one or all of the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    r"""Writes lines, each ending in `\n`, as `written_whole` does."""
    with (
        written_whole(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as file,
    ):
        file.writelines(f"{line}\n" for line in lines)
    return path


# XXH3 finds damage as well as SHA-256 in a tenth of the time, but is no proof against forgery.
_DIGESTS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}


def checksum(path: str | os.PathLike[str], kind: str = "sha256") -> str:
    """Digest of a file's bytes, SHA-256 or `xxh3_128`, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, _DIGESTS[kind]).hexdigest()
