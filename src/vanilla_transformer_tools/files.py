"""Files: lines in, files and folders that appear whole or not at all, and disks that are full.

The names of temporary files and folders hold the machine and the process that made them. Whoever
makes the next one deletes those whose process has ended, on the same machine.
"""

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, TextIO

import psutil
import xxhash
import yaml
from filelock import FileLock, Timeout

from vanilla_transformer_tools.compression import DAMAGE, HEAD, compression_of

# Bytes, unpacked: a few kB can unpack to gigabytes without a line end.
LONGEST_LINE = 2**26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How libraries written in Rust report a system error.
_NUMBER_FROM_RUST = re.compile(r"\(os error (\d+)\)")
# The largest tokenizer.json in use has 35 MB; parsed, a file takes some ten times its size.
_MOST_BYTES_OF_TEXT = 2**28
# Read in some two seconds; recipes, mappings and the metadata of cards have a hundredth of it.
_MOST_CHARACTERS_OF_YAML = 200_000
# Eight hexadecimal digits for the machine, the number of the process, and digits at random.
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
_MAKER = re.compile(rf"{_HOST}-(\d+)-[0-9a-f]{{8}}")


def looks_like_a_path(name: str) -> bool:
    """Whether the name of a model is a path, which may be wrong, and no name on the Hub.

    A name on the Hub is `user/model`; `runs/de-en` is a path where there is a folder `runs`.
    """
    first, slash, _ = name.partition("/")
    is_in_a_folder = bool(slash) and os.path.isdir(first)
    return is_in_a_folder or name.startswith((".", "/", "~")) or name.count("/") != 1


def check_regular(path: str | os.PathLike[str]) -> None:
    """Rejects pipes and devices, such as `<(zcat file.gz)`, which can be read only once.

    Raises:
        ValueError: If it is neither a file nor a folder.
        OSError: If there is nothing.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(
            f"{os.fspath(path)!r} must be a regular file, which can be read more than once, got "
            "a pipe or a device. Write its lines to a file first."
        )


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """The text of a small file in UTF-8, such as a config or a card.

    Args:
        path: The file.
        errors: Treatment of other bytes, as for `bytes.decode`.

    Raises:
        ValueError: If it has more than 256 MiB or is not UTF-8.
        OSError: If it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES_OF_TEXT + 1)
    if len(content) > _MOST_BYTES_OF_TEXT:
        raise ValueError(f"{os.fspath(path)!r} must have at most {_MOST_BYTES_OF_TEXT:,} bytes.")
    return content.decode("utf-8", errors)


def read_lines(path: str | os.PathLike[str], *, may_be_empty: bool = False) -> Iterator[str]:
    r"""Yields the lines of a plain or compressed UTF-8 file, without their line ends.

    A line ends at `\n` only: a carriage return, a form feed or U+2028 stays inside its line, so
    that both sides of a parallel corpus count the same lines whatever they contain. The last `\n`
    is optional, and a byte order mark at the beginning is dropped.

    Args:
        path: The file: text, gzip, bzip2 or xz, as its first bytes say.
        may_be_empty: Whether a file without lines is allowed.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty, is not UTF-8, is compressed otherwise or damaged, is a
            pipe or a device, or if a line is longer than `LONGEST_LINE`.
    """
    number = 0
    check_regular(path)
    with open(path, "rb") as raw:
        kind = compression_of(raw.read(HEAD))
        raw.seek(0)
        stream = kind.open(raw) if kind and kind.open else raw
        try:
            lines = iter(partial(stream.readline, LONGEST_LINE + 1), b"")
            for text in decode_lines(lines, path):
                yield text
                number += 1
        except (OSError, *DAMAGE) as error:
            # bz2 raises an OSError that has no number for damaged data.
            if kind is None or getattr(error, "errno", None) is not None:
                raise
            raise ValueError(
                f"{os.fspath(path)!r} is a damaged {kind.name} file: {error} (after line "
                f"{number}). Copy or compress it again."
            ) from error
    if number == 0 and not may_be_empty:
        raise ValueError(f"{os.fspath(path)!r} is empty: expected at least one line of text.")


def decode_lines(lines: Iterable[bytes], path: str | os.PathLike[str]) -> Iterator[str]:
    """The text of lines, without their line ends and a byte order mark at the beginning.

    Args:
        lines: With their line ends.
        path: Where the lines come from, as errors name it.

    Raises:
        ValueError: If they are compressed, or are not UTF-8; the message names the bad byte. Or if
            a line is longer than `LONGEST_LINE`.
    """
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"Line {number} of {os.fspath(path)!r} must have at most {LONGEST_LINE:,} bytes, "
                "got more. Put line feeds into it."
            )
        content = line.removesuffix(b"\n")
        if number == 1:
            if kind := compression_of(line):
                raise ValueError(
                    f"{os.fspath(path)!r} must be text, got {kind.name} data. Unpack it first."
                )
            content = content.removeprefix(BYTE_ORDER_MARK)
            # In UTF-16 without a byte order mark, Latin letters have zeros beside them.
            if len(content) > 2 and any(not any(content[start::2]) for start in (0, 1)):
                raise ValueError(
                    f"{os.fspath(path)!r} must be UTF-8, got what looks like UTF-16. Convert the "
                    "file first: iconv -f UTF-16LE (or UTF-16BE) -t UTF-8 old.txt > new.txt"
                )
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            is_utf16 = content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
            raise ValueError(
                f"{os.fspath(path)!r} must be UTF-8, got byte 0x{content[error.start]:02X} at byte "
                f"{error.start + 1} of line {number}. Convert the file first, for example: "
                f"iconv -f {'UTF-16' if is_utf16 else 'WINDOWS-1252'} -t UTF-8 old.txt > new.txt"
            ) from error
        yield text


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: If the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    # Python's parser follows nested brackets by recursion.
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_yaml(text: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """The value of a YAML text.

    Args:
        text: One document.
        loader: Class that decides on the types of values; none of them may run code.

    Raises:
        ValueError: If the text is not YAML, or is longer than 200,000 characters.
    """
    if len(text) > _MOST_CHARACTERS_OF_YAML:
        raise ValueError(f"it has {len(text):,} characters, more than {_MOST_CHARACTERS_OF_YAML:,}")
    try:
        return yaml.load(text, loader)
    # Its constructors raise errors of any class for numbers and dates that do not exist.
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Where to write a file: a reader of `path` sees the old one or all of the new one.

    A file there that is not a regular one, such as a device, is written to and stays.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    with (
        naming_full_disk(path.parent, path.name),
        scratch_file(path.parent, f".{path.name}.") as temporary,
    ):
        yield temporary
        os.replace(temporary, path)


@contextmanager
def opened_whole(paths: Iterable[Path]) -> Iterator[list[TextIO]]:
    r"""Text files to write, each as `written_whole` does; line ends stay `\n`.

    They are put in place together at the end of the block, unless it fails.
    """
    with ExitStack() as stack:
        temporary = [stack.enter_context(written_whole(path)) for path in paths]
        # Closed before they are put in place: the last one entered is the first one left.
        yield [
            stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            for path in temporary
        ]


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    r"""Writes lines, each ending in `\n`, as `written_whole` does."""
    write_together({path: lines})
    return path


def write_together(contents: Mapping[Path, Iterable[str]]) -> None:
    """Writes the lines of several files, and puts the files in place once all are written."""
    with opened_whole(contents) as files:
        for file, lines in zip(files, contents.values(), strict=True):
            file.writelines(f"{line}\n" for line in lines)


@contextmanager
def new_folder(folder: Path, noun: str, check: Callable[[Path], None]) -> Iterator[Path]:
    """Where to make a folder that is put in place, whole, at the end of the block.

    If the block fails, what was there before remains. Weights get the mode of other new files.

    Args:
        folder: The folder; what is there is replaced.
        noun: What it is, such as `export`, for errors.
        check: Raises an error if there is something that may not be replaced. It is called before
            the block, and after it because somebody else may have made the folder meanwhile.

    Raises:
        OSError: If there is no room for the folder.
    """
    _put_back(folder)
    check(folder)
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Fails now rather than after the minutes that the block may take.
            scratch = stack.enter_context(scratch_folder(folder.parent, f".{folder.name}.new-"))
        except OSError as error:
            raise OSError(
                f"The {noun} cannot be written to {str(folder)!r}: {error.strerror}. Choose "
                "another folder."
            ) from error
        stack.enter_context(naming_full_disk(folder.parent, f"the {noun} {folder.name!r}"))
        yield scratch / "new"
        share_weights(scratch / "new")
        check(folder)
        old = scratch / "old"
        if folder.exists():
            folder.rename(old)
        try:
            (scratch / "new").rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise


def _put_back(folder: Path) -> None:
    """Restores a folder whose replacement was killed between its two renames."""
    for old in folder.parent.glob(f".{escape(folder.name)}.new-*/old"):
        if not folder.exists():
            old.rename(folder)
            delete(old.parent)


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that only this user may read; it is deleted at the end.

    Args:
        parent: Where it is made.
        prefix: Beginning of its name. Those of this prefix whose process has ended are deleted.
    """
    with _scratch(parent, prefix) as path:
        path.mkdir(mode=0o700)
        yield path


@contextmanager
def scratch_file(parent: Path, prefix: str) -> Iterator[Path]:
    """A new empty file, as `scratch_folder` makes folders, with the rights of an ordinary file.

    It may be renamed before the end.
    """
    with _scratch(parent, prefix) as path:
        path.touch(exist_ok=False)
        yield path


@contextmanager
def _scratch(parent: Path, prefix: str) -> Iterator[Path]:
    with suppress(OSError):
        for name in os.listdir(parent):
            maker = _MAKER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if maker and not psutil.pid_exists(int(maker[1])):
                delete(parent / name)
    maker_id = os.getpid()
    path = parent / f"{prefix}{_HOST}-{maker_id}-{secrets.token_hex(4)}"
    try:
        yield path
    finally:
        # A forked child leaves it to its parent.
        if os.getpid() == maker_id:
            delete(path)


@contextmanager
def locked(lock: Path, fault: str) -> Iterator[None]:
    """Holds a lock, which ends with the process however that ends.

    Args:
        lock: The lock's own file.
        fault: Error message if another process holds the lock.

    Raises:
        ValueError: If another process holds it.
    """
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                # Deleted while it is held, so that it is never the lock of another process.
                lock.unlink(missing_ok=True)
    except Timeout as error:
        raise ValueError(fault) from error


@contextmanager
def naming_full_disk(folder: Path, purpose: str, hint: str = "Make room there.") -> Iterator[None]:
    """Names the folder that had no room, which system errors do not.

    Args:
        folder: Where something is written.
        purpose: Description of it.
        hint: Advice for users.

    Raises:
        OSError: With the number of the fault, if the disk is full or a quota or limit is reached.
    """
    try:
        yield
    except Exception as error:
        number = _system_number(error)
        # An inner block may have reported it in more detail.
        if number not in _NO_ROOM or isinstance(error, _NoRoomError):
            raise
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(nearest).free / 2**20
        raise _NoRoomError(
            number,
            f"{os.strerror(number)}: no room for {purpose} in {str(folder)!r}, which has "
            f"{free:,.1f} MiB left. {hint}",
        ) from error


class _NoRoomError(OSError):
    """An error that `naming_full_disk` has raised."""


def _system_number(error: BaseException | None) -> int | None:
    """Number of the system's fault behind an error, if there is one."""
    while error:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        if found := _NUMBER_FROM_RUST.search(str(error)):
            return int(found[1])
        error = error.__cause__
    return None


# Environment variable: set but empty, token ids are not kept.
CACHE_VARIABLE = "VANILLA_TRANSFORMER_CACHE"

# XXH3 finds damage as well as SHA-256 in a tenth of the time, but is no proof against forgery.
_DIGESTS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}


def checksum(path: str | os.PathLike[str], kind: str = "sha256") -> str:
    """Digest of a file's bytes, SHA-256 or `xxh3_128`, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, _DIGESTS[kind]).hexdigest()


def checksum_of_all(files: Iterable[Path]) -> str:
    """SHA-256 of the names and checksums of files, in alphabetical order."""
    lines = [f"{file.name} {checksum(file)}\n" for file in sorted(files) if file.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def names_below(folder: Path) -> list[str]:
    """Paths of all files and links in a folder and its folders, relative to it, in order."""
    files = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return sorted(path.relative_to(folder).as_posix() for path in files)


def share_weights(folder: Path) -> None:
    """Gives weights the mode of other new files; safetensors lets only their owner read them."""
    with scratch_file(folder, ".mode-") as usual:
        mode = stat.S_IMODE(usual.stat().st_mode)
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def mark_used(entry: Path) -> None:
    """Keeps an entry of a cache among those that were used last."""
    # In a folder of several users, it may be somebody else's.
    with suppress(OSError):
        os.utime(entry)


def delete_oldest(entries: Iterable[Path], kept: int) -> None:
    """Deletes the entries of a cache that were not used for longest.

    Args:
        entries: Files or folders of the cache.
        kept: Number of entries that stay.
    """
    with suppress(OSError):
        for old in sorted(entries, key=lambda entry: entry.stat().st_mtime, reverse=True)[kept:]:
            delete(old)


def delete(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
