"""Releases of Transformers that this package supports, and what is said of others.

The range here is that of the tests; `pyproject.toml` allows newer releases, which usually work.
What the package needs of Transformers beyond documented names is looked for when it is imported. So
a release without one of them ends with one message, and computes nothing wrong.
"""

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization

# The oldest and the newest release of Transformers that the tests run with.
TESTED = OLDEST, NEWEST = "5.17", "5.24"
# Without these, weights, outputs or text would be others than they should be.
NEEDED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (PreTrainedConfig, ("_attn_implementation",)),
    (PreTrainedModel, ("_can_record_outputs", "_init_weights", "_tied_weights_keys")),
    (initialization, ("copy_", "zeros_")),
    (
        nn.Module(),
        ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
    ),
)


def check(*kinds: type) -> None:
    """Looks for what these classes of ours, which replace methods of Transformers, need.

    Raises:
        ImportError: If the installed release has another name for it.
    """
    missing = [f"`{name}`" for owner, names in NEEDED for name in names if not hasattr(owner, name)]
    if missing := [*missing, *_renamed_arguments(kinds)]:
        raise unsupported(f"it lacks {', '.join(missing)}")


def unsupported(reason: object) -> ImportError:
    """The error for a release that the package cannot run with."""
    return ImportError(
        f"vanilla_transformer supports Transformers {OLDEST} to {NEWEST}, got "
        f"{transformers.__version__}: {reason}. Install a supported release, as in "
        f"`pip install 'transformers=={NEWEST}.*'`, or update vanilla-transformer."
    )


def _renamed_arguments(kinds: tuple[type, ...]) -> Iterator[str]:
    """Arguments of methods of Transformers that ours, which replace them, do not take."""
    bases = dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in kinds))
    for kind in filter(_is_ours, bases):
        for name, method in vars(kind).items():
            replaced = getattr(super(kind, kind), name, None)
            if name.startswith("__") or not inspect.isfunction(method) or replaced is None:
                continue
            own, theirs = (inspect.signature(each).parameters for each in (method, replaced))
            if all(each.kind is not each.VAR_KEYWORD for each in own.values()):
                gone = [argument for argument in theirs if argument not in own]
                yield from (f"`{name}({argument}=)`" for argument in gone)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(f"{__package__}.")
