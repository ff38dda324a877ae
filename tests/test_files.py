"""Lines and checksums, files that appear whole, temporary ones, and full disks."""

import bz2
import errno
import gzip
import lzma
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vanilla_transformer_tools import files
from vanilla_transformer_tools.files import (
    locked,
    naming_full_disk,
    parse_yaml,
    read_lines,
    scratch_folder,
    share_weights,
    write_lines,
)

from .support.full_disk import small_files

# The package itself would be imported for seconds.
PREAMBLE = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(files.__file__).parent)!r})
import files
parent = Path(sys.argv[1])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""
HELD = """
with files.scratch_folder(parent, "of-") as folder:
    (folder / "inside").mkdir()
    (folder / "inside" / "file").write_text("content")
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that runs some code; what still runs at the end is killed."""
    started = []

    def start_process(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREAMBLE + code, str(tmp_path)]
        process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start_process
    for process in started:
        process.kill()
        process.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Lines and checksums


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # What ends a line elsewhere is text.
        ("a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h\r\n\n two \n", None),
        ("one\ntwo", ["one", "two"]),
        # A byte order mark is dropped at the beginning only.
        ("\ufeffone\n\ufefftwo\n", ["one", "\ufefftwo"]),
        # Zeros do not make UTF-16 of a text.
        ("a\0b\0\0c\n\0a\0b\n\0\n\n", None),
    ],
)
def test_read_lines_ends_a_line_at_newline_only(tmp_path, text, lines):
    path = tmp_path / "lines.txt"
    path.touch()
    assert list(read_lines(path, may_be_empty=True)) == []

    for compress in (bytes, gzip.compress, bz2.compress, lzma.compress):
        path.write_bytes(compress(text.encode()))
        assert list(read_lines(path)) == (lines or text.split("\n")[:-1])


# Without the time, which would change the name of a test.
GZIPPED = gzip.compress("\n".join(map(str, range(1000))).encode(), mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("gut\nschläft\n".encode("latin-1"), "byte 0xE4 at byte 5 of line 2.*iconv"),
        ("Zwölf\n".encode("utf-16"), "must be UTF-8, got .* iconv -f UTF-16"),
        ("Zwei\n".encode("utf-16-le"), "got what looks like UTF-16"),
        ("Zwei\n".encode("utf-16-be"), "got what looks like UTF-16"),
        (b"", "is empty"),
        (GZIPPED[:-12], "damaged: .*after line 998"),
        (bz2.compress(b"x" * 99)[:20] + bytes(30), "damaged: .*after line 0"),
    ],
)
def test_read_lines_refuses_what_is_no_text(tmp_path, content, message):
    path = tmp_path / "text.txt"
    path.write_bytes(content)

    with pytest.raises(ValueError, match=rf"'{path}' .*{message}"):
        list(read_lines(path))


def test_no_more_than_a_limit_is_ever_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "text.gz"
    path.write_bytes(gzip.compress(b"a" * 999 + b"\n" + bytes(2**26)))
    tracemalloc.start()
    try:
        monkeypatch.setattr(files, "LONGEST_LINE", 1000)
        lines = read_lines(path)
        assert next(lines) == "a" * 999
        with pytest.raises(ValueError, match="must have at most 1,000 bytes"):
            next(lines)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 2**21


# Temporary files


def test_weights_get_the_mode_of_other_files(tmp_path):
    (tmp_path / "adapter").mkdir()
    weights = [tmp_path / name for name in ("model.safetensors", "adapter/model.safetensors")]
    for file in weights:
        file.touch(mode=0o600)
    before = os.umask(0o027)
    try:
        share_weights(tmp_path)
    finally:
        os.umask(before)

    assert [file.stat().st_mode & 0o777 for file in weights] == [0o640, 0o640]
    assert len(list(tmp_path.iterdir())) == 2


def test_scratch_is_private_and_what_a_killed_process_left_is_deleted_by_the_next(tmp_path, start):
    for prefix in ("of-", "of-", "other-"):
        killed = start(HELD.replace("of-", prefix) + "    die()")
        assert killed.wait() == -signal.SIGKILL
    assert len(names(tmp_path)) == 2  # the second has deleted what the first one left

    with scratch_folder(tmp_path, "of-") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (other,) = set(names(tmp_path)) - {path.name}

    assert names(tmp_path) == [other]
    assert other.startswith("other-")


def test_scratch_of_a_living_process_stays(tmp_path, start):
    code = """
    child = os.fork()
    if child:
        # A child that ends leaves the folder to its maker.
        os.waitpid(child, 0)
        print(folder, flush=True)
        sys.stdin.read()
    """
    process = start(HELD + code)
    held = Path(process.stdout.readline().strip())

    with scratch_folder(tmp_path, "of-"):
        assert (held / "inside" / "file").read_text() == "content"

    process.communicate()
    assert names(tmp_path) == []


def test_what_people_named_alike_and_other_machines_made_stays(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    with scratch_folder(tmp_path, "of-") as path:
        ours = path.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    _, host, *_ = ours.split("-")
    people = ["of-", "of-mine", f"{ours}0", f"{ours}.txt", ours.upper(), ours.removeprefix("of-")]
    people.append(ours.replace(host, "0" * 8))
    for name in people:
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ours).symlink_to(tmp_path / "elsewhere")

    with scratch_folder(tmp_path, "of-"):
        pass

    assert names(tmp_path) == sorted([*before, "elsewhere"])


def test_second_holder_of_a_lock_is_refused_until_the_first_is_killed(tmp_path, start):
    process = start("""
with files.locked(parent / "lock", ""):
    print("held", flush=True)
    sys.stdin.read()
""")
    process.stdout.readline()

    with pytest.raises(ValueError, match="in use"), locked(tmp_path / "lock", "in use"):
        pass
    process.kill()
    process.wait()
    with locked(tmp_path / "lock", "in use"):
        pass

    assert names(tmp_path) == []


# Full disks


def test_full_disk_is_told_with_its_folder_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_lines(path, ["old"])

    with small_files(10_000), pytest.raises(OSError, match=f"file.txt in '{tmp_path}'.* MiB left"):
        write_lines(path, ["x" * 99] * 200)

    assert path.read_text() == "old\n"
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_every_kind_of_full_disk_keeps_its_number(tmp_path, number):
    inner = OSError(number, "full")

    with (
        pytest.raises(OSError, match=r"no room for a thing in '.*nowhere', .* Buy one\.$") as told,
        naming_full_disk(tmp_path / "nowhere", "a thing", "Buy one."),
    ):
        raise RuntimeError("of a library") from inner

    assert told.value.errno == number
    assert os.strerror(number) in str(told.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: 2026-99-99", "month must be in 1..12"),
        ("a: !!python/object/apply:os.getpid []", "could not determine a constructor"),
    ],
)
def test_yaml_that_is_damaged_or_runs_code_is_refused(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse_yaml(text)


def test_pipe_is_refused_because_it_can_be_read_only_once():
    reading, writing = os.pipe()
    os.close(writing)

    with pytest.raises(ValueError, match=r"must be a file, .* got a pipe"):
        list(read_lines(f"/dev/fd/{reading}"))
    os.close(reading)
