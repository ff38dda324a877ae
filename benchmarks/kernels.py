"""How the time of a call divides among kinds of operations, by torch's profiler."""

import re
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from lab import Report, seconds_of, wait_for_gpu

# The first pattern that a name contains decides; GPU kernels first, then operations of a CPU.
KINDS = (
    ("optimizer", r"adam|multi_tensor_apply|_foreach"),
    ("attention", r"flash|fmha|sdpa|attention|softmax_warp"),
    ("products", r"gemm|gemv|cutlass|sm\d+_x|cublas|nvjet|\bmm\b|addmm|bmm|matmul|linear"),
    ("loss", r"softmax|nll|cross_entropy|logsumexp"),
    ("norms", r"layer_?norm|GammaBeta"),
    ("copies and casts", r"copy|memcpy|memset|fill|zero_|cat\b|CatArray|clone"),
    ("gathers and scatters", r"index|embedding|gather|scatter|sort|select"),
    ("pointwise and sums", r""),
)


def kind_of(name: str) -> str:
    """The kind of a kernel or an operation."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def shares(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of each kind in a call, and those in which the device waits for work, `gaps`.

    On a GPU the seconds are those of its kernels; on a CPU those of operations without the ones
    that they call. The gaps are what these leave of the time of a call without the profiler, so
    that its own cost is not in them.
    """
    work()
    total = seconds_of(work)
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        work()
        wait_for_gpu()
    found: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        micro = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # Calls of the driver, and marks of the profiler, are no work.
        if micro and not re.match(r"cuda[A-Z]|cuda::|ProfilerStep", event.key):
            found[kind_of(event.key)] += micro / 1e6
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    return ordered | {"gaps": max(0.0, total - sum(found.values())), "all": total}


def profile_table(report: Report, note: str, work: Callable[[], object]) -> None:
    """Adds a table of the kinds of operations of a call."""
    found = shares(work)
    report.table(f"Profile of {note}", "operations", "ms", "share, %")
    for kind, seconds in found.items():
        report.row(kind, f"{1000 * seconds:.3g}", f"{100 * seconds / found['all']:.1f}")
