"""A saved model to another runtime or class: converted, compared, and only then in place."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vanilla_transformer_tools.files import (
    abandoned,
    naming_full_disk,
    scratch_folder,
    share_weights,
)
from vanilla_transformer_tools.interop.importing import LogitGap, compare_logits
from vanilla_transformer_tools.interop.to_transformers import (
    name_general_tokenizers,
    refuse_other_models,
    to_transformers,
)
from vanilla_transformer_tools.interop.web import MODEL_FOLDER, WEB_FILES, runtime, write_page
from vanilla_transformer_tools.interop.web_tokenizers import fit_transformers_js
from vanilla_transformer_tools.saved_folder import (
    RESULTS_FILE,
    RUN_FILE,
    TARGET_FOLDER,
    describe_model_files,
    load_model,
    read_run,
    write_run,
)
from vanilla_transformer_tools.settings import MAX_EXTRA_TOKENS
from vanilla_transformer_tools.text.batches import padded
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, tokens_by_id
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine
from vanilla_transformer_tools.translation.engine_choice import random_sources
from vanilla_transformer_tools.translation.engines import TorchEngine
from vanilla_transformer_tools.translation.search import (
    never_generated,
    refuse_torch_only,
    start_and_ends,
)

if TYPE_CHECKING:
    from vanilla_transformer_tools.interop.onnx import OnnxModel

logger = logging.getLogger(__name__)

# An export is recognised by one of these. `force` replaces a folder only if it holds nothing but
# files of an export.
_DECODERS = {"onnx/decoder_model_merged.onnx", "onnx/decoder_model_merged_quantized.onnx"}
_WEIGHTS = {"model.bin", *_DECODERS, *(f"model/{name}" for name in _DECODERS)}
_TOKENIZER_FILES = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "composing_vanilla_transformer.py",
    "merges.txt",
    "sentencepiece.bpe.model",
    "source.spm",
    "spiece.model",
    "target.spm",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "vocab.json",
}
_EXPORTED_FILES = {
    *_WEIGHTS,
    *_TOKENIZER_FILES,
    *(f"{TARGET_FOLDER}/{name}" for name in _TOKENIZER_FILES),
    "onnx/encoder_model.onnx",
    "onnx/encoder_model_quantized.onnx",
    "config.json",
    "shared_vocabulary.json",
    "source_vocabulary.json",
    "target_vocabulary.json",
    "generation_config.json",
    # `evaluate` writes it.
    RESULTS_FILE,
    RUN_FILE,
}
_EXPORTED_FILES |= {f"{name}.data" for name in _EXPORTED_FILES if name.endswith(".onnx")}
_EXPORTED_FILES |= {*WEB_FILES, *(f"{MODEL_FOLDER}/{name}" for name in _EXPORTED_FILES)}

_SAMPLE_LINES, _LONGEST_LINE = 100, 30
# One in so many of these lines is decoded by Marian, up to three times its length.
_MARIAN_SHARE = 5
# Lines whose logits are in memory at the same time.
_BATCH_LINES = 16
# Width of the beams whose translations are compared beside the greedy ones.
_BEAMS = 4

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
        gap: Difference between their numbers: the mean over the lines for log-probabilities per
            token, the largest for logits.
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


def export_to_ctranslate2(
    model_name_or_path: str,
    output: Path,
    *,
    quantization: str = "float32",
    sample: list[str] | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Agreement:
    """Writes a folder for CTranslate2 and for `Translator(engine="ctranslate2")`.

    It holds CTranslate2's model.bin, config.json and vocabulary, the tokenizer's files, with those
    of the target in target_tokenizer/ if it has one of its own, generation_config.json and the
    record of the training run.

    Args:
        model_name_or_path: Folder or Hub name of the model.
        output: Folder to make; it appears once its translations have been compared.
        quantization: Type of the weights, one of CTranslate2's.
        sample: Lines to compare on; None: random tokens of the vocabulary.
        force: Replaces an earlier export at `output`.
        trust_remote_code: Runs the code in the folder of a model of another kind than ours.

    Returns:
        How the greedy translations of the sample compare; other weights than float32 are compared
        after float32 weights, which must translate like the model.

    Raises:
        FileExistsError: If there is something at `output` that may not be replaced.
        ValueError: If CTranslate2 cannot hold the model, or translates unlike it.
    """
    from vanilla_transformer_tools.translation.ctranslate2_conversion import convert

    with _new_folder(output, force) as folder:
        model, tokenizers = _load(model_name_or_path, trust_remote_code)
        refuse_other_models(model, "ctranslate2")
        refuse_torch_only(model.generation_config)
        engine = TorchEngine(model)
        sources = _sample_sources(engine, tokenizers.source, sample)
        for weights in dict.fromkeys(("float32", quantization)):
            convert(model, tokenizers.source, folder, weights)
            agreement = _compare_scores(engine, CTranslate2Engine(folder, device="cpu"), sources)
            agreement.check(*_TOLERANCES.get(weights, _INTEGER_TOLERANCE))
        _save_settings(model, tokenizers, folder)
    return agreement


def export_to_onnx(
    model_name_or_path: str,
    output: Path,
    *,
    quantization: str = "float32",
    sample: list[str] | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Agreement:
    """Writes a folder of ONNX graphs that Optimum and transformers.js load.

    It holds the graphs with their weights in onnx/, a config.json that says how to run them, the
    tokenizer's files, the target's in target_tokenizer/ if it has one of its own,
    generation_config.json and the record of the training run.

    Args:
        model_name_or_path: Folder or Hub name of the model.
        output: Folder to make; it appears once its translations have been compared.
        quantization: Type of the weights, `float32` or `int8`.
        sample: Lines to compare on; None: random tokens of the vocabulary.
        force: Replaces an earlier export at `output`.
        trust_remote_code: Runs the code in the folder of a model of another kind than ours.

    Returns:
        How the greedy translations of the sample compare; int8 is compared after float32, which
        must translate like the model.

    Raises:
        FileExistsError: If there is something at `output` that may not be replaced.
        ValueError: If the graphs translate unlike the model.
    """
    with _new_folder(output, force) as folder:
        model, tokenizers = _load(model_name_or_path, trust_remote_code)
        refuse_other_models(model, "onnx")
        refuse_torch_only(model.generation_config)
        return _write_onnx(model, tokenizers, folder, quantization, sample)


def export_to_web(
    model_name_or_path: str,
    output: Path,
    *,
    quantization: str = "int8",
    sample: list[str] | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
) -> Agreement:
    """Writes a folder that any static web server shows as a page that translates in the browser.

    It holds the page, transformers.js and ONNX Runtime in runtime/, and in model/ what
    `export_to_onnx` writes.

    Args:
        model_name_or_path: Folder or Hub name of the model.
        output: Folder to make; it appears once the translations have been compared.
        quantization: Type of the weights, `float32` or `int8`.
        sample: Lines to compare on; None: random tokens of the vocabulary.
        force: Replaces an earlier export at `output`.
        trust_remote_code: Runs the code in the folder of a model of another kind than ours.

    Returns:
        As `export_to_onnx`.

    Raises:
        FileExistsError: If there is something at `output` that may not be replaced.
        OSError: If npm is missing, or cannot download the runtime.
        ValueError: If the graphs translate unlike the model, or transformers.js would give other
            ids than the tokenizer.
    """
    with _new_folder(output, force) as folder:
        model, tokenizers = _load(model_name_or_path, trust_remote_code)
        refuse_other_models(model, "web")
        refuse_torch_only(model.generation_config)
        with TemporaryDirectory() as trial:
            tokenizers.save_pretrained(Path(trial))
            # Fails now rather than after minutes of conversion.
            fit_transformers_js(Path(trial))
        folder.mkdir()
        runtime(folder)
        agreement = _write_onnx(model, tokenizers, folder / MODEL_FOLDER, quantization, sample)
        # The page does without the record, which names files.
        (folder / MODEL_FOLDER / RUN_FILE).unlink()
        write_page(folder, Path(model_name_or_path).resolve().name, model, tokenizers)
    return agreement


def _write_onnx(
    model: PreTrainedModel,
    tokenizers: TokenizerPair,
    folder: Path,
    quantization: str,
    sample: list[str] | None,
) -> Agreement:
    """Writes the graphs, compares them, and quantises them if that is asked for."""
    from vanilla_transformer_tools.interop import onnx

    folder.mkdir()
    engine = TorchEngine(model)
    sources = _sample_sources(engine, tokenizers.source, sample)
    model.generation_config.save_pretrained(folder)
    onnx.export_onnx(model, folder)
    agreement = _compare_logits(engine, onnx.OnnxModel(folder), sources)
    agreement.check(*_ONNX_TOLERANCE)
    if quantization == "int8":
        onnx.quantize_onnx(folder)
        agreement = _compare_logits(engine, onnx.OnnxModel(folder), sources, is_quantized=True)
        agreement.check(*_INTEGER_TOLERANCE)
    onnx.save_interface(model, folder, quantization)
    _save_settings(model, tokenizers, folder, for_javascript=True)
    return agreement


def export_to_class(
    model_name_or_path: str, output: Path, class_name: str, *, trust_remote_code: bool = False
) -> LogitGap:
    """Writes a folder that Transformers loads as a model of a class of its own.

    It holds the weights in the dtype of the model, the tokenizer's files, the target's
    in target_tokenizer/ if it has one of its own, generation_config.json and the record of the
    training run.

    Args:
        model_name_or_path: Folder or Hub name of one of our models.
        output: Folder to make; it appears once the two models have been compared.
        class_name: One of `to_transformers.FORMATS`.
        trust_remote_code: Runs the code of a tokenizer of another kind than ours.

    Returns:
        How the logits of the two models compare in float32.

    Raises:
        FileExistsError: If there is something at `output`.
        ValueError: If the class cannot express the model, or computes something else.
    """
    if output.exists():
        raise FileExistsError(f"{str(output)!r} must not exist yet. Give another folder.")
    with _new_folder(output, force=False) as folder:
        model, tokenizers = _load(model_name_or_path, trust_remote_code, dtype="auto")
        dtype = model.dtype
        to_transformers(model, class_name).save_pretrained(folder)
        _save_settings(model, tokenizers, folder)
        name_general_tokenizers(folder)
        comparison = compare_logits(
            load_model(str(folder), dtype=torch.float32).eval(), model.float()
        )
        comparison.check(dtype)
    return comparison


def export_to_marian(
    model_name_or_path: str, output: Path, *, trust_remote_code: bool = False
) -> Agreement | None:
    """Writes a folder for Marian: model.npz, vocabularies, decoder.yml.

    It holds the tokenizer's files, too, generation_config.json and the record of the training run.

    Args:
        model_name_or_path: Folder or Hub name of one of our models.
        output: Folder to make; it appears once Marian has decoded a sample as the model does.
        trust_remote_code: Runs the code of a tokenizer of another kind than ours.

    Returns:
        How Marian's greedy translations of random tokens compare; None if Marian is not installed.

    Raises:
        FileExistsError: If there is something at `output`.
        ValueError: If Marian cannot express the model, or computes something else.
    """
    from vanilla_transformer_tools.interop.to_marian import decode, has_engine, write_marian

    if output.exists():
        raise FileExistsError(f"{str(output)!r} must not exist yet. Give another folder.")
    with _new_folder(output, force=False) as folder:
        folder.mkdir()
        model, tokenizers = _load(model_name_or_path, trust_remote_code)
        refuse_other_models(model, "marian-npz")
        write_marian(model, tokenizers, folder)
        _save_settings(model, tokenizers, folder)
        if not has_engine():
            return None
        engine = TorchEngine(model)
        sources = _sample_sources(engine, tokenizers.source, None)[::_MARIAN_SHARE]
        sides = {"source": tokenizers.source, "target": tokenizers.target}
        # Marian takes no blanks inside a token.
        read, written = (
            {row: token.rstrip(" ") for row, token in tokens_by_id(one, side).items()}
            for side, one in sides.items()
        )
        ids = {token: row for row, token in written.items()}
        decoded = decode(folder, [" ".join(read[row] for row in one[:-1]) for one in sources])
        outputs = [([ids[token] for token in text.split()], score) for text, score in decoded]
        agreement = _compare_decoded(engine, sources, outputs)
        agreement.check(*_TOLERANCES["float32"])
    return agreement


@contextmanager
def _new_folder(output: Path, force: bool) -> Iterator[Path]:
    """Name of a folder next to `output` that takes its place if all goes well.

    Raises:
        FileExistsError: If there is something at `output` that may not be replaced.
        OSError: If there is no room for the folder.
    """
    prefix = f".{output.name}.new-"
    for killed in abandoned(output.parent, prefix):
        if not output.exists():
            _restore(killed, output)
    _check_output(output, force)
    with ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            # Fails now rather than after minutes of conversion.
            scratch = stack.enter_context(scratch_folder(output.parent, prefix))
        except OSError as error:
            raise OSError(
                f"The export cannot be written to {str(output)!r}: {error.strerror}. Choose "
                "another folder."
            ) from error
        stack.enter_context(naming_full_disk(output.parent, f"the export {output.name!r}"))
        yield scratch / "new"
        share_weights(scratch / "new")
        # Comparing takes minutes, in which somebody else may have made it.
        _check_output(output, force)
        try:
            if output.exists():
                output.rename(scratch / "old")
            (scratch / "new").rename(output)
        except BaseException:
            _restore(scratch, output)
            raise


def _restore(scratch: Path, output: Path) -> None:
    """Restores the files that were to be replaced; their replacement is lost."""
    if (scratch / "old").exists():
        (scratch / "old").rename(output)


def _check_output(output: Path, force: bool) -> None:
    """Raises a FileExistsError if there is something that may not be replaced."""
    if not output.exists():
        return
    fault = f"{str(output)!r} must not exist yet, got a path that does."
    if not force:
        raise FileExistsError(
            f"{fault} Give another folder, or --force to replace an earlier export."
        )
    fault += " --force replaces an export, and nothing else"
    if not output.is_dir():
        raise FileExistsError(f"{fault}; this is a file.")
    files = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    if others := sorted(files - _EXPORTED_FILES):
        raise FileExistsError(
            f"{fault}; this holds {', '.join(others[:3])}{' and more' * (len(others) > 3)}, too. "
            "Give another folder, or take them out."
        )
    if files and not files & _WEIGHTS:
        raise FileExistsError(f"{fault}; this holds neither {' nor '.join(sorted(_WEIGHTS))}.")


def _load(
    model_name_or_path: str, trust_remote_code: bool, dtype: torch.dtype | str = torch.float32
) -> tuple[PreTrainedModel, TokenizerPair]:
    """The model and its tokenizers."""
    # First, because its errors explain what is wrong with a folder or a name.
    tokenizers = TokenizerPair.from_pretrained(
        model_name_or_path, trust_remote_code=trust_remote_code
    )
    model = load_model(
        model_name_or_path,
        dtype=dtype,
        # What the ONNX exporter can trace.
        attn_implementation="eager",
        trust_remote_code=trust_remote_code,
    )
    return model.eval(), tokenizers


def _save_settings(
    model: PreTrainedModel, tokenizers: TokenizerPair, folder: Path, *, for_javascript: bool = False
) -> None:
    """Saves the files besides weights of a Translator; the record has the longest training line."""
    tokenizers.save_pretrained(folder)
    if for_javascript:
        try:
            fit_transformers_js(folder)
        except ValueError as error:
            logger.warning("The tokenizer is for Python only. %s", error)
    model.generation_config.save_pretrained(folder)
    run = read_run(model.name_or_path) | {"files": describe_model_files(folder)}
    write_run(folder, run)


def _sample_sources(
    engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, lines: list[str] | None
) -> list[list[int]]:
    """Ids with `</s>` of lines, blank ones left out, or of random tokens; long ones last.

    Raises:
        ValueError: If there are no lines.
    """
    if lines is None:
        longest = int(min(_LONGEST_LINE, engine.last_position - 1))
        sources = random_sources(tokenizer, _SAMPLE_LINES, longest)
    else:
        texts = [line for line in lines if line.strip()]
        if not texts:
            raise ValueError(f"The sample must have lines with text, got {len(lines)} blank ones.")
        sources = tokenizer(texts)["input_ids"]
    return sorted(sources, key=len)


def _compare_scores(
    engine: TorchEngine, exported: CTranslate2Engine, sources: list[list[int]]
) -> Agreement:
    """Compares translations, and the score of each with the one that the model gives it."""
    model = engine.model
    identical, gaps = 0, []
    for batch in _batches(sources):
        limits, prefixes = _limits(engine, batch), _no_prefixes(batch)
        expected = engine.translate_batch(batch, prefixes, limits, Search())
        actual = exported.translate_batch(batch, prefixes, limits, Search())
        hypotheses = [found[0] for found in actual]
        identical += sum(a[0].tokens == b[0].tokens for a, b in zip(expected, actual, strict=True))
        targets = [one.ended for one in hypotheses]
        logits = _logits(model, batch, targets)
        # As the export normalises: over what may be generated.
        logits[:, :, never_generated(model.generation_config)] = -torch.inf
        log_probs = logits.log_softmax(-1)
        for row, target, hypothesis in zip(log_probs, targets, hypotheses, strict=True):
            mean = row[range(len(target)), target].mean().item()
            gaps.append(abs(mean - hypothesis.score))
    gap = sum(gaps) / len(gaps)
    return Agreement(len(sources), identical, gap, "log-probabilities per token")


def _compare_decoded(
    engine: TorchEngine, sources: list[list[int]], decoded: list[tuple[list[int], float]]
) -> Agreement:
    """Compares greedy translations and their log-probabilities with the model's.

    Args:
        engine: The model.
        sources: Ids with `</s>`.
        decoded: Ids without it, and the sum of the log-probabilities, including `</s>` unless
            the output reached its limit.
    """
    identical, gaps = 0, []
    end = engine.model.config.eos_token_id
    for source, (target, score) in zip(sources, decoded, strict=True):
        limits = [3 * len(source)]
        ((expected,),) = engine.translate_batch([source], [[]], limits, Search())
        identical += expected.tokens == target
        ended = target if len(target) == limits[0] else [*target, end]
        log_probs = _logits(engine.model, [source], [ended])[0].log_softmax(-1)
        ours = log_probs[range(len(ended)), ended].sum().item()
        gaps.append(abs(ours - score) / len(ended))
    gap = sum(gaps) / len(gaps)
    return Agreement(len(sources), identical, gap, "log-probabilities per token")


def _compare_logits(
    engine: TorchEngine,
    exported: "OnnxModel",
    sources: list[list[int]],
    *,
    is_quantized: bool = False,
) -> Agreement:
    """Compares the logits along the model's greedy and beam translations.

    A greedy translation is the same if each of its tokens has the largest logit of the export, too.
    Of quantised weights, log-probabilities of the translations are compared instead of all logits.
    """
    model = engine.model
    first_token = model.generation_config.forced_bos_token_id
    chosen = slice(int(first_token is not None), None)
    forbidden = never_generated(model.generation_config)
    identical, gaps = 0, [0.0]
    for batch in _batches(sources):
        limits, prefixes = _limits(engine, batch), _no_prefixes(batch)
        for num_beams in (1, _BEAMS):
            search = Search(num_beams=num_beams, first_token=first_token)
            outputs = engine.translate_batch(batch, prefixes, limits, search)
            targets = [hypotheses[0].ended for hypotheses in outputs]
            expected = _logits(model, batch, targets)
            actual = torch.from_numpy(exported.force(batch, targets))
            for row, other, target in zip(expected, actual, targets, strict=True):
                if is_quantized:
                    both = torch.stack([row, other])[:, range(len(target))].log_softmax(-1)
                    row, other = both[:, range(len(target)), target].mean(-1)
                    gaps.append((row - other).abs().item())
                else:
                    gaps.append((row - other)[: len(target)].abs().max().item())
            if num_beams == 1:
                actual[:, :, forbidden] = -torch.inf
                likeliest = actual.argmax(-1).tolist()
                identical += sum(
                    row[: len(target)][chosen] == target[chosen]
                    for row, target in zip(likeliest, targets, strict=True)
                )
    if is_quantized:
        mean = sum(gaps) / max(1, len(gaps) - 1)
        return Agreement(len(sources), identical, mean, "log-probabilities per token")
    # `max` would leave out NaN.
    return Agreement(len(sources), identical, torch.tensor(gaps).max().item(), "logits")


def _batches(sources: list[list[int]]) -> list[list[list[int]]]:
    starts = range(0, len(sources), _BATCH_LINES)
    return [sources[start : start + _BATCH_LINES] for start in starts]


def _limits(engine: TorchEngine, sources: list[list[int]]) -> list[int]:
    return [int(min(len(source) + MAX_EXTRA_TOKENS, engine.last_position)) for source in sources]


def _no_prefixes(sources: list[list[int]]) -> list[list[int]]:
    return [[] for _ in sources]


@torch.no_grad()
def _logits(model: PreTrainedModel, sources: list[list[int]], targets: list[list[int]]) -> Tensor:
    """The model's logits of the next token at each position of the targets, `[B, T, V]`."""
    filler = model.config.pad_token_id
    input_ids, attention_mask = padded(sources, filler)
    # The start token and the targets, without their last token.
    start, _ = start_and_ends(model)
    decoder_input_ids, _ = padded([[start, *row[:-1]] for row in targets], filler)
    outputs = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
        use_cache=False,
    )
    return outputs.logits
