"""The settings of a search, the same for every engine."""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from vanilla_transformer.fast_search_vanilla_transformer import Constraints
from vanilla_transformer_tools.settings import MAX_EXTRA_TOKENS

# Far more than any sentence has, and far less than overflows.
_MOST_EXTRA_TOKENS = 1_000_000
_ABOVE_0, _FINITE = math.ulp(0.0), sys.float_info.max
# Least and most of each number, and both in words.
_RANGES = {
    "num_beams": (1, math.inf, "at least 1"),
    "num_hypotheses": (1, math.inf, "at least 1"),
    "top_k": (0, math.inf, "at least 0"),
    "no_repeat_ngram_size": (0, math.inf, "at least 0"),
    "min_length": (0, math.inf, "at least 0"),
    # Larger powers of long outputs' lengths overflow.
    "length_penalty": (-20, 20, "between -20 and 20, usually 0.6 to 1"),
    # Logits divided by less may be infinite in float32.
    "temperature": (1e-6, _FINITE, "finite and at least 1e-06"),
    "repetition_penalty": (_ABOVE_0, _FINITE, "finite (usually 1 to 1.5) and above 0"),
    "top_p": (_ABOVE_0, 1, "above 0 and at most 1"),
    "max_extra_tokens": (0, _MOST_EXTRA_TOKENS, f"between 0 and {_MOST_EXTRA_TOKENS:,}"),
}

# Fields of a generation config that an export or a `Search` takes over, or that have no effect on a
# search for the likeliest output. `renormalize_logits` is what CTranslate2 does anyway.
_HARMLESS_FIELDS = {
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("bad_words_ids", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("num_beams", "length_penalty", "early_stopping", "num_return_sequences"),
    *("max_length", "max_new_tokens"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "renormalize_logits", "use_cache"),
    *("use_transformers_search", "transformers_version", "_from_model_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
}
# Fields of a generation config that `Search.of` takes over, and the engine of torch follows.
FIELDS_OF_A_SEARCH = {"repetition_penalty", "no_repeat_ngram_size", "min_length"}
# Values with which the other fields have no effect.
_NO_EFFECT = {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class Search:
    """How to search, for how many translations.

    Attributes:
        num_beams: Width of the beam; 1 is greedy.
        length_penalty: Exponent a in the rank of a finished hypothesis, log-probability / length^a
            (Transformers' definition, `</s>` counted, a forced prefix not); -20 to 20.
        num_hypotheses: Translations of each source, best first.
        do_sample: Draws translations instead of searching for likely ones.
        temperature: Divides the logits before a draw; below 1 draws likelier tokens.
        top_k: Draws among the k likeliest tokens only; 0: among all.
        top_p: Draws among the likeliest tokens that together have this probability.
        repetition_penalty: Divisor for tokens that the output has, as in Transformers; 1: none.
        no_repeat_ngram_size: Number of tokens that an output never repeats in a row; 0: no limit.
        min_length: Shortest output in tokens, without the first token and `</s>`.
        seed: Determines samples, with source and rank (`TorchEngine`; CTranslate2 has its own).
        mbr_candidates: Ranks this number of samples, or of best hypotheses, of each source by
            minimum Bayes risk (see `rank_by_utility`); 0: by probability.
        max_extra_tokens: Most tokens of an output beyond its source's (6.1), up to 1,000,000.
        scores: Whether scores are wanted; they may cost time.
        first_token: Id that each output begins with, before any prefix, such as the code of its
            language; None: the search chooses. As in Transformers, it has the probability 1, and
            counts in the length of an output without a prefix.

    Raises:
        ValueError: If a value is out of range, or if values exclude each other.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    num_hypotheses: int = 1
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    mbr_candidates: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    max_extra_tokens: int = MAX_EXTRA_TOKENS
    scores: bool = False
    first_token: int | None = None

    def __post_init__(self) -> None:
        # Written so that NaN fails.
        faults = [
            f"`{name}` must be {words}, got {getattr(self, name)}."
            for name, (least, most, words) in _RANGES.items()
            if not least <= getattr(self, name) <= most
        ]
        faults += self._contradictions()
        if faults:
            raise ValueError("\n".join(faults))

    def _contradictions(self) -> list[str]:
        faults = []
        if self.mbr_candidates < 0 or 0 < self.mbr_candidates < self.num_hypotheses:
            faults.append(
                "`mbr_candidates` must be 0 or at least `num_hypotheses`, got "
                f"{self.mbr_candidates} and {self.num_hypotheses}."
            )
        if self.do_sample and self.num_beams > 1:
            faults.append(f"Sampling has no beams: `num_beams` must be 1, got {self.num_beams}.")
        largest = max(self.mbr_candidates, self.num_hypotheses)
        if not self.do_sample and largest > self.num_beams:
            name = "mbr_candidates" if self.mbr_candidates == largest else "num_hypotheses"
            faults.append(
                f"`{name}` must be at most `num_beams`, got {largest} and {self.num_beams}. Widen "
                "the beam, or sample."
            )
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            faults.append(
                "`temperature`, `top_k` and `top_p` need `do_sample`, got "
                f"{self.temperature}, {self.top_k} and {self.top_p} without it."
            )
        return faults

    @classmethod
    def of(cls, config: GenerationConfig, **settings: Any) -> Self:
        """A search whose defaults come from a generation config.

        Args:
            config: Its `num_beams`, `length_penalty`, `repetition_penalty`, `no_repeat_ngram_size`
                and `min_length`, which counts the start token, are the defaults of a search;
                samples have no beam, and without a beam the length penalty is 1.
            settings: Fields of the class; None: the default.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        # The config of a new model leaves both open.
        if config.num_beams is not None and not given.get("do_sample"):
            given.setdefault("num_beams", config.num_beams)
        if config.length_penalty is not None and given.get("num_beams", 1) > 1:
            given.setdefault("length_penalty", config.length_penalty)
        for name in ("repetition_penalty", "no_repeat_ngram_size"):
            if getattr(config, name) is not None:
                given.setdefault(name, getattr(config, name))
        given.setdefault("min_length", max(0, (config.min_length or 0) - 1))
        return cls(**given)

    def opening(self, prefix: list[int]) -> list[int]:
        """Ids that an output begins with."""
        return [*([] if self.first_token is None else [self.first_token]), *prefix]

    def uncounted(self, prefix: list[int]) -> int:
        """Number of tokens that the length of an output does not count."""
        return len(self.opening(prefix)) if prefix else 0

    def of_candidates(self) -> Self:
        """The search for the candidates of minimum Bayes risk; without it, the same search."""
        if not self.mbr_candidates:
            return self
        return replace(
            self,
            num_hypotheses=self.mbr_candidates,
            mbr_candidates=0,
            # Samples have equal weights, others their probabilities.
            scores=not self.do_sample,
        )

    def __str__(self) -> str:
        """Description for a report of scores, such as `beam 4, length penalty 0.6`."""
        searching = {
            "greedy": self.num_beams == 1 and not self.do_sample,
            f"beam {self.num_beams}, length penalty {self.length_penalty}": self.num_beams > 1,
            f"sampling, temperature {self.temperature}": self.do_sample,
            f"top_k {self.top_k}": self.top_k > 0,
            f"top_p {self.top_p}": self.top_p < 1,
            f"seed {self.seed}": self.do_sample,
        }
        words = {
            f"MBR (chrF) of {self.mbr_candidates} candidates": self.mbr_candidates > 0,
            **searching,
            f"repetition penalty {self.repetition_penalty}": self.repetition_penalty != 1,
            f"no repeated {self.no_repeat_ngram_size}-grams": self.no_repeat_ngram_size > 0,
            f"at least {self.min_length} tokens": self.min_length > 0,
        }
        return ", ".join(word for word, is_said in words.items() if is_said)


def bans(config: GenerationConfig, device: torch.device | str = "cpu") -> Constraints:
    """The `suppress_tokens` and `bad_words_ids` of a generation config, for scores on a device."""
    processors: list[LogitsProcessor] = []
    if config.suppress_tokens:
        processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    if config.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, config.eos_token_id))
    return Constraints(processors)


def never_generated(generation_config: GenerationConfig) -> list[int]:
    """Ids that are never generated: `<pad>` and `<s>`, unless the model's owner chose others.

    Raises:
        ValueError: If sequences of several tokens are forbidden, which an export cannot express.
    """
    constraints = bans(generation_config)
    if constraints.others:
        sequences = [ids for ids in generation_config.bad_words_ids if len(ids) != 1]
        raise ValueError(
            "`bad_words_ids` of the generation config must name single tokens, which are then "
            f"never generated, got {sequences}. Leave them out, or use the engine `torch`."
        )
    return sorted(constraints.banned)


def start_and_ends(model: PreTrainedModel) -> tuple[Any, list[Any]]:
    """Ids of the token that the decoder reads first, and of those that end an output.

    The generation config decides, and where it names none the config of the model.
    """
    configs = model.generation_config, model.config
    start, end = (
        next((value for config in configs if (value := getattr(config, name)) is not None), None)
        for name in ("decoder_start_token_id", "eos_token_id")
    )
    return start, end if isinstance(end, list) else [end]


def torch_only(generation_config: GenerationConfig) -> dict[str, Any]:
    """Fields of a generation config with which no other engine finds what torch finds."""
    return {
        name: value
        for name, value in generation_config.to_diff_dict().items()
        if name not in _HARMLESS_FIELDS and value not in (None, _NO_EFFECT.get(name))
    }


def refuse_torch_only(
    generation_config: GenerationConfig,
    what: str = "An export",
    instead: str = "use the engine `torch`",
) -> None:
    """Rejects searches that an export, or an ensemble, cannot do.

    Args:
        generation_config: Generation config of the model.
        what: Subject of the message, which cannot do them.
        instead: Advice that the message ends with.

    Raises:
        ValueError: If there are such settings; the message names all.
    """
    if fields := torch_only(generation_config):
        raise ValueError(
            f"{what} translates without these settings of generation_config.json: "
            f"{', '.join(f'{name}={value}' for name, value in fields.items())}. Delete them there, "
            f"or {instead}."
        )
