"""Files: lines in, files and folders that appear whole or not at all, and disks that are full."""

import errno
import hashlib
import os
import platform
import re
import shutil
import tempfile
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml
from filelock import FileLock, Timeout

from vanilla_transformer_tools.compression import DAMAGE, HEAD, compression_of

# Bytes, unpacked: a few kB can unpack to gigabytes without a line end.
LONGEST_LINE = 2**26

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How libraries written in Rust report a system error.
_NUMBER_FROM_RUST = re.compile(r"\(os error (\d+)\)")
# Eight hexadecimal digits for the machine.
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"


def looks_like_a_path(name: str) -> bool:
    """Whether the name of a model is a path, which may be wrong, and no name on the Hub.

    A name on the Hub is `user/model`; `runs/de-en` is a path where there is a folder `runs`.
    """
    first, slash, _ = name.partition("/")
    is_in_a_folder = bool(slash) and os.path.isdir(first)
    return is_in_a_folder or name.startswith((".", "/", "~")) or name.count("/") != 1


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
        ValueError: If the file is empty, is not UTF-8, is damaged or a pipe, or if a line is longer
            than `LONGEST_LINE`.
    """
    number = 0
    with open(path, "rb") as raw:
        if not raw.seekable():
            raise ValueError(
                f"{os.fspath(path)!r} must be a file, which can be read more than once, got a "
                "pipe. Write its lines to a file first."
            )
        unpack = compression_of(raw.read(HEAD))
        raw.seek(0)
        stream = unpack(raw) if unpack else raw
        try:
            lines = iter(partial(stream.readline, LONGEST_LINE + 1), b"")
            for text in decode_lines(lines, path):
                yield text
                number += 1
        except (OSError, *DAMAGE) as error:
            # Damaged data gives an OSError without a number, or an error of the decompressor.
            if getattr(error, "errno", None) is not None:
                raise
            raise ValueError(
                f"{os.fspath(path)!r} is damaged: {error} (after line {number}). Copy or compress "
                "it again."
            ) from error
    if number == 0 and not may_be_empty:
        raise ValueError(f"{os.fspath(path)!r} is empty: expected at least one line of text.")


def decode_lines(lines: Iterable[bytes], path: str | os.PathLike[str]) -> Iterator[str]:
    """The text of lines, without their line ends and a byte order mark at the beginning.

    Raises:
        ValueError: If they are not UTF-8; the message names the bad byte. Or if a line is longer
            than `LONGEST_LINE`.
    """
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f"Line {number} of {os.fspath(path)!r} must have at most {LONGEST_LINE:,} bytes, "
                "got more. Put line feeds into it."
            )
        content = line.removesuffix(b"\n")
        if number == 1:
            content = content.removeprefix(BOM_UTF8)
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
                f"{error.start + 1} of line {number}. If it is text, convert it first: "
                f"iconv -f {'UTF-16' if is_utf16 else 'WINDOWS-1252'} -t UTF-8 old.txt > new.txt"
            ) from error
        yield text


def parse_yaml(text: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """The value of a YAML text; the loader decides on the types of values, and runs no code.

    Raises:
        ValueError: If the text is not YAML.
    """
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
        scratch_folder(path.parent, f".{path.name}.") as scratch,
    ):
        yield scratch / path.name
        os.replace(scratch / path.name, path)


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    r"""Writes lines, each ending in `\n`, as `written_whole` does."""
    with (
        written_whole(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as file,
    ):
        file.writelines(f"{line}\n" for line in lines)
    return path


@contextmanager
def new_folder(folder: Path, noun: str) -> Iterator[Path]:
    """Where to make a folder that appears, whole, at the end of the block.

    Weights get the mode of other new files. Errors call the folder by a noun, such as `export`.

    Raises:
        FileExistsError: If there is something at `folder`, before the block or after it.
        OSError: If there is no room for the folder.
    """
    _check_absent(folder)
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
        _check_absent(folder)
        (scratch / "new").rename(folder)


def _check_absent(folder: Path) -> None:
    if folder.exists():
        raise FileExistsError(
            f"{str(folder)!r} must not exist yet. Give another folder, or delete that one."
        )


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that only this user may read; it is deleted at the end.

    Its name holds the machine and the process that made it. Those of the same prefix and machine,
    whose process has ended, are deleted.
    """
    made = re.compile(rf"{re.escape(prefix)}{_HOST}-(\d+)-\w{{8}}")
    with suppress(OSError):
        for name in os.listdir(parent):
            maker = made.fullmatch(name)
            if maker and not psutil.pid_exists(int(maker[1])):
                delete(parent / name)
    maker_id = os.getpid()
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}{_HOST}-{maker_id}-", dir=parent))
    try:
        yield path
    finally:
        # A forked child leaves it to its parent.
        if os.getpid() == maker_id:
            delete(path)


@contextmanager
def locked(lock: Path, fault: str) -> Iterator[None]:
    """Holds a lock, which ends with the process however that ends.

    Raises:
        ValueError: If another process holds it; the message is `fault`.
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
    """Names the folder that had no room, and what for, which system errors do not.

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


def checksum(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum_of_all(files: Iterable[Path]) -> str:
    """SHA-256 of the names and checksums of files, in alphabetical order."""
    lines = [f"{file.name} {checksum(file)}\n" for file in sorted(files) if file.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def share_weights(folder: Path) -> None:
    """Gives weights the mode of other new files; safetensors lets only their owner read them."""
    os.umask(mask := os.umask(0))
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def delete(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
