"""`benchmarks/gpu.py`: counts, peaks and shares, what it reports, and all of it on a CPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BatchEncoding

from ..conftest import build_variant
from ..support.documents import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
from gpu import training_flops


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


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA L40S", None)],
)
def test_share_is_of_the_peak_of_the_device(monkeypatch, name, peak):
    monkeypatch.setattr(gpu, "best_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)

    share = gpu.share_of_peak((peak or 1) * 10**12, seconds=4.0)

    assert share == (pytest.approx(25) if peak else None)


def test_what_fails_or_does_not_fit_is_named_and_the_rest_is_measured():
    def too_large():
        raise torch.OutOfMemoryError

    report = gpu.Measurements(None, gpu.SMOKE)

    assert report.attempt("large", too_large) is None
    assert report.status == 0
    assert report.attempt_each([0, 2], "half", lambda number: 1 / number) == {2: 0.5}
    assert report.status == 1
    assert report.notes == [
        "\nLeft out: large: out of memory",
        "\nFailed: half, 0: `ZeroDivisionError: division by zero`",
    ]


def test_only_tests_that_need_a_gpu_see_one(pytestconfig):
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""

    assert is_hidden == (pytestconfig.option.markexpr.strip() != "gpu")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smoke_runs_everything(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--smoke"]

    done = subprocess.run(
        [*command, "--output", tmp_path / "gpu.md"], stdout=subprocess.PIPE, text=True, check=False
    )

    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert done.returncode == 0
    assert text == done.stdout
    assert not {"Failed", "Left out"} & set(text.replace(":", "").split())
    for title in ("Profile of a step", "Training", "Translation"):
        _, _, table = text.partition(f"\n{title}")
        # A header, its line, and at least one row.
        assert table.split("\n\n")[1].count("\n") >= 2, title
