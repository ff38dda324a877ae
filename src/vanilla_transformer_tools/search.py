"""The description of a search, the same for options, `Translator` and engines."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Longest output beyond its source, in tokens, of section 6.1 of the paper.
MAX_EXTRA_TOKENS = 50
# Far more than any sentence has, and far less than overflows.
_MOST_EXTRA_TOKENS = 1_000_000
_ABOVE_0, _FINITE = math.ulp(0.0), sys.float_info.max


def _field(
    default: Any,
    help_text: str,
    least: float = 0,
    most: float = math.inf,
    words: str = "at least 0",
    *,
    of_model: bool = False,
) -> Any:
    """A field of a search that is an option too.

    Args:
        default: Value for a model whose generation config has none.
        help_text: Description.
        least: Smallest value.
        most: Largest value.
        words: Both in words.
        of_model: Whether the generation config of the model has the default.
    """
    metadata = {"help": help_text, "range": (least, most, words), "of_model": of_model}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Search:
    """How to search, for how many translations.

    Attributes:
        num_beams: Width of the beam; 1 is greedy.
        length_penalty: Exponent a in the rank of a finished hypothesis, log-probability / length^a
            (Transformers' definition, `</s>` counted, a forced prefix not); -20 to 20.
        do_sample: Draws translations instead of searching for likely ones.
        temperature: Divides the logits before a draw; below 1 draws likelier tokens.
        top_k: Draws among the k likeliest tokens only; 0: among all.
        top_p: Draws among the likeliest tokens that together have this probability.
        seed: Determines samples, with source and rank (engine `torch` only).
        repetition_penalty: Divisor for tokens that the output has, as in Transformers; 1: none.
        no_repeat_ngram_size: Number of tokens that an output never repeats in a row; 0: no limit.
        min_length: Shortest output in tokens, without the first token and `</s>`.
        max_extra_tokens: Most tokens of an output beyond its source's (6.1), up to 1,000,000.
        num_hypotheses: Translations of each source, best first; samples likewise, by their scores.
        scores: Whether scores are wanted; they may cost time.
        first_token: Id that each output begins with, before any prefix, such as the code of its
            language; None: the search chooses. As in Transformers, it has the probability 1, and
            counts in the length of an output without a prefix.

    Raises:
        ValueError: If a value is out of range, or if values exclude each other.
    """

    num_beams: int = _field(
        1,
        "Beam width; 1: greedy. Default: the model's, usually 4; with --do_sample 1.",
        1,
        words="at least 1",
        of_model=True,
    )
    length_penalty: float = _field(
        1.0,
        "Exponent a in log-probability / length^a, by which finished hypotheses are ranked (as in "
        "Transformers; the length includes </s>); larger values favour longer output. Default: the "
        "model's, usually 0.6; without a beam 1.",
        -20,
        20,
        # Larger powers of long outputs' lengths overflow.
        "between -20 and 20, usually 0.6 to 1",
        of_model=True,
    )
    num_hypotheses: int = field(default=1, metadata={"range": (1, math.inf, "at least 1")})
    do_sample: bool = field(
        default=False,
        metadata={
            "help": "Samples translations at random instead of searching for likely ones; several "
            "are sorted by their scores."
        },
    )
    temperature: float = _field(
        1.0,
        "For --do_sample: below 1, likely tokens get likelier.",
        # Logits divided by less may be infinite in float32.
        1e-6,
        _FINITE,
        "finite and at least 1e-06",
    )
    top_k: int = _field(0, "For --do_sample: draws only from the k likeliest tokens; 0: from all.")
    top_p: float = _field(
        1.0,
        "For --do_sample: draws only from the likeliest tokens that together have this "
        "probability.",
        _ABOVE_0,
        1,
        "above 0 and at most 1",
    )
    seed: int = _field(
        0,
        "For --do_sample with engine torch: seed; a sample depends only on it and on its line.",
        -math.inf,
    )
    repetition_penalty: float = _field(
        1.0,
        "Divides the probability of tokens that an output has already; 1: not at all. Default: the "
        "model's, usually 1.",
        _ABOVE_0,
        _FINITE,
        "finite (usually 1 to 1.5) and above 0",
        of_model=True,
    )
    no_repeat_ngram_size: int = _field(
        0,
        "An output never repeats N tokens in a row; 0: it may. Default: the model's, usually 0.",
        of_model=True,
    )
    min_length: int = _field(
        0,
        "Shortest output, in tokens without </s>. Default: the model's, usually 0.",
        of_model=True,
    )
    max_extra_tokens: int = _field(
        MAX_EXTRA_TOKENS,
        "Tokens that an output may have more than its source (section 6.1 of the paper).",
        0,
        _MOST_EXTRA_TOKENS,
        f"between 0 and {_MOST_EXTRA_TOKENS:,}",
    )
    scores: bool = False
    first_token: int | None = None

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError("\n".join(faults))

    def _faults(self) -> Iterator[str]:
        for item in fields(self):
            value = getattr(self, item.name)
            least, most, words = item.metadata.get("range", (value, value, ""))
            # Written so that NaN fails.
            if value is not None and not least <= value <= most:
                yield f"`{item.name}` must be {words}, got {value}."
        if self.do_sample and self.num_beams > 1:
            yield f"Sampling has no beams: `num_beams` must be 1, got {self.num_beams}."
        if not self.do_sample and self.num_hypotheses > self.num_beams:
            yield (
                f"`num_hypotheses` must be at most `num_beams`, got {self.num_hypotheses} and "
                f"{self.num_beams}. Widen the beam, or sample."
            )
        if not self.do_sample and (self.temperature, self.top_k, self.top_p) != (1.0, 0, 1.0):
            yield (
                "`temperature`, `top_k` and `top_p` need `do_sample`, got "
                f"{self.temperature}, {self.top_k} and {self.top_p} without it."
            )

    @classmethod
    def of(cls, config: "GenerationConfig", **settings: Any) -> Self:
        """A search whose defaults come from a generation config.

        Args:
            config: Its `num_beams`, `length_penalty`, `repetition_penalty`, `no_repeat_ngram_size`
                and `min_length`, which counts the start token, are the defaults of a search;
                samples have no beam, and without a beam the length penalty is 1.
            settings: Fields of the class; None: the default.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        defaults = {
            item.name: getattr(config, item.name)
            for item in fields(cls)
            if item.metadata.get("of_model")
        }
        defaults["min_length"] = max(0, (config.min_length or 0) - 1)
        if given.get("do_sample"):
            defaults["num_beams"] = 1
        # The config of a new model leaves some open.
        given = {name: value for name, value in defaults.items() if value is not None} | given
        if given.get("num_beams", 1) == 1 and settings.get("length_penalty") is None:
            given["length_penalty"] = 1.0
        return cls(**given)

    def opening(self, prefix: list[int]) -> list[int]:
        """Ids that an output begins with."""
        return [*([] if self.first_token is None else [self.first_token]), *prefix]

    def uncounted(self, prefix: list[int]) -> int:
        """Number of tokens that the length of an output does not count."""
        return len(self.opening(prefix)) if prefix else 0

    def __str__(self) -> str:
        """Description for a report of scores, such as `beam 4, length penalty 0.6`."""
        words = {
            "greedy": self.num_beams == 1 and not self.do_sample,
            f"beam {self.num_beams}, length penalty {self.length_penalty}": self.num_beams > 1,
            f"sampling, temperature {self.temperature}": self.do_sample,
            f"top_k {self.top_k}": self.top_k > 0,
            f"top_p {self.top_p}": self.top_p < 1,
            f"seed {self.seed}": self.do_sample,
            f"repetition penalty {self.repetition_penalty}": self.repetition_penalty != 1,
            f"no repeated {self.no_repeat_ngram_size}-grams": self.no_repeat_ngram_size > 0,
            f"at least {self.min_length} tokens": self.min_length > 0,
        }
        return ", ".join(word for word, is_said in words.items() if is_said)
