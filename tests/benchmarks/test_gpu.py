"""`benchmarks/gpu.py`: counts, peaks and shares, what its reports state, and all of it on a CPU."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode
from transformers import BatchEncoding, M2M100Config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_generation
import gpu_loss
import gpu_recipe
import gpu_training
from generation_rounds import Result
from gpu_loss import COMPILED, TERMS, UNFUSED, Problem
from gpu_report import Report, bf16_peak, shown
from gpu_tests import decoding_steps, kinds, read_outcomes, training_steps
from gpu_training import share_of_peak, speeds, training_flops, wmt_like_batches
from neighbours import tokens_of
from vanilla_transformer import loss_vanilla_transformer
from vanilla_transformer_tools.training.batch_size import estimated_memory

from ..conftest import build_variant
from ..support.documents import ROOT


@pytest.fixture
def report(tmp_path):
    return Report("loss", tmp_path, minutes=1)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("Tesla T4", None),
    ],
)
def test_peak_is_that_of_the_named_device(name, peak):
    assert bf16_peak(name) == peak


def test_flops_are_those_that_torch_counts():
    model = build_variant()
    # On a CPU its counter knows no fused attention.
    model.set_attn_implementation("eager")
    ids = torch.full((2, 7), 5)
    batch = BatchEncoding(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, :5]}
    )

    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, decoder_input_ids=ids[:, :5], use_cache=False)

    assert training_flops(model.config, [batch]) == 3 * counter.get_total_flops()


def test_flops_leave_padding_out():
    config = build_variant().config
    labels = torch.tensor([[8, 2]])
    ids = torch.tensor([[5, 6, 2]])
    plain = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    padded = {
        name: torch.nn.functional.pad(tensor, (0, 3), value=-100 if name == "labels" else 0)
        for name, tensor in plain.items()
    }

    assert training_flops(config, [BatchEncoding(padded)]) == training_flops(
        config, [BatchEncoding(plain)]
    )


def test_share_is_of_the_peak_of_the_device(monkeypatch):
    monkeypatch.setattr(gpu_training, "best_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")

    assert share_of_peak(312 * 10**12, seconds=4.0) == pytest.approx(25)


def test_batches_are_as_long_as_those_of_wmt_and_as_large_as_asked():
    sizes = gpu_training.Sizes(("tiny",), (), 100, 5000, batches=60, rounds=1, compiler="eager")

    cut = wmt_like_batches(sizes)

    assert len(cut) == 60
    for batch in cut:
        assert 0.8 * 5000 < batch["input_ids"].numel() + batch["labels"].numel() <= 5000
    pairs = sum(len(batch["labels"]) for batch in cut)
    assert 2 * 25 < tokens_of(cut) / pairs < 2 * 33


def test_speeds_are_tokens_a_second_and_milliseconds_an_update():
    ids = torch.tensor([[5, 6, 2]])
    batch = BatchEncoding({"attention_mask": torch.ones_like(ids), "labels": ids})

    assert speeds([batch, batch], [4.0, 1.0, 2.0]) == (6.0, 3.0, 12.0, 1000.0)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("rows", [4, UNFUSED])
def test_loss_in_float32_is_near_float64(terms, rows):
    problem = Problem("float32", terms, width=8, vocabulary=31, targets=18)

    found = problem.solve(*problem.tensors(), rows)
    exact = problem.solve_exactly()

    assert exact[2].dtype == torch.float64
    assert max(map(gpu_loss.error, found, exact)) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_loss_in_half_precision_is_as_large_as_in_float64(dtype):
    problem = Problem(dtype, TERMS["plain"], width=8, vocabulary=31, targets=18)

    found = problem.solve(*problem.tensors(), 4)

    # Eight bits.
    assert max(map(gpu_loss.error, found, problem.solve_exactly())) < 0.02


# Torch's compiler imports torch's own deprecated modules.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_sweep_compiles_the_loss():
    torch.compiler.reset()
    graphs = CompileCounter()
    problem = Problem("float32", TERMS["plain"], 8, 31, 18, compiler=graphs)

    plain, compiled = (problem.solve(*problem.tensors(), rows) for rows in (4, COMPILED))

    assert graphs.frame_count == 1
    torch.testing.assert_close(compiled, plain)


def test_batch_takes_the_memory_that_train_expects():
    model = build_variant()
    few, many = (gpu_training.expected_megabytes(model, tokens) for tokens in (1000, 3000))

    memory = estimated_memory(model, torch.device(gpu_training.best_device()), is_half=True)
    assert many - few == pytest.approx(2000 * memory.per_token / 1e6)
    assert gpu_training.expected_megabytes(Namespace(config=M2M100Config()), 1000) is None


def test_sweep_sets_the_rows_of_a_chunk(monkeypatch):
    default = loss_vanilla_transformer.chunk_rows
    seen = []
    compute = loss_vanilla_transformer._loss_and_gradient

    def watch(logits, *others):
        seen.append(len(logits))
        return compute(logits, *others)

    monkeypatch.setattr(loss_vanilla_transformer, "_loss_and_gradient", watch)
    problem = Problem("float32", TERMS["plain"], width=8, vocabulary=31, targets=10)

    problem.solve(*problem.tensors(), 4)

    assert seen == [4, 4, 2]
    assert loss_vanilla_transformer.chunk_rows is default


def test_error_is_relative_to_the_exact_value():
    assert gpu_loss.error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 8.0]).double()) == (
        pytest.approx(4 / 73**0.5)
    )


def test_waits_are_counted_by_step_and_by_token():
    count, _, found = training_steps()["training, padding"]()
    # A look at the device in every eighth step.
    per_token, _, found_per_token = decoding_steps()["greedy, our search"]()

    assert (count, found) == (3, "2 x _local_scalar_dense, 1 x nonzero")
    assert (per_token, found_per_token) == (0.125, "0.125 x _to_copy from the device")


def test_operations_are_named_with_their_share_of_a_step():
    assert kinds(["a", "b", "a"], 2) == "1 x a, 0.5 x b"
    assert kinds([], 2) == "none"


def test_outcomes_of_tests_are_read_from_pytests_report():
    xml = """<testsuites><testsuite>
        <testcase name="a" time="0.5"/>
        <testcase name="b" time="1.0"><failure message="no"/></testcase>
        <testcase name="c" time="0.0"><skipped message="no GPU"/></testcase>
        <testcase name="d" time="2.0"><error message="no fixture"/></testcase>
    </testsuite></testsuites>"""

    assert read_outcomes(xml) == [
        ("a", "passed", 0.5),
        ("b", "failed", 1.0),
        ("c", "skipped", 0.0),
        ("d", "failed", 2.0),
    ]


def test_speed_up_of_a_search_is_the_time_of_the_reference_by_its_own():
    reference = Result([4.0, 8.0, 6.0], [])
    task = Namespace(limits=[32, 32])

    found = gpu_generation.speeds_of(Result([2.0], [[5] * 32] * 4), reference, task)

    assert found == [2.0, 64.0, pytest.approx(2000 / 64), 3.0]


def test_other_losses_under_fsdp_are_refused():
    gpu_recipe.check_same(5.0, 5.2)
    with pytest.raises(ValueError, match=r"(?s)5%.*got 6 and 5"):
        gpu_recipe.check_same(5.0, 6.0)
    with pytest.raises(ValueError, match="got 4 and 5"):
        gpu_recipe.check_same(5.0, 4.0)


def test_report_states_failures_and_goes_on(report, tmp_path):
    table = report.table("Title", "model", "MB")

    assert report.attempt("first", lambda: 1 / 0) is None
    report.add(table, "second", report.attempt("second", lambda: 12_345.6))

    facts = json.loads((tmp_path / "loss.json").read_text(encoding="utf-8"))
    assert facts["failures"] == {"first": "ZeroDivisionError: division by zero"}
    assert facts["tables"][0]["rows"] == [["second", 12_345.6]]
    text = (tmp_path / "loss.md").read_text(encoding="utf-8")
    assert "- first: `ZeroDivisionError: division by zero`" in text
    assert "## Title\n\n| model | MB |\n| --- | --- |\n| second | 12,346 |\n" in text


def test_report_leaves_out_what_does_not_fit(report):
    def too_large():
        raise torch.OutOfMemoryError

    report.attempt("large", too_large)
    report.started -= 58
    assert report.attempt("in time", lambda: 5) == 5
    report.started -= 2
    report.attempt("late", lambda: pytest.fail("began after the end"))

    assert report.left_out == {"large": "out of memory", "late": "1 minutes are over"}
    assert not report.failures


def test_cells_are_short_and_none_is_a_dash():
    assert [shown(value) for value in (None, 12_345, 0.00123456, 99.96, "a", 1e-7)] == [
        *("-", "12,345", "0.00123", "100", "a", "1e-07")
    ]


def test_status_is_1_when_a_command_fails_and_the_others_run(monkeypatch, tmp_path, capsys):
    modules = {"loss": lambda *_: 1 / 0, "training": lambda report, _: report.table("T", "a")}
    for name, run in modules.items():
        monkeypatch.setitem(sys.modules, f"gpu_{name}", Namespace(NOTE="", run=run))
    options = ["gpu.py", "loss", "training", "--smoke", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", options)

    assert gpu.main() == 1

    assert "ZeroDivisionError" in (tmp_path / "loss.md").read_text(encoding="utf-8")
    assert "## T" in (tmp_path / "training.md").read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_full_sizes_need_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "loss", "--output", str(tmp_path / "results")])

    assert gpu.main() == 2

    assert "`--smoke`" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_only_tests_that_need_a_gpu_see_one(pytestconfig):
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""

    assert is_hidden == (pytestconfig.option.markexpr.strip() != "gpu")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smoke_runs_everything(tmp_path):
    options = ["all", "--smoke", "--output", tmp_path]

    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", *options],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert done.returncode == 0
    for command in gpu.COMMANDS:
        facts = json.loads((tmp_path / f"{command}.json").read_text(encoding="utf-8"))
        assert not facts["failures"]
        assert not facts["left_out"]
        assert all(table["rows"] for table in facts["tables"])
        assert (tmp_path / f"{command}.md").read_text(encoding="utf-8") in done.stdout
