"""Loading what a translator needs, the rule of `--engine auto`, and the models that it converts.

The folder `ctranslate2` of the cache has a folder for each converted model, named by all that it
depends on. Only files that nobody else can have written are used. All may be deleted at any time.
"""

import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.files import (
    CACHE_VARIABLE,
    cache_folder,
    checksum,
    delete_oldest,
    mark_used,
    naming_full_disk,
    scratch_folder,
    write_lines,
)
from vanilla_transformer_tools.saved_folder import (
    FILES_FILE,
    RUN_FILE,
    TARGET_FILES,
    check_files,
    describe_files,
    describe_model_files,
    find_file,
    load_model,
    read_generation_config,
    read_object,
    read_run,
)
from vanilla_transformer_tools.settings import MAX_EXTRA_TOKENS, EngineName
from vanilla_transformer_tools.text.tokenizer_pair import language_codes, tokens_by_id
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine, patience
from vanilla_transformer_tools.translation.engines import Engine, TorchEngine
from vanilla_transformer_tools.translation.search import (
    Search,
    refuse_torch_only,
    torch_only,
)

logger = logging.getLogger(__name__)

# Sources of random tokens that a conversion must translate as torch does, and their longest.
_SAMPLE_LINES, _SAMPLE_TOKENS = 32, 20
# Width D up to which CTranslate2 is taken on any number of threads: it was ahead at 128, and at 512
# on one thread only (docs/speed.md, The automatic choice of an engine).
_NARROW = 256
# Fields of a translator with which CTranslate2 does not do the same as torch, or nothing.
_ONLY_TORCH = ("details", "replace_unknown", "markup", "do_sample", "scores", "mbr_candidates")

# Name in the record of a training: the share of its sources that have more than one sentence.
INNER_ENDS = "lines_of_several_sentences"
# Of a model of single sentences. Corpora of sentences have 0 to 1.5 %, of code 3 %.
MOST_INNER_ENDS = 0.02

# Models in the cache; those that were not used for longest are deleted.
MOST_MODELS = 8
# Finds damage, and is fast enough to be computed whenever a model is loaded.
_DIGEST = "xxh3_128"
# What a conversion depends on, besides weights and vocabularies.
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", TARGET_FILES[1])
# Folders that others cannot write to: what they put there would be translated with.
_OWN_MODE = 0o700
_CONVERTER = Path(__file__).with_name("ctranslate2_conversion.py")


def training_defaults(model_name_or_path: str) -> dict[str, Any]:
    """Arguments of a `Translator` that follow from the record of a model's training.

    Args:
        model_name_or_path: Folder or Hub name.

    Returns:
        `max_source_length`, the training's `max_length`, None if there is no record; and
        `split_sentences`, whether its lines were single sentences.

    Raises:
        ValueError: If the record is damaged.
    """
    run = read_run(model_name_or_path)
    settings = run.get("settings", {})
    length = settings.get("max_length") if isinstance(settings, dict) else settings
    if length is not None and not isinstance(length, int):
        raise ValueError(
            f"{RUN_FILE} of {model_name_or_path!r} must hold `settings` with a whole number as "
            f"`max_length`, got {length!r:.60}. Restore the file."
        )
    share = run.get(INNER_ENDS)
    is_split = isinstance(share, (int, float)) and share <= MOST_INNER_ENDS
    return {"max_source_length": length, "split_sentences": is_split}


def load_engine(
    kind: EngineName,
    names: list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
    trust_remote_code: bool,
    settings: Mapping[str, Any],
) -> tuple[Engine, GenerationConfig]:
    """Loads what searches, onto a GPU if there is one, and the defaults of its searches.

    Args:
        kind: `auto`: CTranslate2 if nothing speaks for torch, see `reasons_for_torch`.
        names: Folders or Hub names of the models; several are an ensemble.
        tokenizer: Tokenizer of the sources.
        dtype: Dtype of the weights while they are used; `auto`: as saved.
        trust_remote_code: Runs the code in the folder of a model of another architecture.
        settings: Arguments of the `Translator`.

    Raises:
        ValueError: If a model is not whole, or several are given to CTranslate2.
        ImportError: If CTranslate2 is asked for and is not installed.
    """
    if kind == "ctranslate2":
        return _load_export(names, dtype)

    @cache
    def load_torch() -> TorchEngine:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        loading = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        return TorchEngine(*(load_model(name, **loading).to(device) for name in names))

    # Without a place for conversions torch is what the user has chosen.
    if kind == "auto" and cache_folder() is not None:
        reason = next(reasons_for_torch(names, dtype, settings), "")
        try:
            if not reason:
                return _load_converted(names[0], tokenizer, load_torch)
        except (ValueError, RuntimeError) as error:
            reason = str(error)
        except OSError as error:
            reason = f"a conversion cannot be kept: {error}"
        logger.info("torch translates: %s.", reason.rstrip("."))
    engine = load_torch()
    return engine, engine.model.generation_config


def reasons_for_torch(names: list[str], dtype: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Why torch is faster than CTranslate2, or finds something else; nothing: use CTranslate2.

    Args:
        names: Folders or Hub names of the models.
        dtype: Dtype of the weights.
        settings: Arguments of the `Translator`.
    """
    search = settings.get("search")
    wanted = {**settings, **(asdict(search) if search else {})}
    differing = [f"`{name}`" for name in _ONLY_TORCH if wanted.get(name)]
    if (wanted.get("num_hypotheses") or 1) > 1:
        differing.append("several hypotheses")
    for one in differing:
        yield f"CTranslate2 does not do the same with {one}"
    if len(names) > 1:
        yield "several models are an ensemble"
    if torch.accelerator.current_accelerator(check_available=True):
        yield "there is a GPU"
    try:
        import ctranslate2  # noqa: F401
    except ImportError:
        yield "CTranslate2 is not installed"
        return
    from vanilla_transformer_tools.translation.ctranslate2_conversion import position_table_length

    file = find_file(names[0], CONFIG_NAME)
    saved = read_object(file) if file else {}
    if saved.get("model_type") != VanillaTransformerConfig.model_type:
        yield f"the model is of the type {saved.get('model_type')!r}"
        return
    if "float32" not in (dtype, saved.get("dtype") if dtype == "auto" else None):
        yield "the weights are not in float32"
    for name in torch_only(read_generation_config(names[0])):
        yield f"the generation config sets `{name}`"
    config = VanillaTransformerConfig.from_pretrained(names[0])
    longest = wanted.get("max_source_length") or config.max_position_embeddings
    longest += wanted.get("max_extra_tokens") or MAX_EXTRA_TOKENS
    if min(longest, config.last_position) > position_table_length(config):
        yield f"CTranslate2 has no positions for {longest} tokens"
    threads = torch.get_num_threads()
    if config.d_model > _NARROW and threads > 1:
        yield f"it is faster on {threads} threads for a model of width {config.d_model}"


def _load_export(names: list[str], dtype: str) -> tuple[Engine, GenerationConfig]:
    """Loads a folder that our export made."""
    if len(names) > 1:
        raise ValueError(
            f"The engine 'ctranslate2' takes one model, got {len(names)}: {', '.join(names)}. "
            "Use the engine 'torch' for an ensemble."
        )
    check_files(names[0])
    # First, because its errors explain what is wrong with a folder.
    exported = CTranslate2Engine(names[0], compute_type="default" if dtype == "auto" else dtype)
    config = GenerationConfig.from_pretrained(names[0])
    refuse_torch_only(config)
    if isinstance(config.eos_token_id, list) and len(config.eos_token_id) > 1:
        raise ValueError(
            "The engine 'ctranslate2' needs one `eos_token_id` in generation_config.json, got "
            f"{config.eos_token_id}. Use the engine `torch`."
        )
    exported.patience = patience(config)
    return exported, config


def _load_converted(
    model: str, tokenizer: PreTrainedTokenizerBase, load_torch: Callable[[], TorchEngine]
) -> tuple[Engine, GenerationConfig]:
    """Loads a model as converted for CTranslate2, which is done once, if the engines agree."""
    # In the Hub's cache if the model comes from there.
    source = cast(Path, find_file(model, CONFIG_NAME)).parent
    if not any(source.glob("model*.safetensors")):
        # Fetches them from the Hub, or fails and says why.
        load_torch()
    config = read_generation_config(model)
    folder = conversion_of(source)

    def load(converted: Path) -> CTranslate2Engine:
        return CTranslate2Engine(
            converted, device="cpu", compute_type="float32", patience=patience(config)
        )

    is_alike = agrees(folder)
    if is_alike is None:
        _convert(source, folder, load_torch(), tokenizer, load)
        is_alike = agrees(folder)
    else:
        check_files(model)
    mark_used(folder)
    if not is_alike:
        raise ValueError("CTranslate2 gave a different translation for a line of a sample")
    engine = load(folder)
    logger.info("%s translates: on this CPU it is faster for this model.", engine.name)
    return engine, config


def random_sources(tokenizer: PreTrainedTokenizerBase, lines: int, longest: int) -> list[list[int]]:
    """Ids with `</s>` of lines of random tokens, always the same.

    Args:
        tokenizer: Tokenizer of the source.
        lines: Number of lines.
        longest: Most tokens of a line, `</s>` not counted.
    """
    draw = random.Random(0)
    others = {*tokenizer.all_special_ids, *language_codes(tokenizer).values()}
    ordinary = sorted(tokens_by_id(tokenizer, "source").keys() - others)
    *_, end = tokenizer("")["input_ids"]
    return [[*draw.choices(ordinary, k=draw.randint(1, longest)), end] for _ in range(lines)]


def conversion_of(source: Path) -> Path:
    """Folder in the cache of a model as converted for CTranslate2, which may not be there yet.

    Its name is a digest of the files that a conversion depends on, and of the converters' versions.
    """
    settings = [name for name in _SETTINGS if (source / name).exists()]
    files = describe_model_files(source, _DIGEST) | describe_files(source, settings, _DIGEST)
    about = [files, version("ctranslate2"), checksum(_CONVERTER)]
    key = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    return cast(Path, cache_folder()) / "ctranslate2" / key


def agrees(folder: Path) -> bool | None:
    """Whether CTranslate2 translated a sample with a conversion as torch did.

    Returns:
        None if there is no conversion, or not as this user wrote it.
    """
    try:
        if not (_is_own(folder.parent) and _is_own(folder)):
            return None
        recorded = read_object(folder / FILES_FILE)
        is_alike = bool(recorded.pop("agrees"))
        return is_alike if recorded == _record(folder, folder.name) else None
    except (OSError, ValueError, KeyError):
        return None


def _convert(
    source: Path,
    folder: Path,
    engine: TorchEngine,
    tokenizer: PreTrainedTokenizerBase,
    load: Callable[[Path], CTranslate2Engine],
) -> None:
    """Converts a model, and records whether both engines translate random tokens alike.

    Raises:
        ValueError: If CTranslate2 cannot hold the model.
        OSError: If the cache cannot be kept, or the model's files have changed.
    """
    from vanilla_transformer_tools.translation.ctranslate2_conversion import convert

    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):
        parent.chmod(_OWN_MODE)
    if not _is_own(parent):
        raise OSError(
            f"Others can write to {str(parent)!r}. Set {CACHE_VARIABLE} to a folder of yours."
        )
    hint = f"Make room there, or set {CACHE_VARIABLE} to another folder."
    with (
        naming_full_disk(parent, "the conversion for CTranslate2", hint),
        scratch_folder(parent, ".new-") as scratch,
    ):
        new = scratch / "new"
        new.mkdir(_OWN_MODE)
        convert(engine.model, tokenizer, new)
        if conversion_of(source) != folder:
            raise OSError(f"{str(source)!r} was changed while it was loaded.")
        longest = int(min(_SAMPLE_TOKENS, engine.last_position - 1))
        sources = random_sources(tokenizer, _SAMPLE_LINES, longest)
        limits = [len(line) + _SAMPLE_TOKENS for line in sources]
        ours, theirs = (
            [(best.tokens, best.end) for (best,) in outputs]
            for one in (engine, load(new))
            for outputs in [one.translate_batch(sources, [[]] * len(sources), limits, Search())]
        )
        record = {**_record(new, folder.name), "agrees": ours == theirs}
        write_lines(new / FILES_FILE, [json.dumps(record, indent=2)])
        # Another process may have been faster, and read its files now.
        if agrees(folder) is None:
            if folder.exists():
                folder.rename(scratch / "old")
            new.rename(folder)
    delete_oldest(parent.glob("[!.]*"), MOST_MODELS)


def _record(folder: Path, key: str) -> dict[str, Any]:
    """Size and checksum of each file of a conversion, and the key of its source."""
    names = sorted(set(os.listdir(folder)) - {FILES_FILE})
    return {**describe_files(folder, names, _DIGEST), "source": {"key": key}}


def _is_own(folder: Path) -> bool:
    """Whether nobody but this user can have put something into a folder."""
    if sys.platform == "win32":
        # Folders of users are closed to others there, and modes say nothing.
        return True
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
