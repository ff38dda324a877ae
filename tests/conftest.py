"""The tiny model that the tests share: unequal sizes, so that no swapped axis goes unseen."""

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before any library reads it: no test reaches the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor does one write to the user's cache: without a cache, torch translates.
os.environ["VANILLA_TRANSFORMER_CACHE"] = ""
# Until all is collected: what is imported is no garbage, and looking for some takes long.
gc.disable()

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from number_words import write_corpus
from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs, where half precision and worker processes are the defaults."""
    if config.option.markexpr.strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """With `--share 2/3`, every third case of a long list runs, beginning with the second."""
    parser.addoption("--share", default="1/1", help="N/M: of each long list every Mth case, from N")
    parser.addoption("--share_of_files", default="1/1", help="N/M: every Mth file, from N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of tests that are marked `long_list`, and files."""
    first, step = map(int, config.getoption("--share").split("/"))
    first_file, step_of_files = map(int, config.getoption("--share_of_files").split("/"))
    place = defaultdict(count)
    files = list(dict.fromkeys(item.path for item in items))
    left_out = [
        item
        for item in items
        if files.index(item.path) % step_of_files != first_file - 1
        or (
            item.get_closest_marker("long_list")
            and next(place[item.path, item.originalname]) % step != first - 1
        )
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


Model = VanillaTransformerForConditionalGeneration
Batch = dict[str, Tensor]

both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])

# Sizes that differ wherever they meet and are small enough for the oracle; no dropout.
TINY: dict[str, Any] = {
    "vocab_size": 37,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 36,
    "dropout": 0.0,
}
LEARNED: dict[str, Any] = {"position_embedding_type": "learned", "max_position_embeddings": 9}
CONCATENATED: dict[str, Any] = {"position_embedding_type": "sinusoidal_concatenated"}
TWO_TABLES: dict[str, Any] = {"share_encoder_decoder_embeddings": False}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
RECTANGULAR: dict[str, Any] = {"talking_heads": "both", "key_heads": 3, "value_heads": 6}


def pytest_collection_finish() -> None:
    """Spares runs what takes longer than they do: accelerate's collection, a card's template."""
    gc.freeze()
    gc.enable()
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: None)
    if jinja2 := sys.modules.get("jinja2"):
        jinja2.Environment.compile = cache(jinja2.Environment.compile)


@pytest.fixture
def tiny_config() -> VanillaTransformerConfig:
    """The default switches in the sizes of `TINY`."""
    return VanillaTransformerConfig(**TINY)


def redraw_parameters(model: nn.Module) -> None:
    """Draws every parameter anew: in a fresh model each bias is 0 and each norm's weight is 1.

    Such values hide that one of them is left out, and norms of one sign let a tied decoder repeat
    its input for ever.
    """
    # With this seed greedy translations of `batch` differ in tokens and in length, two of them end,
    # and both `<pad>` and `<s>` would sometimes win if generation did not forbid them.
    generator = torch.Generator().manual_seed(522)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 2:
                scale = parameter.shape[1] ** -0.5
            else:
                scale = 1.0 if name.endswith("norm.weight") else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def tiny_model(
    tiny_config: VanillaTransformerConfig,
) -> VanillaTransformerForConditionalGeneration:
    """A model of `tiny_config` with random parameters, in float32 and eval mode."""
    return build_redrawn(tiny_config)


def build_redrawn(config: VanillaTransformerConfig) -> Model:
    """A model with random parameters, in eval mode."""
    with pytest.MonkeyPatch.context() as patch:
        # Takes a third of the time, and all parameters are drawn anew.
        patch.setattr(PreTrainedModel, "initialize_weights", lambda _: None)
        model = VanillaTransformerForConditionalGeneration(config).eval()
    redraw_parameters(model)
    return model


def build_variant(**changes: Any) -> Model:
    """The tiny model with changed config fields, also with random parameters and in eval mode."""
    return build_redrawn(VanillaTransformerConfig(**{**TINY, **changes}))


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Three sentence pairs, B=3, S=7, T=5, padded on the right; each sentence ends in `</s>`."""
    input_ids = torch.tensor(
        [
            [17, 5, 9, 30, 2, 0, 0],
            [8, 21, 36, 4, 11, 26, 2],
            [13, 2, 0, 0, 0, 0, 0],
        ]
    )
    labels = torch.tensor(
        [
            [6, 33, 19, 12, 2],
            [25, 7, 2, -100, -100],
            [10, 28, 14, 2, -100],
        ]
    )
    decoder_input_ids = torch.tensor(
        [
            [1, 6, 33, 19, 12],
            [1, 25, 7, 2, 0],
            [1, 10, 28, 14, 2],
        ]
    )
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "decoder_input_ids": decoder_input_ids,
        "labels": labels,
    }


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with status 2, and gives what it tells."""
    # Not above: the plugin is also tested without what the tools need of it.
    from vanilla_transformer_tools.commands import main

    def run_refused(*argv: object) -> str:
        with pytest.raises(SystemExit, match=r"^2$"):
            main([str(word) for word in argv])
        return capsys.readouterr().err

    return run_refused


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a text file, given its name and lines, and tells its path."""

    def write_file(name: str, *lines: str) -> str:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        return str(path)

    return write_file


def pad(rows: list[Tensor], side: str, extra: int, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, `extra` positions wider than the longest row needs."""
    width = max(len(row) for row in rows) + extra
    ids = torch.full((len(rows), width), filler)
    mask = torch.zeros_like(ids)
    for row, (padded, is_real) in zip(rows, zip(ids, mask, strict=True), strict=True):
        where = slice(width - len(row), None) if side == "left" else slice(len(row))
        padded[where], is_real[where] = row, 1
    return ids, mask


def save_small_model(folder: Path, tokenizer: VanillaTransformerTokenizer, **changes: Any) -> Path:
    """A model with random weights and its tokenizer, saved in a folder that is there."""
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    config = VanillaTransformerConfig(**{**sizes, **changes}, vocab_size=len(tokenizer))
    model = VanillaTransformerForConditionalGeneration(config)
    redraw_parameters(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def interrupted_after(lines: int) -> Iterator[None]:
    """Ctrl-C is pressed once a translator has given so many translations."""
    # Not above: the plugin is also tested without what the tools need of it.
    from vanilla_transformer_tools.translation import Translation, Translator

    original = Translator.translate
    given = count(1)

    def translate(self: Translator, *args: Any, **kwargs: Any) -> Iterator[Translation]:
        for translation in original(self, *args, **kwargs):
            yield translation
            if next(given) == lines:
                raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Translator, "translate", translate)
        yield


def source_of(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def without_labels(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def assert_loaded(loaded: Model, model: Model, batch: Batch) -> None:
    """`loaded` has the parameters of `model`, tied alike, and computes the same."""
    expected = dict(model.named_parameters())
    assert [name for name, _ in loaded.named_parameters()] == list(expected)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    # Matrix products may round otherwise where the file's tensors lie elsewhere in memory.
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)


def gradients(model: Model, batch: Batch) -> dict[str, Tensor]:
    model.train()(**batch).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def record_calls(model: nn.Module, suffix: str) -> list[str]:
    """Names of the submodules ending in `suffix`, appended each time that one is called."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(suffix):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with 300 pairs of number words to train on, and 20 to choose a checkpoint on.

    No test changes it: writing it takes a second.
    """
    # Imported late: it needs `datasets`, and the tests of the model run without.
    from .support.training_runs import VALIDATION_LINES

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, train=300, validation=VALIDATION_LINES, test=1)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser for all tests; each opens a page of its own."""
    from .support.browser import open_browser

    with open_browser() as browser:
        yield browser
