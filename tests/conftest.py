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

import pytest
import torch
from torch import Tensor, nn

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
# Departures from the default: one for each switch, then some together.
VARIANTS: dict[str, dict[str, Any]] = {
    "post_norm": {"pre_norm": False},
    "no_final_norm": {"add_final_layer_norm": False},
    "two_last_norms": {"pre_norm": False, "add_final_layer_norm": True},
    "embedding_norm": {"embedding_layer_norm": True, "layer_norm_eps": 0.01},
    "layer_norm_eps": {"layer_norm_eps": 0.01},
    "gelu": {"activation_function": "gelu"},
    "unscaled": {"scale_embedding": False},
    "position_base": {"position_base": 100},
    "position_offset": {"position_offset": 3},
    "concatenated": CONCATENATED,
    "learned": LEARNED,
    "learned_offset": {**LEARNED, "position_offset": 2},
    "untied": UNTIED,
    "projection_bias": {"lm_head_bias": True},
    "untied_bias": {**UNTIED, "lm_head_bias": True},
    "two_tables": TWO_TABLES,
    "two_tables_untied": {**TWO_TABLES, **UNTIED},
    "larger_target": {**TWO_TABLES, "decoder_vocab_size": 41},
    "smaller_target": {**TWO_TABLES, **UNTIED, "decoder_vocab_size": 34},
    "d_k": {"d_k": 5},
    "d_v": {"d_v": 7},
    "d_k_and_d_v": {"d_k": 16, "d_v": 3},
    "no_attention_bias": {"attention_bias": False},
    "talking_logits": {"talking_heads": "logits"},
    "talking_weights": {"talking_heads": "weights"},
    "talking_both": {"talking_heads": "both"},
    "talking_more_keys": {"talking_heads": "logits", "key_heads": 8},
    "talking_more_values": {"talking_heads": "weights", "value_heads": 6},
    "talking_rectangular": RECTANGULAR,
    "like_marian": {**CONCATENATED, "pre_norm": False, "lm_head_bias": True},
    "like_m2m100": {**CONCATENATED, "position_base": 10_000 ** (12 / 11), "position_offset": 2},
    "like_bart": {
        **LEARNED,
        "position_offset": 2,
        "pre_norm": False,
        "embedding_layer_norm": True,
        "scale_embedding": False,
        "activation_function": "gelu",
        "lm_head_bias": True,
    },
    "like_mbart": {
        **LEARNED,
        "position_offset": 2,
        "embedding_layer_norm": True,
        "lm_head_bias": True,
    },
    "like_bert": {**LEARNED, "pre_norm": False, "scale_embedding": False, "d_k": 3},
    "talking_post_norm": {**RECTANGULAR, **LEARNED, "pre_norm": False, "d_v": 5},
    "everything": {
        **RECTANGULAR,
        **LEARNED,
        **TWO_TABLES,
        **UNTIED,
        "position_offset": 1,
        "add_final_layer_norm": False,
        "decoder_vocab_size": 41,
        "lm_head_bias": True,
        "d_k": 5,
        "d_v": 2,
        "attention_bias": False,
        "scale_embedding": False,
        "activation_function": "gelu",
    },
}
each_variant = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)


def pytest_collection_finish() -> None:
    """Spares runs what takes longer than they do: accelerate's collection, a card's template."""
    gc.freeze()
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
    model = VanillaTransformerForConditionalGeneration(tiny_config).eval()
    redraw_parameters(model)
    return model


def build_variant(**changes: Any) -> Model:
    """The tiny model with changed config fields, also with random parameters and in eval mode."""
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(**{**TINY, **changes})
    ).eval()
    redraw_parameters(model)
    return model


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
