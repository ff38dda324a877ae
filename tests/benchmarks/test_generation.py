"""`benchmarks/generation.py`: contenders that are the same function, and the table."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import psutil
import pytest
import torch
from transformers.generation import GenerationMixin

from vanilla_transformer import VanillaTransformerTokenizer

from ..conftest import source_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "generation.py"
sys.path.insert(0, str(BENCHMARKS))

import generation_contenders  # noqa: E402  (found on the path above)
from generation_contenders import (  # noqa: E402
    CONTENDERS,
    Task,
    model_inputs,
    write_folders,
)
from generation_rounds import (  # noqa: E402
    Result,
    add_rounds,
    cells,
    check_same_outputs,
    read_sources,
    run_once,
    share_of_better,
    warm_up,
)
from memory import measure_alone  # noqa: E402
from neighbours import check_same_logits, copy_into_m2m100  # noqa: E402

END = 2
SOURCES = [
    [17, 5, 9, 30, END],
    [13, END],
    [8, 21, 36, 4, 11, 26, END],
    [6, 33, 19, END],
]
LINES = ["a dog runs", "a man sleeps", "two women are reading a long book", "nobody"]


@pytest.fixture(autouse=True)
def measure_at_once(monkeypatch):
    monkeypatch.setattr(generation_contenders, "SECONDS_TO_SETTLE", 0)


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A saved model with random parameters and a tokenizer of its size."""
    folder = tmp_path / "model"
    tiny_model.save_pretrained(folder)
    letters = "abcdefghijklmnopqrstuvwxyz .,!?-'"
    VanillaTransformerTokenizer.train([letters], vocab_size=37, kind="char").save_pretrained(folder)
    return folder


@pytest.fixture
def contenders(folder, tmp_path):
    names = ["vanilla", "inherited", "m2m100", "marian"]
    folders = write_folders(folder, names, [], tmp_path)
    return {name: CONTENDERS[name](folders[name], "float32") for name in names}


def task(num_beams, is_forced=False):
    return Task([], [SOURCES[:3], SOURCES[3:]], [12, 12], is_forced, num_beams)


def test_m2m100_with_our_weights_gives_our_logits(tiny_model, batch):
    copied = copy_into_m2m100(tiny_model)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    is_real = inputs["decoder_input_ids"] != 0

    ours = tiny_model(**inputs).logits[is_real]
    theirs = copied(**inputs).logits[is_real]

    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
    check_same_logits(tiny_model, copied, source_of(batch))


def test_another_function_is_refused(tiny_model, batch):
    copied = copy_into_m2m100(tiny_model)
    with torch.no_grad():
        copied.model.decoder.embed_positions.weights[3, 0] += 0.1

    with pytest.raises(ValueError, match=r"M2M100.*within 0.0001, got a difference of \d"):
        check_same_logits(tiny_model, copied, source_of(batch))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["inherited", "m2m100"])
def test_contenders_find_our_translations(contenders, name, num_beams):
    _, ours = contenders["vanilla"].run(task(num_beams))
    _, theirs = contenders[name].run(task(num_beams))

    assert theirs == ours
    assert len({len(output) for output in ours}) > 1
    assert any(output[-1] == END for output in ours)
    assert not any(END in output[:-1] for output in ours)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_only_vanilla_searches_by_itself(contenders, monkeypatch, num_beams):
    def refuse(*_, **__):
        raise AssertionError("Transformers' own search runs")

    monkeypatch.setattr(GenerationMixin, "_sample", refuse)
    monkeypatch.setattr(GenerationMixin, "_beam_search", refuse)

    contenders["vanilla"].run(task(num_beams))
    for name in ("inherited", "m2m100", "marian"):
        with pytest.raises(AssertionError, match="own search runs"):
            contenders[name].run(task(num_beams))


def test_beams_rank_by_the_length_penalty_of_the_table(contenders, tiny_model):
    width = 3
    _, outputs = contenders["vanilla"].run(task(width))
    search = {"num_beams": width, "early_stopping": False, "length_penalty": 0.6}
    expected = tiny_model.generate(**model_inputs(SOURCES[:3]), **search, max_new_tokens=12)

    for row, output in zip(expected.tolist(), outputs, strict=False):
        assert row[1 : 1 + len(output)] == output


@pytest.mark.parametrize("num_beams", [1, 3])
def test_forced_outputs_have_the_limit_as_length(contenders, num_beams):
    for contender in contenders.values():
        _, outputs = contender.run(task(num_beams, is_forced=True))

        assert [len(output) for output in outputs] == [12] * 4
        assert not any(END in output for output in outputs)


def test_marian_writes_as_much_as_our_longest_of_each_batch(contenders):
    tasks, results = warm_up(contenders, task(1), where="test")
    add_rounds(contenders, tasks, results, rounds=2, where="test")

    ours = [len(output) for output in results["vanilla"].outputs]
    forced = [len(output) for output in results["marian"].outputs]
    assert forced == [max(ours[:3])] * 3 + ours[3:]
    assert forced != [12] * 4
    assert all(len(result.seconds) == 2 for result in results.values())


def test_settings_of_the_saved_model_have_no_effect(contenders, tiny_model, tmp_path):
    tiny_model.generation_config.update(num_beams=3, length_penalty=-2.0, max_length=3)
    tiny_model.save_pretrained(tmp_path / "other")

    other = CONTENDERS["vanilla"](tmp_path / "other", "float32")

    for num_beams in (1, 3):
        assert other.run(task(num_beams))[1] == contenders["vanilla"].run(task(num_beams))[1]


def test_bfloat16_reaches_the_weights_and_positions_of_m2m100(folder, tmp_path):
    folders = write_folders(folder, ["vanilla", "m2m100"], [], tmp_path)
    ours, theirs = (CONTENDERS[name](folders[name], "bfloat16").model for name in folders)
    inputs = model_inputs(SOURCES)

    logits, others = (
        model(**inputs, decoder_input_ids=inputs["input_ids"]).logits for model in (ours, theirs)
    )

    assert others.dtype == torch.bfloat16
    gap = (logits - others)[inputs["attention_mask"].bool()].abs().mean()
    # 8 bits of mantissa; another position table is ten times as far.
    assert gap < 0.02 * logits.abs().mean()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_ctranslate2_finds_our_translations(tiny_model, folder, tmp_path, num_beams):
    pytest.importorskip("ctranslate2")
    with torch.no_grad():
        # As in a trained model, `<pad>` and `<s>` have no share of the probability; and no output
        # ends, because CTranslate2's beam search would end at the first three.
        tiny_model.model.decoder.layer_norm.weight[0] = 0
        tiny_model.model.decoder.layer_norm.bias[0] = 1
        tiny_model.lm_head.weight[:3, 0] = -50
    tiny_model.save_pretrained(folder)
    names = ["vanilla", "ctranslate2-float32"]
    folders = write_folders(folder, names, LINES, tmp_path)
    ours, theirs = (CONTENDERS[name](folders[name], "float32") for name in names)

    assert theirs.run(task(num_beams))[1] == ours.run(task(num_beams))[1]


def test_automatic_choice_searches_as_our_engine_does(folder, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setenv("VANILLA_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    names = ["vanilla", "search-float32", "auto"]
    folders = write_folders(folder, names, LINES, tmp_path)
    contenders = {name: CONTENDERS[name](folders[name], "float32") for name in names}

    outputs = [contender.run(task(1))[1] for contender in contenders.values()]

    assert outputs[0] == outputs[1] == outputs[2]


def test_automatic_choice_is_compared_with_the_faster_engine():
    seconds = {"vanilla": [4.0], "search-float32": [2.0, 3.0, 9.0], "auto": [6.0], "m2m100": [1.0]}
    results = {name: Result(times, []) for name, times in seconds.items()}

    assert share_of_better(results) == "0.50"


def test_ctranslate2_is_forced_too(folder, tmp_path):
    pytest.importorskip("ctranslate2")
    name = "ctranslate2-float32"
    contender = CONTENDERS[name](write_folders(folder, [name], LINES, tmp_path)[name], "float32")

    lengths = [
        [len(output) for output in contender.run(task(1, is_forced))[1]]
        for is_forced in (False, True)
    ]

    assert min(lengths[0]) < 12
    assert lengths[1] == [12] * 4


def test_sources_are_the_first_column_without_blank_lines(folder, tmp_path):
    test = tmp_path / "test.tsv"
    test.write_text("".join(f"{line}\tunread\n\n" for line in LINES), encoding="utf-8")

    options = Namespace(preset=None, test=test, sentences=3)
    lines, sources = read_sources(options, folder)

    assert lines == LINES[:3]
    assert [len(source) for source in sources] == [len(line) + 1 for line in lines]


def test_random_sources_have_no_special_token_but_the_end(folder):
    lines, sources = read_sources(Namespace(preset="base", sentences=50), folder)

    assert lines == []
    assert {len(source) for source in sources} <= set(range(20, 31))
    assert len({len(source) for source in sources}) > 5
    assert all(source[-1] == END and min(source[:-1]) > 3 for source in sources)


def test_cells_tell_speed_against_m2m100_and_what_is_the_same():
    results = {
        "vanilla": Result([1.0, 4.0, 2.0], [[5, END], [6, 7, END]]),
        "m2m100": Result([8.0, 5.0, 4.0], [[5, END], [6, END]]),
        "marian": Result([2.0], [[9] * 3] * 2),
    }

    assert cells("vanilla", results) == ["1.00", "0.50-2.00", "2", "2.50", "100.0%"]
    assert cells("m2m100", results) == ["0.40", "0.25-0.50", "1", "1.00", "50.0%"]
    # Five tokens of ours in two seconds.
    assert cells("marian", results) == ["1.00", "1.00-1.00", "2", "2.50", "-"]


def test_other_outputs_are_refused_in_float32():
    results = {
        "vanilla": Result([1.0], [[5, END]] * 10),
        "m2m100": Result([1.0], [[5, END]] * 9 + [[6, END]]),
        "ctranslate2-int8": Result([1.0], [[6, END]] * 10),
    }

    with pytest.raises(ValueError, match=r"m2m100 must .* 95% .* got 90.0%"):
        check_same_outputs(results, "float32")
    check_same_outputs(results, "bfloat16")


def run_script(*options, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, options)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_mistakes_are_told_alone(folder, tmp_path):
    lacking = run_script("--model", folder, OMP_NUM_THREADS="1")
    threads = run_script("--preset", "tiny", "--threads", 2, 3, OMP_NUM_THREADS="1")

    assert (lacking.returncode, threads.returncode) == (2, 2)
    assert "--model needs --test" in lacking.stderr
    assert "--threads must be at most OMP_NUM_THREADS, which is 1" in threads.stderr


@pytest.mark.slow
def test_memory_is_that_of_a_fresh_process(folder):
    ballast = torch.ones(500_000_000, dtype=torch.uint8)

    memory = measure_alone(run_once, "vanilla", folder, "float32", 1, task(3))

    # A few megabytes for a tiny model, and none of this process.
    here = psutil.Process().memory_info().rss
    assert len(ballast) > memory.growth > 0
    assert 100e6 + memory.growth < memory.peak < here - 250e6


@pytest.mark.slow
def test_script_prints_a_row_for_each_contender(folder, tmp_path):
    pytest.importorskip("ctranslate2")
    test = tmp_path / "test.txt"
    test.write_text("\n".join(LINES), encoding="utf-8")
    done = run_script(
        *("--model", folder, "--test", test, "--sentences", 4, "--rounds", 1, "--beams", 2),
        *("--batch_sizes", 1, 3, "--threads", 1, 2, "--max_new_tokens", 8, "--no_memory"),
        OMP_NUM_THREADS="1",
    )

    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    headers = [row for row in rows if row[0] == "| search"]
    rows = [row for row in rows if row[0] == "| beam 2"]
    # Two batch sizes; bfloat16 without CTranslate2; Translator has batches of its own.
    assert len(headers) == 2
    assert len(rows) == 2 * (4 + 4) + 1 + 2 * 4
    assert done.stdout.count("- beam 2, batch") == 2
    assert {len(row) for row in rows} == {len(headers[0])} == {10}
    assert all(row[7] == "100.0%" for row in rows if row[2] == "vanilla")
    assert "From the shell to the first translation" in done.stdout


def test_largest_batch_is_the_one_with_most_tokens_and_padding():
    # Nine tokens without padding, and six that fill twelve places.
    batches = [[[7] * 9], [[7] * 4, [7], [7]]]

    largest = Task([], batches, [3, 5], is_forced=False, num_beams=1).largest_batch()

    assert (largest.batches, largest.limits) == ([batches[1]], [5])
