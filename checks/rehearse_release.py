#!/usr/bin/env python
"""Tomorrow's release of Transformers, rehearsed: what happens when a name that we touch is gone.

For each private or undocumented name in `foreign_names.py`, and each keyword by which the plug-in
calls such a function or is called by Transformers, a copy of the plug-in writes another name. To
that copy it is as if Transformers had renamed it. In a process of its own, the copy loads a saved
folder, computes a loss with its gradients, translates by greedy and beam search, saves the model,
and makes a new one. Each change must either leave all results as they are, or end with one error
that names the supported releases.

Example:
  python checks/rehearse_release.py
"""

import argparse
import ast
import importlib
import io
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from compare_releases import agree
from foreign_names import Source, door, dotted, read, touched_names

PACKAGE = "vanilla_transformer"
SAVED = Path(__file__).parents[1] / "tests/plugin/saved_before"
TOMORROW = "_of_tomorrow"
# What the error must name.
RANGE = re.compile(r"Transformers [\d.]+ to [\d.]+")
MODES = ("loss", "greedy", "beams", "Transformers' search")
# The arguments of these are the user's.
OF_USERS = ("forward", "generate")


class Change(NamedTuple):
    """What is renamed: a name everywhere, or at given places (line, column) of one file."""

    title: str
    name: str
    places: tuple[tuple[str, int, int], ...] = ()


def main() -> None:
    """Prints a table, and fails if a change has another effect than it may have."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print("| without | effect |\n| --- | --- |")
    bad = 0
    for change, effect in rehearsed(changes()):
        bad += not is_allowed(effect)
        print(f"| `{change.title}` | {effect} |", flush=True)
    sys.exit(bad > 0)


def is_allowed(effect: str) -> bool:
    """Whether a change has no effect, or ends with one error that names the releases."""
    return effect == "works" or RANGE.search(effect) is not None


def changes() -> list[Change]:
    """All that is rehearsed."""
    names = {
        touched.name: Change(touched.name, touched.name.rpartition(".")[2])
        for touched in touched_names(PACKAGE)
        if touched.door != "public"
    }
    keywords: dict[str, list[tuple[str, int, int]]] = {}
    for source in read(PACKAGE):
        for title, *place in [*called_keywords(source), *own_parameters(source)]:
            keywords.setdefault(title, []).append(tuple(place))
    return [
        *names.values(),
        *(
            Change(title, title.rpartition("(")[2].rstrip("=)"), tuple(places))
            for title, places in keywords.items()
        ),
    ]


def called_keywords(source: Source) -> Iterator[tuple[str, str, int, int]]:
    """Keywords in calls of functions that are private or undocumented."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = None
        if isinstance(node.func, ast.Name):
            name = source.imports.get(node.func.id)
        elif isinstance(node.func, ast.Attribute):
            name = dotted(node.func, source)
        if (
            name
            and name.startswith(("transformers.", "huggingface_hub."))
            and door(name) != "public"
        ):
            for keyword in node.keywords:
                if keyword.arg:
                    title = f"{name}({keyword.arg}=)"
                    yield title, source.module, keyword.lineno, keyword.col_offset


def own_parameters(source: Source) -> Iterator[tuple[str, str, int, int]]:
    """Parameters, and their uses, of methods that Transformers calls."""
    methods = {
        touched.name.rpartition(".")[2]: touched.name
        for touched, modules in touched_names(PACKAGE).items()
        if (touched.how, touched.library) == ("overridden", "transformers")
        and source.module in modules
    }
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef) or node.name not in methods.keys() - set(OF_USERS):
            continue
        arguments = node.args
        for argument in [*arguments.args, *arguments.kwonlyargs]:
            if argument.arg in ("self", "cls"):
                continue
            title = f"{methods[node.name]}({argument.arg}=)"
            yield title, source.module, argument.lineno, argument.col_offset
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and inner.id == argument.arg:
                    yield title, source.module, inner.lineno, inner.col_offset


def rehearsed(planned: Iterable[Change]) -> Iterator[tuple[Change, str]]:
    """Each change and its effect; each in a process of its own."""
    # What a process would import first, and no change concerns.
    import accelerate  # noqa: F401
    import transformers.generation  # noqa: F401
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: F401

    source = Path(str(importlib.import_module(PACKAGE).__file__)).parent
    # A fork has what is imported here.
    context = multiprocessing.get_context("fork")
    expected = None
    for change in [None, *planned]:
        with TemporaryDirectory() as folder:
            copy = Path(folder) / PACKAGE
            copytree(source, copy)
            if change:
                rename(copy, change)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=report, args=(folder, sender))
            process.start()
            sender.close()
            try:
                found = receiver.recv()
            except EOFError:
                found = "no answer"
            process.join()
        if change is None:
            expected = found
            if isinstance(expected, str):
                raise RuntimeError(f"Without any change: {expected}")
        else:
            yield change, effect_of(found, expected)


def effect_of(found: Any, expected: Any) -> str:
    """In one line: "works", an error, or modes with other results."""
    if isinstance(found, str):
        return found
    others = [mode for mode in expected if not agree(found[mode], expected[mode])]
    errors = [str(found[mode]) for mode in others if isinstance(found[mode], str)]
    return errors[0] if errors else f"other results: {', '.join(others)}" if others else "works"


def rename(package: Path, change: Change) -> None:
    """Writes another name into a copy of the plug-in."""
    if not change.places:
        for file in package.glob("*.py"):
            text = file.read_text(encoding="utf-8")
            file.write_text(re.sub(rf"\b{change.name}\b", change.name + TOMORROW, text), "utf-8")
        return
    for module, line, column in sorted(change.places, reverse=True):
        name = module.partition(".")[2] or "__init__"
        file = package / f"{name}.py"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        # Columns count bytes.
        text = lines[line - 1].encode()
        end = column + len(change.name)
        assert text[column:end].decode() == change.name, (change, text)
        lines[line - 1] = (text[:end] + TOMORROW.encode() + text[end:]).decode()
        file.write_text("".join(lines), encoding="utf-8")


def report(folder: str, sender: Any) -> None:
    """Sends what a copy of the plug-in computes, by mode, or the first line of its error."""
    for module in [module for module in sys.modules if module.partition(".")[0] == PACKAGE]:
        del sys.modules[module]
    sys.path.insert(0, folder)
    sys.path.insert(1, str(Path(__file__).parent))
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with redirect_stderr(io.StringIO()):
            sender.send(computed(folder))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {' '.join(str(error).split())}")


def computed(folder: str) -> dict[str, Any]:
    """Results of each mode with the plug-in in a folder."""
    import vanilla_transformer

    assert str(vanilla_transformer.__file__).startswith(folder)
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    from saved_folders.save import TEXTS, learned, results

    tokenizer = AutoTokenizer.from_pretrained(SAVED)
    model = AutoModelForSeq2SeqLM.from_pretrained(SAVED).eval()
    found = results(model, tokenizer, MODES)
    torch.manual_seed(0)
    found["training"] = learned(
        model.train(), dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    )
    model.save_pretrained(f"{folder}/saved")
    again = AutoModelForSeq2SeqLM.from_pretrained(f"{folder}/saved", use_safetensors=True)
    weights = safe_open(f"{folder}/saved/model.safetensors", "pt").keys()
    found["saved"] = [sorted(weights), sorted(os.listdir(f"{folder}/saved")), total(again)]
    torch.manual_seed(0)
    found["new"] = total(AutoModelForSeq2SeqLM.from_config(model.config))
    return found


def total(model: Any) -> float:
    """Sum of the squares of all weights."""
    return sum(float(weights.detach().double().square().sum()) for weights in model.parameters())


if __name__ == "__main__":
    main()
