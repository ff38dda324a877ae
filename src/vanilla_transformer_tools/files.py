"""Files: lines in, files that appear whole or not at all, temporary ones, and disks that are full.

A process holds a lock of the kernel (flock) on each temporary file or folder of its own, which ends
with the process however that ends. Whoever makes the next one deletes others next to it that nobody
holds. Where a file system has no such locks, as NFS has none for folders, leftovers stay.

Training locks its folder by `filelock` on a file in it instead (training/checkpoints.py): two runs
must not share a folder on Windows or NFS either, where an unlocked temporary file does no harm.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import xxhash
import yaml

from vanilla_transformer_tools.compression import DAMAGE, HEAD, Compression, compression_of

if sys.platform != "win32":
    import fcntl

# Bytes, unpacked: a few kB can unpack to gigabytes without a line end.
LONGEST_LINE = 2**26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_RANDOM_BYTES = 8
_RANDOM_NAME = re.compile(rf"[0-9a-f]{{{2 * _RANDOM_BYTES}}}")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How libraries written in Rust report a system error.
_NUMBER_FROM_RUST = re.compile(r"\(os error (\d+)\)")
# No file of a model comes near it, and Transformers walks its objects by recursion.
_DEEPEST_JSON = 100
# The largest tokenizer.json in use has 35 MB; parsed, a file takes some ten times its size.
_MOST_BYTES_OF_TEXT = 2**28

# Read in some two seconds; recipes, mappings and the metadata of cards have a hundredth of it.
_MOST_CHARACTERS_OF_YAML = 200_000
# PyYAML looks ahead at each opening bracket.
_DEEPEST_YAML = 20

_KINDS_OF_FILES = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def special_kind(path: str | os.PathLike[str]) -> str | None:
    """Kind of a path that is neither a file nor a folder, such as `a pipe`; None for these two.

    Raises:
        OSError: If there is nothing.
    """
    return _KINDS_OF_FILES.get(stat.S_IFMT(os.stat(path).st_mode))


def looks_like_a_path(name: str) -> bool:
    """Whether the name of a model is a path, which may be wrong, and no name on the Hub.

    `runs/de-en` is a path where there is a folder `runs`.
    """
    first, slash, _ = name.partition("/")
    is_in_a_folder = bool(slash) and os.path.isdir(first)
    return is_in_a_folder or name.startswith((".", "/", "~")) or name.count("/") > 1


def check_regular(path: str | os.PathLike[str]) -> None:
    """Rejects files that may never end, or can be read only once.

    Raises:
        ValueError: If it is a pipe, a device or a socket.
        OSError: If there is nothing.
    """
    if kind := special_kind(path):
        raise ValueError(
            f"{os.fspath(path)!r} must be a regular file, which can be read more than once, got "
            f"{kind}. Write its lines to a file first."
        )


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """The text of a small file in UTF-8, such as a config or a card.

    Args:
        path: The file.
        errors: Treatment of other bytes, as for `bytes.decode`.

    Raises:
        ValueError: If it has more than 256 MiB, is not UTF-8, or is a pipe, a device or a socket.
        OSError: If it cannot be read.
    """
    check_regular(path)
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES_OF_TEXT + 1)
    if len(content) > _MOST_BYTES_OF_TEXT:
        raise ValueError(f"{os.fspath(path)!r} must have at most {_MOST_BYTES_OF_TEXT:,} bytes.")
    return content.decode("utf-8", errors)


def read_lines(
    path: str | os.PathLike[str], max_bytes: int | None = None, *, may_be_empty: bool = False
) -> Iterator[str]:
    r"""Yields the lines of a plain or compressed UTF-8 file, without their line ends.

    A line ends at `\n` only: a carriage return, a form feed or U+2028 stays inside its line, so
    that both sides of a parallel corpus count the same lines whatever they contain. The last `\n`
    is optional, and a byte order mark at the beginning is dropped.

    Args:
        path: The file: text, gzip, bzip2, xz, or a zip archive of one file, as its first bytes say.
        max_bytes: Largest size of its text, unpacked; no more is ever in memory. None: no limit.
        may_be_empty: Whether a file without lines is allowed.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty, is too large, is not UTF-8, is compressed otherwise or
            damaged, is a pipe, a device or a socket, or if a line is longer than `LONGEST_LINE`.
    """
    number = 0
    check_regular(path)
    with open(path, "rb") as raw:
        kind = compression_of(raw.read(HEAD))
        raw.seek(0)
        try:
            lines = _lines_of(_unpacked(raw, kind, path), path, max_bytes)
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


def _unpacked(raw: BinaryIO, kind: Compression | None, path: str | os.PathLike[str]) -> BinaryIO:
    if kind is None or kind.open is None:
        return raw
    try:
        return kind.open(raw)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r} is a {kind.name} file, which {error}.") from error


def _lines_of(
    stream: BinaryIO, path: str | os.PathLike[str], max_bytes: int | None
) -> Iterator[bytes]:
    """The lines of a stream, none of which is read beyond a limit."""
    left = sys.maxsize if max_bytes is None else max_bytes
    while line := stream.readline(min(left, LONGEST_LINE) + 1):
        left -= len(line)
        if left < 0:
            raise ValueError(
                f"{os.fspath(path)!r} must have at most {max_bytes:,} bytes of text, unpacked, got "
                "more. Split the file."
            )
        yield line


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
                    f"{os.fspath(path)!r} must be text, got {kind.name} data. Unpack it first: "
                    f"{kind.unpack} old > new.txt"
                )
            content = content.removeprefix(BYTE_ORDER_MARK)
            # In UTF-16 without a byte order mark, Latin letters have zeros beside them.
            if len(content) > 2 and any(not any(content[start::2]) for start in (0, 1)):
                raise ValueError(
                    f"{os.fspath(path)!r} must be UTF-8, got what looks like UTF-16: every second "
                    "byte of line 1 is 0. Convert the file first: iconv -f UTF-16LE (or UTF-16BE) "
                    "-t UTF-8 old.txt > new.txt"
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
        ValueError: If the text is not JSON, or has more than 100 levels of nesting.
    """
    too_deep = f"it has more than {_DEEPEST_JSON} levels of nesting"
    try:
        value = json.loads(text)
    # Python's parser follows nested brackets by recursion.
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level = [value]
    for _ in range(_DEEPEST_JSON + 1):
        level = [
            child
            for container in level
            if isinstance(container, (dict, list))
            for child in (container.values() if isinstance(container, dict) else container)
        ]
    if level:
        raise ValueError(too_deep)
    return value


def parse_yaml(text: str, loader: type[Any] = yaml.SafeLoader) -> Any:
    """The value of a YAML text, which must write out all repetitions.

    Args:
        text: One document.
        loader: Class that decides on the types of values; none of them may run code.

    Raises:
        ValueError: If the text is not YAML, is longer than 200,000 characters, has more than
            20 levels of nesting, or has aliases (`*`), with which a few lines stand for billions
            of values.
    """
    if len(text) > _MOST_CHARACTERS_OF_YAML:
        raise ValueError(f"it has {len(text):,} characters, more than {_MOST_CHARACTERS_OF_YAML:,}")

    class Loader(loader):
        """Expands nothing."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """The next node."""
            if self.check_event(yaml.AliasEvent):
                alias = self.peek_event()
                line = alias.start_mark.line + 1
                raise ValueError(f"the alias *{alias.anchor} in line {line} must be written out")
            self.depth += 1
            if self.depth > _DEEPEST_YAML:
                raise ValueError(f"it has more than {_DEEPEST_YAML} levels of nesting")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        return yaml.load(text, Loader)
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


# Names the folder of converted models. Set but empty: neither these nor token ids are kept.
CACHE_VARIABLE = "VANILLA_TRANSFORMER_CACHE"


def cache_folder() -> Path | None:
    """Folder for files that this package can make again; None if nothing may be kept."""
    given = os.environ.get(CACHE_VARIABLE)
    if given == "":
        return None
    try:
        if given:
            return Path(given).expanduser()
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        # The user of a container may have no home.
        return None
    return caches / "vanilla_transformer"


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


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that only this user may read; it is deleted at the end.

    Args:
        parent: Where it is made.
        prefix: Beginning of its name. Folders of this prefix that no living process holds are
            deleted first.
    """
    with _scratch(parent, prefix, lambda path: path.mkdir(mode=0o700)) as path:
        yield path


@contextmanager
def scratch_file(parent: Path, prefix: str) -> Iterator[Path]:
    """A new empty file, as `scratch_folder` makes folders, with the rights of an ordinary file.

    It may be renamed before the end. It must be opened for writing, not replaced: the lock is on
    this very file.
    """
    with _scratch(parent, prefix, lambda path: path.touch(exist_ok=False)) as path:
        yield path


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Leftovers of killed processes, one after the other; each is deleted after its turn.

    Args:
        parent: As for `scratch_folder`.
        prefix: As for `scratch_folder`.
    """
    try:
        names = [name for name in os.listdir(parent) if name.startswith(prefix)]
    except OSError:
        return
    for name in names:
        path = parent / name
        if not _RANDOM_NAME.fullmatch(name.removeprefix(prefix)):
            continue
        try:
            held = _lock(path, waits=False)
        except OSError:
            continue
        try:
            if os.fstat(held).st_uid == os.geteuid():
                yield path
                delete(path)
        finally:
            os.close(held)


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


@contextmanager
def _scratch(parent: Path, prefix: str, make: Callable[[Path], None]) -> Iterator[Path]:
    for _ in abandoned(parent, prefix):
        pass
    held = None
    while True:
        path = parent / f"{prefix}{secrets.token_hex(_RANDOM_BYTES)}"
        make(path)
        try:
            held = _lock(path, waits=True)
        except FileNotFoundError:
            # Another process took it for abandoned before it was locked.
            continue
        except OSError:
            # There are no locks here.
            pass
        break
    maker = os.getpid()
    try:
        yield path
    finally:
        # A forked child leaves it to its parent.
        if os.getpid() == maker:
            delete(path)
        if held is not None:
            os.close(held)


def _lock(path: Path, waits: bool) -> int:
    """Opens and locks a file or folder; FileNotFoundError: it is not there, or not any more."""
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, "There is no flock on Windows", str(path))
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        # Who held the lock before may have deleted or renamed it; of a link the target is open.
        if not os.path.samestat(os.fstat(held), os.lstat(path)):
            raise FileNotFoundError(path)
    except BaseException:
        os.close(held)
        raise
    return held


@contextmanager
def new_folder(folder: Path, noun: str, check: Callable[[Path], None]) -> Iterator[Path]:
    """Where to make a folder that is put in place, whole, at the end of the block.

    If the block fails, what was there before remains; so it does if the process is killed, once
    the next one begins. Weights get the mode of other new files.

    Args:
        folder: The folder; what is there is replaced.
        noun: What it is, such as `export`, for errors.
        check: Raises an error if there is something that may not be replaced. It is called before
            the block, and after it because somebody else may have made the folder meanwhile.

    Raises:
        OSError: If there is no room for the folder.
    """
    prefix = f".{folder.name}.new-"
    for killed in abandoned(folder.parent, prefix):
        if not folder.exists():
            _restore(killed, folder)
    check(folder)
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Fails now rather than after the minutes that the block may take.
            scratch = stack.enter_context(scratch_folder(folder.parent, prefix))
        except OSError as error:
            raise OSError(
                f"The {noun} cannot be written to {str(folder)!r}: {error.strerror}. Choose "
                "another folder."
            ) from error
        stack.enter_context(naming_full_disk(folder.parent, f"the {noun} {folder.name!r}"))
        yield scratch / "new"
        share_weights(scratch / "new")
        check(folder)
        try:
            if folder.exists():
                folder.rename(scratch / "old")
            (scratch / "new").rename(folder)
        except BaseException:
            _restore(scratch, folder)
            raise


def _restore(scratch: Path, folder: Path) -> None:
    """Restores the folder that was to be replaced; its replacement is lost."""
    if (scratch / "old").exists():
        (scratch / "old").rename(folder)


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
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
