"""What the commands write, and what becomes of it when something goes wrong."""

from vanilla_transformer_tools.translation import translator
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..support.full_disk import small_files

LINES = ["ein hund rennt", "ja", "der alte mann", "x"]
BEFORE = "".join(f"{line}\n" for line in LINES)


# A disk that is full


def test_full_disk_leaves_whole_lines_and_a_job_to_continue(run, folder, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(BEFORE * 30)
    argv = ["translate", "--model", folder, "--input", source, "--prefix", 9 * "eine lange zeile "]
    argv += ["--max_extra_tokens", 0]
    whole = run(*argv)[1].encode()

    with small_files(5050):
        status, _, err = run(*argv, "--output", out)

    assert status == 2
    assert err.count("vanilla-transformer:") == 1
    assert f"'{out}' can no longer be written: File too large. Its lines are complete" in err
    content = out.read_bytes()
    assert content
    assert content.endswith(b"\n")
    assert whole.startswith(content)
    assert run(*argv, "--output", out, "--resume")[0] == 0
    assert out.read_bytes() == whole


# Lines that are done before something goes wrong


def test_good_lines_of_standard_input_are_written_before_the_error(run, folder, monkeypatch):
    monkeypatch.setattr(translator, "WINDOW_LINES", 3)
    argv = ["translate", "--model", folder, "--max_extra_tokens", 3]
    expected = run(*argv, stdin=BEFORE.encode())[1]

    for good in (BEFORE, BEFORE * 2):
        status, out, err = run(*argv, stdin=good.encode() + b"a\xff\nja\n")

        assert (status, out) == (2, expected * (len(good) // len(BEFORE)))
        assert f"got byte 0xFF at byte 2 of line {good.count(chr(10)) + 1}." in err
        assert err.count("vanilla-transformer:") == 1


def test_lines_that_are_finished_are_written_before_the_error_of_an_engine(
    run, folder, monkeypatch
):
    monkeypatch.setattr(translator, "WINDOW_LINES", 4)
    argv = ["translate", "--model", folder, "--max_extra_tokens", 3, "--max_tokens_per_batch", 1]
    # Sorted by length, so that these are done in the order of their numbers but for the last.
    lines = ["ja", "nein", "x", "ja", "ein hund rennt im wald", "ein hund rennt", "", "ja", "wo"]
    expected = run(*argv, *lines)[1].split("\n")
    original = TorchEngine.translate_batch

    def translate_batch(self, sources, prefixes, limits, search):
        if len(sources[0]) <= 3:
            raise RuntimeError("CUDA error: out of memory")
        return original(self, sources, prefixes, limits, search)

    monkeypatch.setattr(TorchEngine, "translate_batch", translate_batch)
    status, out, err = run(*argv, *lines[4:])

    assert (status, out.split("\n")) == (2, [*expected[4:7], ""])
    assert "there is not enough memory" in err
    assert "CUDA error: out of memory" in err
