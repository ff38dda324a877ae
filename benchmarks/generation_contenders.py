"""One function in several engines that translate the same batches in turn."""

import math
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from lab import seconds_of
from neighbours import build, check_same_logits, copy_into_m2m100, use_our_positions
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.interop.export import export_model
from vanilla_transformer_tools.interop.marian import (
    DECODER_FILE,
    NO_ENTRY,
    has_engine,
    vocabulary_tokenizer,
    write_marian,
)
from vanilla_transformer_tools.settings import PRESETS
from vanilla_transformer_tools.text.batches import padded
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.training.starting_model import LENGTH_PENALTY
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine
from vanilla_transformer_tools.translation.engine_choice import load_engine
from vanilla_transformer_tools.translation.engines import Engine, Hypothesis

RANDOM_VOCABULARY, RANDOM_SOURCE_TOKENS, RANDOM_TARGET_TOKENS = 32_000, (20, 30), 32
# Marian's limit is a multiple of the longest source of a batch.
MARIAN_SOURCE_TOKENS = (25, 25)
# Idle OpenMP threads spin for this long, and would slow down the next contender.
SECONDS_TO_SETTLE = 0.3


@dataclass(frozen=True)
class Task:
    """What to translate, and how.

    Attributes:
        batches: Ids of the sources, with `</s>`.
        limit: Longest output, in tokens.
        is_forced: Whether all outputs have exactly this length.
        num_beams: Hypotheses of a sentence; 1 is greedy.
    """

    batches: list[list[list[int]]]
    limit: int
    is_forced: bool
    num_beams: int


def model_inputs(rows: list[list[int]]) -> dict[str, Tensor]:
    """Ids, padded on the right with 0, and mask (1 = real token), `[B, S]`."""
    ids, mask = padded(rows, 0)
    return {"input_ids": ids, "attention_mask": mask}


class Contender:
    """Something that translates."""

    def calls(self, task: Task) -> list[Callable[[], Any]]:
        """What is timed: a call for each batch, with its input prepared."""
        raise NotImplementedError

    def outputs(self, found: Any) -> list[list[int]]:
        """Ids, including `</s>`, of the output of a call."""
        raise NotImplementedError

    def run(self, task: Task) -> tuple[float, list[list[int]]]:
        """Seconds and outputs."""
        calls, found = self.calls(task), []
        time.sleep(SECONDS_TO_SETTLE)
        seconds = seconds_of(lambda: found.extend(call() for call in calls))
        return seconds, list(chain.from_iterable(map(self.outputs, found)))


class Generate(Contender):
    """`generate` of a saved model, ours or another of Transformers."""

    def __init__(self, folder: Path, dtype: str, device: str = "cpu") -> None:
        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        config = self.model.config
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        ids = {name: getattr(config, name) for name in names}
        never = [[ids["pad_token_id"]], [ids["bos_token_id"]]]
        self.model.generation_config = GenerationConfig(**ids, bad_words_ids=never)

    def calls(self, task: Task) -> list[Callable[[], Any]]:
        """A `generate` for each batch."""
        settings: dict[str, Any] = {"num_beams": task.num_beams, "do_sample": False}
        if task.num_beams > 1:
            settings |= {"length_penalty": LENGTH_PENALTY, "early_stopping": False}
        if task.is_forced:
            settings["suppress_tokens"] = [self.model.config.eos_token_id]
        device = self.model.device
        inputs = [
            {name: value.to(device) for name, value in model_inputs(batch).items()}
            for batch in task.batches
        ]
        return [
            partial(self.model.generate, **batch, **settings, max_new_tokens=task.limit)
            for batch in inputs
        ]

    def outputs(self, found: Tensor) -> list[list[int]]:
        """Rows without start token and padding."""
        end = self.model.config.eos_token_id
        rows = [row[1:] for row in found.tolist()]
        return [row[: row.index(end) + 1] if end in row else row for row in rows]


class Inherited(Generate):
    """Our model with Transformers' own searches."""

    def __init__(self, folder: Path, dtype: str, device: str = "cpu") -> None:
        super().__init__(folder, dtype, device)
        self.model.generation_config.use_transformers_search = True


class M2M100(Generate):
    """M2M100 with our weights from its folder, and with our positions."""

    def __init__(self, folder: Path, dtype: str, device: str = "cpu") -> None:
        super().__init__(folder, dtype, device)
        use_our_positions(self.model)


class CTranslate2(Contender):
    """The engine of our Translator; where outputs are forced, it has the limit alone."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.engine: Engine = self.load(folder)

    def load(self, folder: Path) -> Engine:
        """CTranslate2 with an export."""
        return CTranslate2Engine(folder, device="cpu")

    def calls(self, task: Task) -> list[Callable[[], Any]]:
        """A batch of ids without prefixes for each batch."""
        config = GenerationConfig(length_penalty=LENGTH_PENALTY)
        search = Search.of(config, num_beams=task.num_beams)
        translate = self.engine.translate_batch
        return [
            partial(translate, batch, [[] for _ in batch], [task.limit] * len(batch), search)
            for batch in task.batches
        ]

    def outputs(self, found: list[list[Hypothesis]]) -> list[list[int]]:
        """Ids of the best hypotheses."""
        end = self.tokenizer.eos_token_id
        return [best.tokens + [end] * (not best.reached_limit) for best, *_ in found]


class Automatic(CTranslate2):
    """The engine that `--engine auto` chooses, while it warms up."""

    def load(self, folder: Path) -> Engine:
        """The engine of the model itself."""
        return load_engine("auto", [str(folder)], self.tokenizer)[0]


class Marian(Contender):
    """Marian's engine, as `pymarian`, which reads and writes tokens as text; outputs are forced."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import pymarian

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.threads = torch.get_num_threads()
        options = f"--cpu-threads {self.threads} --quiet --quiet-translation"
        self.engine = pymarian.Translator(f"-c {folder / DECODER_FILE} {options}")

    def calls(self, task: Task) -> list[Callable[[], Any]]:
        """A call for each batch, of which each thread gets a part."""
        calls = []
        for batch in task.batches:
            lines = [" ".join(self.tokenizer.convert_ids_to_tokens(row[:-1])) for row in batch]
            options = {
                "beam-size": task.num_beams,
                "normalize": LENGTH_PENALTY,
                "mini-batch": math.ceil(len(batch) / self.threads),
                "maxi-batch": self.threads,
                # It stops at the first length that is no longer below the product.
                "max-length-factor": (task.limit - 0.5) / max(map(len, batch)),
            }
            calls.append(partial(self.engine.translate, lines, **options))
        return calls

    def outputs(self, found: list[str]) -> list[list[int]]:
        """Ids of the tokens."""
        return [self.tokenizer.convert_tokens_to_ids(text.split()) for text in found]


CONTENDERS: dict[str, type[Contender]] = {
    "vanilla": Generate,
    "inherited": Inherited,
    "m2m100": M2M100,
    "ctranslate2-float32": CTranslate2,
    "ctranslate2-int8": CTranslate2,
    "auto": Automatic,
    "marian": Marian,
}


def write_folders(
    model_folder: Path, names: list[str], lines: list[str], scratch: Path
) -> dict[str, Path]:
    """The folder that each contender loads; those whose package is missing are named and left out.

    Args:
        model_folder: Folder of our model.
        names: Keys of `CONTENDERS`.
        lines: Text on which exports are compared.
        scratch: Folder in which those of the others are created.
    """
    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder, dtype="float32")
    folders = {}
    for name in names:
        folder = scratch / name
        print(f"preparing {name}", file=sys.stderr)
        if name == "m2m100":
            copy_into_m2m100(model).save_pretrained(folder)
        elif CONTENDERS[name] is CTranslate2:
            kind = "float32" if name.endswith("float32") else "int8"
            try:
                export_model(str(model_folder), folder, quantization=kind, sample=lines)
            except ImportError as error:
                print(f"without {name}: {error}", file=sys.stderr)
                continue
        elif name == "marian":
            if not has_engine():
                print("without marian: pip install pymarian", file=sys.stderr)
                continue
            shutil.copytree(model_folder, folder)
            write_marian(model, TokenizerPair.from_pretrained(str(folder)), folder)
        else:
            folder = model_folder
        folders[name] = folder
    return folders


def write_random_model(preset: str, folder: Path) -> None:
    """A folder with a model of random weights, and a tokenizer with as many invented words."""
    torch.manual_seed(0)
    sizes = PRESETS[preset].config()
    build("vanilla", vocab_size=RANDOM_VOCABULARY, **sizes).save_pretrained(folder)
    # Four entries are special tokens.
    words = [f"word{number}" for number in range(RANDOM_VOCABULARY - 4)]
    tokenizer = VanillaTransformerTokenizer.train(words, vocab_size=RANDOM_VOCABULARY, kind="word")
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def write_random_marian(preset: str, folder: Path) -> None:
    """The same for a model that Marian can hold, whose outputs never end by themselves."""
    torch.manual_seed(0)
    sizes, start = PRESETS[preset].config(), RANDOM_VOCABULARY - 1
    half = sizes["d_model"] // 2
    model = build(
        "vanilla",
        vocab_size=RANDOM_VOCABULARY,
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), start),
        **dict.fromkeys(("eos_token_id", "bos_token_id"), 0),
        pre_norm=False,
        lm_head_bias=True,
        position_embedding_type="sinusoidal_concatenated",
        position_base=10_000 ** (half / (half - 1)),
        **sizes,
    )
    # Marian's decoder begins with zeros.
    model.model.shared.weight[start] = 0
    model.lm_head.bias[[0, start]] = NO_ENTRY
    model.save_pretrained(folder)
    words = ["</s>", "<unk>", *(f"word{number}" for number in range(2, start))]
    entries = {word: number for number, word in enumerate(words)}
    vocabulary_tokenizer(entries, start).save_pretrained(folder)


def random_sources(
    count: int, lengths: tuple[int, int] = RANDOM_SOURCE_TOKENS, end: int = 2
) -> list[list[int]]:
    """Ids of sentences, the same at each call.

    Args:
        count: Number of sentences.
        lengths: Least and most tokens, `</s>` counted.
        end: Id of `</s>`.
    """
    draw = random.Random(0)
    # The last id is Marian's padding.
    ids = range(4, RANDOM_VOCABULARY - 1)
    sizes = [draw.randint(*lengths) for _ in range(count)]
    return [[*draw.choices(ids, k=size - 1), end] for size in sizes]


def load(folders: dict[str, Path], dtype: str, sources: list[list[int]]) -> dict[str, Contender]:
    """All contenders available in this dtype; in float32 their outputs have been compared."""
    contenders = {
        name: CONTENDERS[name](folder, dtype)
        for name, folder in folders.items()
        if dtype == "float32" or issubclass(CONTENDERS[name], Generate)
    }
    if dtype == "float32" and "m2m100" in contenders:
        ours, theirs = contenders["vanilla"].model, contenders["m2m100"].model
        check_same_logits(ours, theirs, model_inputs(sources[:16]))
    return contenders
