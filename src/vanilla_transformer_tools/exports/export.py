"""A saved model to another runtime or class: converted, compared, and only then in place."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer_tools.exports.to_transformers import (
    FORMATS,
    name_general_tokenizers,
    refuse_other_models,
    to_transformers,
)
from vanilla_transformer_tools.files import new_folder
from vanilla_transformer_tools.interop.importing import LogitGap, compare_logits
from vanilla_transformer_tools.progress import line_progress
from vanilla_transformer_tools.saved_folder import (
    describe_model_files,
    load_model,
    read_run,
    write_run,
)
from vanilla_transformer_tools.text.languages import language_codes
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, tokens_by_id
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine
from vanilla_transformer_tools.translation.engine import Engine, Hypothesis
from vanilla_transformer_tools.translation.generation_settings import (
    never_generated,
    refuse_torch_only,
)
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

_SAMPLE_LINES, _LONGEST_LINE = 100, 30
# Longest translation of a line of the sample, in lengths of the line.
_LENGTH_FACTOR = 3
# Lines whose logits are in memory at the same time.
_BATCH_LINES = 16

# Least share of identical lines and largest gap. Rounding decides many near ties of random
# tokens otherwise, which would hide a small mistake, so float32 is compared first.
_TOLERANCES = {
    "float32": (0.99, 1e-3),
    "onnx": (0.99, 1e-4),
    "float16": (0.0, 0.1),
    "bfloat16": (0.0, 0.1),
}
_OF_INTEGERS = (0.0, 1.0)

# Gives the greedy translation of each source within its limit.
Translate = Callable[[list[list[int]], list[int]], list[Hypothesis]]


@dataclass(frozen=True)
class Agreement:
    """How the greedy translations of an export compare with the model's.

    Attributes:
        lines: Lines of the sample.
        identical: Lines with the same translation.
        gap: Mean over lines of the difference of log-probabilities per token.
    """

    lines: int
    identical: int
    gap: float

    def __str__(self) -> str:
        return (
            f"{self.identical} of {self.lines} lines translated as by torch; log-probabilities per "
            f"token differ by {self.gap:.1e}"
        )

    def check(self, kind: str) -> None:
        """Rejects an export that is too far from the model, for its type of weights or `onnx`."""
        identical, gap = _TOLERANCES.get(kind, _OF_INTEGERS)
        # Written so that NaN fails.
        if self.identical < identical * self.lines or not self.gap <= gap:
            raise ValueError(
                f"The export must translate at least {identical:.0%} of the lines as the model "
                "does, with log-probabilities per token that differ by at most "
                f"{gap:g}, got: {self}. It is deleted; please report this with the versions of "
                "your packages."
            )


def export_model(
    model_name_or_path: str,
    output: Path,
    format: str = "ctranslate2",
    *,
    quantization: str | None = None,
    sample: list[str] | None = None,
    trust_remote_code: bool = False,
) -> Agreement | LogitGap:
    """Writes a folder for other software, which appears once its results have been compared.

    It holds the tokenizers, generation_config.json, and the record of the training run, with the
    checksums of the exported files, and as `exported_from` those of the model's.

    Args:
        model_name_or_path: Folder or Hub name of one of our models.
        output: Folder to make.
        format: `ctranslate2`; or `onnx`, graphs that Optimum and transformers.js load; or one of
            `to_transformers.FORMATS`, weights in the dtype of the model.
        quantization: Type of the weights with `ctranslate2`, one of CTranslate2's; None: float32.
        sample: Lines to compare translations on; None: random tokens of the vocabulary.
        trust_remote_code: Runs the code of a tokenizer of another kind than ours.

    Returns:
        How the greedy translations of the sample compare, or, for a class of Transformers, the
        logits in float32. Reduced weights are compared after float32 ones.

    Raises:
        FileExistsError: If there is something at `output`.
        ImportError: If a package of the format is not installed.
        OSError: If there is no room.
        ValueError: If the format cannot express the model, or computes something else.
    """
    with new_folder(output, "export") as folder:
        model, tokenizers = _load(model_name_or_path, format, trust_remote_code)
        folder.mkdir(parents=True)
        tokenizers.save_pretrained(folder)
        agreement = (
            _write_class(model, folder, format)
            if format in FORMATS
            else _write_runtime(model, tokenizers.source, folder, format, quantization, sample)
        )
        _write_record(folder, model)
    return agreement


def _load(name: str, format: str, trust_remote_code: bool) -> tuple[PreTrainedModel, TokenizerPair]:
    # First, because its errors explain what is wrong with a folder or a name.
    tokenizers = TokenizerPair.from_pretrained(name, trust_remote_code=trust_remote_code)
    model = load_model(
        name,
        dtype="auto" if format in FORMATS else torch.float32,
        # What the ONNX exporter can trace.
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    ).eval()
    refuse_other_models(model, format)
    return model, tokenizers


def _write_record(folder: Path, model: PreTrainedModel) -> None:
    run: dict[str, Any] = read_run(model.name_or_path)
    if source := run.get("files"):
        run["exported_from"] = source
    write_run(folder, {**run, "files": describe_model_files(folder)})


def _announce(model: PreTrainedModel) -> None:
    """Says what begins once nothing refuses the model."""
    logger.info("exporting %s and comparing the result with it ...", model.name_or_path)


def _write_runtime(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    format: str,
    quantization: str | None,
    sample: list[str] | None,
) -> Agreement:
    refuse_torch_only(model.generation_config)
    never_generated(model.generation_config)
    engine = TorchEngine(model)
    sources = _sample_sources(engine, tokenizer, sample)
    model.generation_config.save_pretrained(folder)
    if format == "onnx":
        from vanilla_transformer_tools.exports import onnx

        onnx.refuse_unexpressed(model)
        _announce(model)
        name_general_tokenizers(folder)
        onnx.export_onnx(model, folder)
        onnx.save_interface(model, folder)
        agreement = verify(engine, onnx.OnnxModel(folder).translate, sources)
        agreement.check("onnx")
        return agreement
    from vanilla_transformer_tools.exports.ctranslate2_conversion import convert, refuse_unexpressed

    refuse_unexpressed(model)
    _announce(model)
    for weights in dict.fromkeys(("float32", quantization or "float32")):
        logger.info("writing model.bin in %s", weights)
        convert(model, tokenizer, folder, weights)
        exported = CTranslate2Engine(folder, device="cpu")
        agreement = verify(engine, partial(_greedy, exported), sources)
        agreement.check(weights)
    return agreement


def _write_class(model: PreTrainedModel, folder: Path, class_name: str) -> LogitGap:
    name_general_tokenizers(folder)
    dtype = model.dtype
    exported = to_transformers(model, class_name)
    _announce(model)
    exported.save_pretrained(folder)
    comparison = compare_logits(load_model(str(folder), dtype=torch.float32).eval(), model.float())
    comparison.check(dtype)
    return comparison


def _sample_sources(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, lines: list[str] | None
) -> list[list[int]]:
    """Ids with `</s>` of lines, blank ones left out, or of random tokens; long ones last."""
    if lines is not None:
        texts = [line for line in lines if line.strip()]
        if not texts:
            raise ValueError(f"The sample must have lines with text, got {len(lines)} blank ones.")
        return sorted(tokenizer(texts)["input_ids"], key=len)
    longest = int(min(_LONGEST_LINE, engine.last_position - 1))
    draw = random.Random(0)
    others = {*tokenizer.all_special_ids, *language_codes(tokenizer).values()}
    ordinary = sorted(tokens_by_id(tokenizer, "source").keys() - others)
    *_, end = tokenizer("")["input_ids"]
    lengths = sorted(draw.randint(1, longest) for _ in range(_SAMPLE_LINES))
    return [[*draw.choices(ordinary, k=length), end] for length in lengths]


def _greedy(engine: Engine, sources: list[list[int]], limits: list[int]) -> list[Hypothesis]:
    found = engine.translate_batch(sources, [[] for _ in sources], limits, Search())
    return [hypotheses[0] for hypotheses in found]


def verify(engine: TorchEngine, translate: Translate, sources: list[list[int]]) -> Agreement:
    """Compares greedy translations, and the score of each with the one that the model gives it.

    Scores of an export are means of the log-probabilities over the tokens that may be generated.
    """
    banned = never_generated(engine.model.generation_config)
    identical, gaps = 0, []
    with line_progress("comparing translations", len(sources)) as done:
        for start in range(0, len(sources), _BATCH_LINES):
            batch = sources[start : start + _BATCH_LINES]
            limits = [int(min(_LENGTH_FACTOR * len(row), engine.last_position)) for row in batch]
            expected, actual = _greedy(engine, batch, limits), translate(batch, limits)
            targets = [hypothesis.ended for hypothesis in actual]
            passes = engine.force(batch, targets, banned=banned)
            for forced, ours, theirs in zip(passes, expected, actual, strict=True):
                identical += ours.tokens == theirs.tokens
                mean = sum(forced.log_probs) / len(forced.log_probs)
                gaps.append(abs(mean - theirs.score))
                done()
    return Agreement(len(sources), identical, sum(gaps) / len(gaps))
