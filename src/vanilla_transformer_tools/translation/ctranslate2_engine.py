"""Search with CTranslate2, over a folder that `vanilla-transformer export` made."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from vanilla_transformer_tools.saved_folder import read_object
from vanilla_transformer_tools.search import Search
from vanilla_transformer_tools.translation.engine import Hypothesis

_CONFIG_FIELDS = ("position_table_length", "max_position_embeddings", "eos_token")


class CTranslate2Engine:
    """Searches as Transformers does, in CTranslate2.

    Scores are normalised over the tokens that may be generated. Those of Transformers include
    `<pad>` and `<s>`, to which a trained model gives next to no probability.
    A source of only `</s>` has the empty translation, with score 0. After a prefix, a beam finds no
    output that ends at once. Samples come from CTranslate2's own random numbers, which it seeds
    once (`ctranslate2.set_random_seed` before the engine is made): `seed` of a search has no
    effect.

    Attributes:
        name: Name of the engine, with version and type.
        max_positions: Longest source, in tokens, that the model expects.

    Args:
        folder: Folder of the exported model.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compute_type: Type to compute in, such as `int8_float32`; `default`: the one of the export,
            or else, with a message, one that the device has.
        patience: Beam search ends once there are `num_beams * patience` hypotheses. Torch's does so
            with 1 if `early_stopping` is True. By default it ends once no better one is possible: 2
            usually finds the same, 1 is faster and may find less.

    Raises:
        ImportError: If `ctranslate2` is not installed.
        ValueError: If the folder is not one that our export made.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        device: str = "auto",
        compute_type: str = "default",
        patience: int = 2,
    ) -> None:
        try:
            from ctranslate2 import Translator, __version__, get_cuda_device_count
        except ImportError as error:
            raise ImportError(
                "The engine `ctranslate2` needs the package `ctranslate2`. "
                "Install it: pip install -e '.[export]'"
            ) from error
        path = Path(folder)
        config = _read_config(path)
        self.max_positions: int = config["max_position_embeddings"]
        self.last_position: float = config["position_table_length"]
        self.end_token: str = config["eos_token"]
        threads = torch.get_num_threads()
        on_gpu = device == "cuda" or (device == "auto" and get_cuda_device_count() > 0)
        # Threads of one part of a batch would wait for each other in every step.
        self.parts = 1 if on_gpu else threads
        self.patience = patience
        try:
            self.source_tokens, self.target_tokens = (
                _read_vocabulary(path, side) for side in ("source", "target")
            )
            self.ids = {token: token_id for token_id, token in enumerate(self.target_tokens)}
            self.end_id = self.ids[self.end_token]
            self.translator = Translator(
                str(folder),
                device=device,
                compute_type=compute_type,
                inter_threads=self.parts,
                intra_threads=1,
            )
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"CTranslate2 {__version__} cannot load {str(folder)!r} on the device {device!r} "
                f"to compute in {compute_type!r}: {str(error).rstrip('.')}. Export the model again "
                "with this version, or compute in another type."
            ) from error
        finally:
            # CTranslate2 changes it to its own.
            torch.set_num_threads(threads)
        self.name = f"CTranslate2 {__version__} ({self.translator.compute_type})"

    def translate_batch(
        self,
        sources: list[list[int]],
        prefixes: list[list[int]],
        limits: list[int],
        search: Search,
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate_batch`; an output ends where the position table does.

        Raises:
            ValueError: If a source is longer than the position table.
        """
        if (longest := max(map(len, sources))) > self.last_position:
            raise ValueError(
                f"The exported model has positions for {self.last_position} tokens, got {longest}. "
                "Cut the text, or export a model with a larger `max_position_embeddings`."
            )
        least = len(search.opening(prefixes[0])) + 1
        limits = [max(int(min(limit, self.last_position)), least) for limit in limits]
        results: dict[int, list[Hypothesis]] = {}
        if not search.do_sample:
            # CTranslate2 has one limit for a batch. A search that ended before its sentence's own
            # limit gives the same result as with that limit.
            widest = self._search(range(len(sources)), sources, prefixes, max(limits), search)
            results = {
                index: hypotheses
                for index, hypotheses in widest.items()
                if limits[index] == max(limits)
                or max(len(hypothesis.ended) for hypothesis in hypotheses) < limits[index]
            }
        remaining = sorted(set(range(len(sources))) - results.keys(), key=limits.__getitem__)
        for limit, indices in groupby(remaining, key=limits.__getitem__):
            results |= self._search(list(indices), sources, prefixes, limit, search)
        return [results[index][: search.num_hypotheses] for index in range(len(sources))]

    def _search(
        self,
        indices: Sequence[int],
        sources: list[list[int]],
        prefixes: list[list[int]],
        limit: int,
        search: Search,
    ) -> dict[int, list[Hypothesis]]:
        """All that CTranslate2 finds for the sources of these indices, best first."""
        spelled = [[self.source_tokens[token] for token in sources[index]] for index in indices]
        begun = [
            [self.target_tokens[token] for token in search.opening(prefixes[index])]
            for index in indices
        ]
        length, uncounted = len(begun[0]), search.uncounted(prefixes[0])
        patience = self.patience if search.num_beams > 1 else 1
        # Beam search ignores `</s>` directly after a prefix, and would continue after it.
        least = length + 1 if length and search.num_beams > 1 else 0
        count = search.num_hypotheses
        results = self.translator.translate_batch(
            spelled,
            begun,
            beam_size=search.num_beams,
            patience=patience,
            # All that a beam finds: the longest one shows when the search ended.
            num_hypotheses=count if search.do_sample else search.num_beams * patience,
            # 1: no sampling.
            sampling_topk=search.top_k if search.do_sample else 1,
            sampling_topp=search.top_p,
            sampling_temperature=search.temperature,
            max_batch_size=-(-len(indices) // self.parts),
            max_input_length=0,
            max_decoding_length=limit,
            min_decoding_length=max(min(search.min_length, limit), least),
            repetition_penalty=search.repetition_penalty,
            no_repeat_ngram_size=search.no_repeat_ngram_size,
            length_penalty=search.length_penalty,
            return_scores=True,
            return_end_token=True,
        )
        found = (self._hypotheses(result, uncounted, search.length_penalty) for result in results)
        return dict(zip(indices, found, strict=True))

    def _hypotheses(self, result: Any, uncounted: int, length_penalty: float) -> list[Hypothesis]:
        hypotheses = []
        for words, score in zip(result.hypotheses, result.scores, strict=True):
            # An empty source has the empty translation, without an end.
            ended = not words or words[-1] == self.end_token
            # CTranslate2 counts the prefix in the length, and its probability as 1.
            generated = max(1, len(words) - uncounted)
            score *= (max(1, len(words)) / generated) ** length_penalty
            tokens = [self.ids[word] for word in (words[:-1] if ended else words)]
            hypotheses.append(Hypothesis(tokens, score, self.end_id if ended else None))
        return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


def patience(config: GenerationConfig) -> int:
    """The `patience` with which a search ends about where Transformers' search does."""
    return 1 if config.early_stopping is True else 2


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    config = read_object(file) if file.is_file() else {}
    if missing := [name for name in _CONFIG_FIELDS if name not in config]:
        raise ValueError(
            f"{str(folder)!r} must be a folder that `vanilla-transformer export --format "
            f"ctranslate2` made, got no `{missing[0]}` in its config.json. Export the model."
        )
    return config


def _read_vocabulary(folder: Path, side: str) -> list[str]:
    """Tokens by id; CTranslate2 keeps two vocabularies in one file where they are the same."""
    file = folder / f"{side}_vocabulary.json"
    if not file.exists():
        file = folder / "shared_vocabulary.json"
    tokens: list[str] = json.loads(file.read_bytes())
    return tokens
