"""Loading what searches, and the choice of the faster engine where both find the same."""

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import cast

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer_tools.saved_folder import check_files, find_file, load_model, read_object
from vanilla_transformer_tools.settings import EngineName
from vanilla_transformer_tools.translation.conversion_cache import (
    Agreement,
    Conversion,
    cache_folder,
)
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine, patience
from vanilla_transformer_tools.translation.engines import Engine, Hypothesis, TorchEngine
from vanilla_transformer_tools.translation.search import (
    Search,
    has_several_ends,
    refuse_torch_only,
    torch_only,
)

logger = logging.getLogger(__name__)

# Lines that both engines must translate alike before CTranslate2 translates the others.
SAMPLE_LINES = 32


def load_engine(
    kind: EngineName,
    names: list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str = "auto",
    details: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Engine, GenerationConfig]:
    """Loads what searches, onto a GPU if there is one, and the defaults of its searches.

    Args:
        kind: `auto`: CTranslate2 where it finds what torch finds, and torch otherwise.
        names: Models; several are an ensemble.
        tokenizer: Of their sources.
        dtype: Of the weights while they are used; `auto`: as saved.
        details: Whether outputs are read again, which only torch can.
        trust_remote_code: Runs the code in the folder of a model of another architecture.

    Raises:
        ValueError: If a model is not whole, or several are given to CTranslate2.
        ImportError: If CTranslate2 is asked for and is not installed.
    """
    if kind == "ctranslate2":
        if len(names) > 1:
            raise ValueError(
                f"The engine 'ctranslate2' takes one model, got {len(names)}: {', '.join(names)}. "
                "Use the engine 'torch' for an ensemble."
            )
        check_files(names[0])
        compute_type = "default" if dtype == "auto" else dtype
        # First, because its errors explain what is wrong with a folder.
        exported = CTranslate2Engine(names[0], compute_type=compute_type)
        config = GenerationConfig.from_pretrained(names[0])
        refuse_torch_only(config)
        if has_several_ends(config.eos_token_id):
            raise ValueError(
                "The engine 'ctranslate2' needs one `eos_token_id` in generation_config.json, got "
                f"{config.eos_token_id}. Use the engine `torch`."
            )
        exported.patience = patience(config)
        return exported, config

    def load_torch() -> TorchEngine:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        loading = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        return TorchEngine(*(load_model(name, **loading).to(device) for name in names))

    if kind == "auto":
        cache = cache_folder()
        obstacle = next(_obstacles(names, dtype, details=details, cache=cache), None)
        if cache and obstacle is None:
            automatic = AutomaticEngine(names[0], tokenizer, cache, load_torch)
            return automatic, automatic.generation_config
        logger.debug("torch translates: %s", obstacle)
    engine = load_torch()
    return engine, engine.model.generation_config


def as_torch(engine: Engine) -> Engine:
    """The torch engine that an automatic choice falls back on; any other engine as it is."""
    return engine.torch if isinstance(engine, AutomaticEngine) else engine


def _obstacles(names: list[str], dtype: str, *, details: bool, cache: Path | None) -> Iterator[str]:
    """Why CTranslate2 cannot translate as torch would, whatever the search."""
    if cache is None:
        yield "there is no folder for conversions"
    if len(names) > 1:
        yield "several models are an ensemble"
    if details:
        yield "details are read by torch"
    if torch.accelerator.current_accelerator(check_available=True):
        yield "there is a GPU"
    try:
        import ctranslate2  # noqa: F401
    except ImportError as error:
        yield str(error)
    files = [find_file(names[0], name) for name in (CONFIG_NAME, GENERATION_CONFIG_NAME)]
    if None in files:
        yield f"{names[0]!r} lacks a config"
        return
    saved, generation = (read_object(file) for file in files if file)
    if saved.get("model_type") != VanillaTransformerConfig.model_type:
        yield f"the model is of the type {saved.get('model_type')!r}"
    if "float32" not in (dtype, saved.get("dtype") if dtype == "auto" else None):
        yield "the weights are not in float32"
    for name in torch_only(generation):
        yield f"the generation config sets `{name}`"


class AutomaticEngine:
    """Searches with CTranslate2 once a sample shows the same translations, sooner; else with torch.

    CTranslate2 searches for the one best output only: its scores, which are normalised over other
    tokens, and its samples are not those of torch. Until the sample is complete, both translate.

    Attributes:
        name: Of the engine that was chosen; empty as long as both have found the same in a sample
            that is not complete.
        max_positions: Longest source, in tokens, that the model expects.
        last_position: See `Engine`.
        generation_config: Of the model.

    Args:
        model: Folder or Hub name of one of our models, with weights in float32.
        tokenizer: Of its sources.
        cache: Where conversions are kept.
        load_torch: Loads the model.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        cache: Path,
        load_torch: Callable[[], TorchEngine],
    ) -> None:
        self._tokenizer, self._load_torch = tokenizer, load_torch
        self._agreements: dict[Search, Agreement] = {}
        # Whether CTranslate2 translates; None: the sample is not complete.
        self._verdicts: dict[Search, bool | None] = {}
        self._kept = ""
        self.name = ""
        folder = _folder(model)
        if not any(folder.glob("model*.safetensors")):
            # Fetches them from the Hub, or fails and says why.
            _ = self.torch
        config = VanillaTransformerConfig.from_pretrained(folder)
        self.max_positions: int = config.max_position_embeddings
        self.last_position = config.last_position
        self.generation_config = GenerationConfig.from_pretrained(folder)
        self._conversion = Conversion(cache, folder)
        if self._conversion.is_whole():
            check_files(model)
        else:
            # Now, so that its faults are reported before anything is translated.
            _ = self.torch

    @cached_property
    def torch(self) -> TorchEngine:
        """Loaded when it is needed."""
        return self._load_torch()

    @cached_property
    def _ctranslate2(self) -> CTranslate2Engine | None:
        """Converted when it is needed; None if that fails."""
        try:
            if not self._conversion.is_whole():
                self._conversion.make(self.torch.model, self._tokenizer)
            self._conversion.mark_used()
            return CTranslate2Engine(
                self._conversion.folder,
                device="cpu",
                compute_type="float32",
                patience=patience(self.generation_config),
            )
        except ValueError as error:
            logger.debug("torch translates: %s", error)
        except (OSError, RuntimeError) as error:
            logger.warning("torch translates, because a conversion cannot be kept: %s", error)
        return None

    def keep_to(self, name: str) -> None:
        """Searches from now on with the engine that has this name, without a sample.

        If neither has it, because CTranslate2 is of another version or cannot translate, the choice
        is made as before, and the attribute `name` is empty until then.
        """
        self._kept = name
        self._verdicts.clear()
        has_it = name == TorchEngine.name or (
            self._ctranslate2 is not None and name == self._ctranslate2.name
        )
        self.name = name if has_it else ""

    def translate_batch(
        self,
        sources: list[list[int]],
        prefixes: list[list[int]],
        limits: list[int],
        search: Search,
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate_batch`."""
        if search not in self._verdicts:
            self._judge(search, self._conversion.agreement(search))
        verdict = self._verdicts[search]
        if verdict is False or self._is_beyond_table(sources, limits):
            return self.torch.translate_batch(sources, prefixes, limits, search)
        ctranslate2 = cast(CTranslate2Engine, self._ctranslate2)
        if verdict:
            return ctranslate2.translate_batch(sources, prefixes, limits, search)
        agreement = self._agreements[search]
        count = SAMPLE_LINES - agreement.lines
        sample = sources[:count], prefixes[:count], limits[:count], search
        times = [perf_counter()]
        found = self.torch.translate_batch(*sample)
        times.append(perf_counter())
        others = ctranslate2.translate_batch(*sample)
        times.append(perf_counter())
        agreement = Agreement(
            agreement.lines + len(found),
            list(map(_best, found)) != list(map(_best, others)),
            agreement.seconds + times[2] - times[1],
            agreement.torch_seconds + times[1] - times[0],
        )
        self._conversion.keep_agreement(search, agreement)
        self._judge(search, agreement)
        if rest := sources[count:]:
            found += self.translate_batch(rest, prefixes[count:], limits[count:], search)
        return found

    def _judge(self, search: Search, agreement: Agreement) -> None:
        """Decides which engine searches, and reports it."""
        self._agreements[search] = agreement
        self._verdicts[search] = False
        chosen = "torch"
        if self._kept == TorchEngine.name:
            pass
        elif search.do_sample or search.scores or search.num_hypotheses > 1:
            logger.debug("torch translates: %s, with scores or several outputs", search)
        elif self._kept and self._ctranslate2 and self._kept == self._ctranslate2.name:
            self._verdicts[search] = True
            chosen = self._kept
        elif agreement.differs:
            logger.info("torch translates: CTranslate2 translated a line of a sample otherwise.")
        elif self._ctranslate2 is None:
            pass
        elif agreement.lines < SAMPLE_LINES:
            self._verdicts[search] = None
            chosen = ""
        elif agreement.seconds > agreement.torch_seconds:
            logger.info("torch translates: CTranslate2 was slower in a sample.")
        else:
            self._verdicts[search] = True
            chosen = self._ctranslate2.name
            logger.info(
                "%s translates: in %d lines it found the same as torch.",
                chosen,
                agreement.lines,
            )
            # Its memory is free for others; it is loaded again if it is needed.
            self.__dict__.pop("torch", None)
        self.name = chosen

    def _is_beyond_table(self, sources: list[list[int]], limits: list[int]) -> bool:
        """Whether CTranslate2 lacks positions that torch has."""
        if self._ctranslate2 is None:
            return False
        longest = max(*map(len, sources), min(max(limits), self.last_position))
        return longest > self._ctranslate2.last_position


def _folder(model: str) -> Path:
    """Folder of a model, of the Hub's cache if it comes from there."""
    return cast(Path, find_file(model, CONFIG_NAME)).parent


def _best(hypotheses: list[Hypothesis]) -> tuple[list[int], bool]:
    return hypotheses[0].tokens, hypotheses[0].reached_limit
