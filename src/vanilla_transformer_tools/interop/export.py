"""A saved model to another runtime or class: converted, compared, and only then in place."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer_tools.files import names_below, new_folder
from vanilla_transformer_tools.interop import marian, onnx
from vanilla_transformer_tools.interop.importing import LogitGap, compare_logits
from vanilla_transformer_tools.interop.samples import random_sources
from vanilla_transformer_tools.interop.to_transformers import (
    FORMATS,
    name_general_tokenizers,
    refuse_other_models,
    to_transformers,
)
from vanilla_transformer_tools.interop.transformers_js import fit_transformers_js
from vanilla_transformer_tools.saved_folder import (
    RESULTS_FILE,
    RUN_FILE,
    describe_model_files,
    load_model,
    read_object,
    read_run,
    write_run,
)
from vanilla_transformer_tools.settings import RUNTIMES
from vanilla_transformer_tools.text.batches import padded
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine
from vanilla_transformer_tools.translation.engines import Engine, Hypothesis, TorchEngine
from vanilla_transformer_tools.translation.generation_settings import (
    never_generated,
    refuse_torch_only,
    start_and_ends,
)

logger = logging.getLogger(__name__)

_SAMPLE_LINES, _LONGEST_LINE = 100, 30
# One in so many of these lines is decoded by Marian.
_MARIAN_SHARE = 5
# Lines whose logits are in memory at the same time.
_BATCH_LINES = 16

# Least share of identical lines and largest gap. Rounding decides many near ties of random
# tokens otherwise, which would hide a small mistake, so float32 is compared first.
_TOLERANCES = {"float32": (0.99, 1e-3), "float16": (0.0, 0.1), "bfloat16": (0.0, 0.1)}
_INTEGER_TOLERANCE = (0.0, 1.0)
_ONNX_TOLERANCE = (0.99, 1e-4)


@dataclass(frozen=True)
class Agreement:
    """How the greedy translations of an export compare with the model's.

    Attributes:
        lines: Lines of the sample.
        identical: Lines with the same translation.
        gap: Mean difference of log-probabilities per token over lines, or largest of logits.
        numbers: Which of the two.
    """

    lines: int
    identical: int
    gap: float
    numbers: str

    def __str__(self) -> str:
        return (
            f"{self.identical} of {self.lines} lines translated as by torch; {self.numbers} "
            f"differ by {self.gap:.1e}"
        )

    def check(self, identical: float, gap: float) -> None:
        """Rejects an export that is too far from the model.

        Args:
            identical: Least share of lines with the same translation.
            gap: Difference allowed.

        Raises:
            ValueError: If it is.
        """
        # Written so that NaN fails.
        if self.identical < identical * self.lines or not self.gap <= gap:
            raise ValueError(
                f"The export must translate at least {identical:.0%} of the lines as the model "
                f"does, with {self.numbers} that differ by at most {gap:g}, got: {self}. It is "
                "deleted; please report this with the versions of your packages."
            )


def export_model(
    model_name_or_path: str,
    output: Path,
    format: str = "ctranslate2",
    *,
    quantization: str | None = None,
    sample: list[str] | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Agreement | LogitGap | None:
    """Writes a folder for other software, which appears once its results have been compared.

    It holds the tokenizer's files, with those of the target in target_tokenizer/ if it has one of
    its own, generation_config.json, the record of the training run, and for the format

    - `ctranslate2`: CTranslate2's model.bin, config.json and vocabulary, which
      `Translator(engine="ctranslate2")` reads, too.
    - `onnx`: graphs with their weights in onnx/, which Optimum and transformers.js load, and a
      config.json that says how to run them.
    - `marian-npz`: Marian's model.npz, vocabularies and decoder.yml.
    - one of `to_transformers.FORMATS`: weights, in the dtype of the model, that Transformers loads
      as a model of a class of its own.

    Args:
        model_name_or_path: Folder or Hub name of one of our models.
        output: Folder to make.
        format: One of these, as in the command.
        quantization: Type of the weights: with `ctranslate2` one of CTranslate2's, with `onnx`
            `float32` or `int8`; None: float32.
        sample: Lines to compare translations on; None: random tokens of the vocabulary.
        force: Replaces an earlier export at `output`.
        trust_remote_code: Runs the code of a tokenizer of another kind than ours.

    Returns:
        How the greedy translations of the sample compare, or, for a class of Transformers, the
        logits in float32. Other weights than float32 are compared after float32 weights, which must
        translate like the model. None: Marian is not installed.

    Raises:
        FileExistsError: If there is something at `output` that may not be replaced.
        OSError: If there is no room.
        ValueError: If the format cannot express the model, or computes something else.
    """
    may_replace = partial(_check_output, force=force, is_forceable=format in RUNTIMES)
    with new_folder(output, "export", may_replace) as folder:
        # First, because its errors explain what is wrong with a folder or a name.
        tokenizers = TokenizerPair.from_pretrained(
            model_name_or_path, trust_remote_code=trust_remote_code
        )
        model = load_model(
            model_name_or_path,
            dtype="auto" if format in FORMATS else torch.float32,
            # What the ONNX exporter can trace.
            attn_implementation="eager",
            trust_remote_code=trust_remote_code,
        ).eval()
        refuse_other_models(model, format)
        if format in RUNTIMES:
            refuse_torch_only(model.generation_config)
        folder.mkdir(parents=True)
        tokenizers.save_pretrained(folder)
        agreement: Agreement | LogitGap | None
        if format in FORMATS:
            agreement = _write_class(model, folder, format)
        else:
            engine = TorchEngine(model)
            model.generation_config.save_pretrained(folder)
            sources = _sample_sources(engine, tokenizers.source, sample)
            weights = quantization or "float32"
            if format == "ctranslate2":
                agreement = _write_ctranslate2(engine, tokenizers, folder, sources, weights)
            elif format == "marian-npz":
                agreement = _write_marian(engine, tokenizers, folder, sources)
            else:
                try:
                    fit_transformers_js(folder)
                except ValueError as error:
                    logger.warning("The tokenizer is for Python only. %s", error)
                agreement = _write_onnx(engine, folder, sources, weights)
        run = read_run(model.name_or_path) | {"files": describe_model_files(folder)}
        if format in RUNTIMES:
            run["exported"] = names_below(folder)
        write_run(folder, run)
    return agreement


def _write_ctranslate2(
    engine: TorchEngine,
    tokenizers: TokenizerPair,
    folder: Path,
    sources: list[list[int]],
    quantization: str,
) -> Agreement:
    from vanilla_transformer_tools.translation.ctranslate2_conversion import convert

    banned = never_generated(engine.model.generation_config)
    for weights in dict.fromkeys(("float32", quantization)):
        convert(engine.model, tokenizers.source, folder, weights)
        translate = partial(_best, CTranslate2Engine(folder, device="cpu"), search=Search())
        agreement = _compare_translations(engine, translate, sources, banned)
        agreement.check(*_TOLERANCES.get(weights, _INTEGER_TOLERANCE))
    return agreement


def _write_onnx(
    engine: TorchEngine, folder: Path, sources: list[list[int]], quantization: str
) -> Agreement:
    onnx.export_onnx(engine.model, folder)
    agreement = _compare_logits(engine, onnx.OnnxModel(folder), sources)
    agreement.check(*_ONNX_TOLERANCE)
    if quantization == "int8":
        onnx.quantize_onnx(folder)
        agreement = _compare_logits(engine, onnx.OnnxModel(folder), sources, is_quantized=True)
        agreement.check(*_INTEGER_TOLERANCE)
    onnx.save_interface(engine.model, folder, quantization)
    return agreement


def _write_class(model: PreTrainedModel, folder: Path, class_name: str) -> LogitGap:
    name_general_tokenizers(folder)
    dtype = model.dtype
    to_transformers(model, class_name).save_pretrained(folder)
    comparison = compare_logits(load_model(str(folder), dtype=torch.float32).eval(), model.float())
    comparison.check(dtype)
    return comparison


def _write_marian(
    engine: TorchEngine, tokenizers: TokenizerPair, folder: Path, sources: list[list[int]]
) -> Agreement | None:
    marian.write_marian(engine.model, tokenizers, folder)
    if not marian.has_engine():
        return None
    translate = partial(marian.translate, folder, tokenizers)
    # Marian normalises over all tokens, also over those that it does not generate.
    agreement = _compare_translations(engine, translate, sources[::_MARIAN_SHARE], banned=[])
    agreement.check(*_TOLERANCES["float32"])
    return agreement


def _check_output(output: Path, *, force: bool, is_forceable: bool) -> None:
    """Raises a FileExistsError if there is something that may not be replaced."""
    if not output.exists():
        return
    fault = f"{str(output)!r} must not exist yet."
    if not force:
        cure = ", or --force to replace an earlier export" if is_forceable else ""
        raise FileExistsError(f"{fault} Give another folder{cure}.")
    fault += " --force replaces an export, and nothing else"
    if not output.is_dir():
        raise FileExistsError(f"{fault}; this is a file.")
    files = {*names_below(output)}
    listed = read_object(output / RUN_FILE).get("exported") if RUN_FILE in files else None
    if files and not listed:
        raise FileExistsError(f"{fault}; this has no list of one in {RUN_FILE}.")
    # `evaluate` adds its results.
    if others := sorted(files - {RUN_FILE, *(listed or []), RESULTS_FILE}):
        raise FileExistsError(
            f"{fault}; this holds {', '.join(others[:3])}{' and more' * (len(others) > 3)}, too. "
            "Give another folder, or take them out."
        )


def _sample_sources(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, lines: list[str] | None
) -> list[list[int]]:
    """Ids with `</s>` of lines, blank ones left out, or of random tokens; long ones last."""
    if lines is None:
        longest = int(min(_LONGEST_LINE, engine.last_position - 1))
        return sorted(random_sources(tokenizer, _SAMPLE_LINES, longest), key=len)
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"The sample must have lines with text, got {len(lines)} blank ones.")
    return sorted(tokenizer(texts)["input_ids"], key=len)


def _best(engine: Engine, sources: list[list[int]], search: Search) -> list[Hypothesis]:
    """The best translation of each source."""
    limits = [marian.LENGTH_FACTOR * len(source) for source in sources]
    found = engine.translate_batch(sources, [[] for _ in sources], limits, search)
    return [hypotheses[0] for hypotheses in found]


def _compare_translations(
    engine: TorchEngine,
    translate: Callable[[list[list[int]]], list[Hypothesis]],
    sources: list[list[int]],
    banned: list[int],
) -> Agreement:
    """Compares greedy translations, and the score of each with the one that the model gives it.

    The export leaves out `banned` ids when it normalises.
    """
    identical, gaps = 0, []
    for batch in _batches(sources):
        hypotheses = translate(batch)
        identical += sum(
            ours.tokens == theirs.tokens
            for ours, theirs in zip(_best(engine, batch, Search()), hypotheses, strict=True)
        )
        targets = [hypothesis.ended for hypothesis in hypotheses]
        logits = _logits(engine.model, batch, targets)
        logits[:, :, banned] = -torch.inf
        log_probs = logits.log_softmax(-1)
        for row, target, hypothesis in zip(log_probs, targets, hypotheses, strict=True):
            mean = row[range(len(target)), target].mean().item()
            gaps.append(abs(mean - hypothesis.score))
    gap = sum(gaps) / len(gaps)
    return Agreement(len(sources), identical, gap, "log-probabilities per token")


def _compare_logits(
    engine: TorchEngine,
    exported: onnx.OnnxModel,
    sources: list[list[int]],
    *,
    is_quantized: bool = False,
) -> Agreement:
    """Compares the logits along the model's greedy translations.

    A translation is the same if each of its tokens has the largest logit of the export, too.
    Of quantised weights, log-probabilities of the translations are compared instead of all logits.
    """
    model = engine.model
    first_token = model.generation_config.forced_bos_token_id
    chosen = slice(int(first_token is not None), None)
    search = Search(first_token=first_token)
    forbidden = never_generated(model.generation_config)
    identical, gaps = 0, []
    for batch in _batches(sources):
        targets = [hypothesis.ended for hypothesis in _best(engine, batch, search)]
        expected = _logits(model, batch, targets)
        actual = torch.from_numpy(exported.force(batch, targets))
        for row, other, target in zip(expected, actual, targets, strict=True):
            both = torch.stack([row, other])[:, : len(target)]
            if is_quantized:
                both = both.log_softmax(-1)[:, range(len(target)), target].mean(-1)
            gaps.append((both[0] - both[1]).abs().max())
        actual[:, :, forbidden] = -torch.inf
        likeliest = actual.argmax(-1).tolist()
        identical += sum(
            row[: len(target)][chosen] == target[chosen]
            for row, target in zip(likeliest, targets, strict=True)
        )
    numbers = "log-probabilities per token" if is_quantized else "logits"
    gap = torch.stack(gaps).mean() if is_quantized else torch.stack(gaps).max()
    return Agreement(len(sources), identical, gap.item(), numbers)


def _batches(sources: list[list[int]]) -> list[list[list[int]]]:
    starts = range(0, len(sources), _BATCH_LINES)
    return [sources[start : start + _BATCH_LINES] for start in starts]


@torch.no_grad()
def _logits(model: PreTrainedModel, sources: list[list[int]], targets: list[list[int]]) -> Tensor:
    """The model's logits of the next token at each position of the targets, `[B, T, V]`."""
    filler = model.config.pad_token_id
    input_ids, mask = padded(sources, filler)
    start, _ = start_and_ends(model)
    read, _ = padded([[start, *row[:-1]] for row in targets], filler)
    arguments = {"attention_mask": mask, "decoder_input_ids": read, "use_cache": False}
    return model(input_ids=input_ids, **arguments).logits
