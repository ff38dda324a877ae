"""The engine of torch: token ids in, hypotheses out."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, generation

from vanilla_transformer.backend_vanilla_transformer import SourceLengthLimit, reason_against
from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.search_vanilla_transformer import (
    IncrementalDecoder,
    beam_search,
    greedy_search,
    num_candidates,
)
from vanilla_transformer_tools.saved_folder import complete_ids
from vanilla_transformer_tools.search import Search
from vanilla_transformer_tools.text.batches import padded
from vanilla_transformer_tools.translation.engine import ForcedPass, Hypothesis
from vanilla_transformer_tools.translation.ensemble import MeanDecoding, mean_log_probs
from vanilla_transformer_tools.translation.generation_settings import (
    FIELDS_OF_A_SEARCH,
    bans,
    refuse_torch_only,
    start_and_ends,
    torch_only,
)

# Elements of the largest tensor [rows, T, V] of a teacher-forced pass: 64 MB in float32.
FORCED_LOGITS = 2**24
# Longest source of a model that names no limit: T5, whose positions are relative, learnt from this.
USUAL_POSITIONS = 512


class TorchEngine:
    """Searches with the plugin's own search, and with `generate` for models of other classes.

    Args:
        models: A sequence-to-sequence model in any dtype, on any device. Several vanilla
            Transformers with the same vocabularies are an ensemble. It searches by the mean of
            their probabilities. Of the first one's generation config, it applies `bad_words_ids`,
            `suppress_tokens` and `early_stopping` only.

    Raises:
        ValueError: If several models do not fit together.
    """

    name = "torch"

    def __init__(self, *models: PreTrainedModel) -> None:
        sizes = [
            (model.config.vocab_size, model.config.get_text_config(decoder=True).vocab_size)
            for model in models
        ]
        if len(set(sizes)) > 1:
            raise ValueError(
                "The models of an ensemble must have the same vocabularies, got sizes of source "
                f"and target {sizes}. Train them with the same tokenizer."
            )
        if len(models) > 1:
            if foreign := {type(model).__name__ for model in models if not _is_vanilla(model)}:
                raise ValueError(
                    "The models of an ensemble must be vanilla Transformers, got "
                    f"{', '.join(sorted(foreign))}. Bring them in first: vanilla-transformer "
                    "import."
                )
            tokens = [(start, *sorted(ends)) for start, ends in map(start_and_ends, models)]
            if len(set(tokens)) > 1:
                raise ValueError(
                    "The models of an ensemble must begin and end outputs alike, got "
                    f"`decoder_start_token_id` and `eos_token_id` {tokens}. Give one model."
                )
            for model in models:
                refuse_torch_only(model.generation_config, "An ensemble", "give one model")
        _, self.vocab_size = sizes[0]
        self.models = [model.eval() for model in models]
        self.model = model = models[0]
        self.max_positions: int = min(
            getattr(model.config, "max_position_embeddings", USUAL_POSITIONS) for model in models
        )
        self.last_position = min(map(_last_position, models))
        for one in models:
            complete_ids(one)
        self.start_id, ends = start_and_ends(model)
        self.end_ids = {end for end in ends if end is not None}

    @torch.inference_mode()
    def translate_batch(
        self,
        sources: list[list[int]],
        prefixes: list[list[int]],
        limits: list[int],
        search: Search,
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate_batch`; an output ends where learned positions do."""
        self.check_lengths(sources)
        limits = [int(min(limit, self.last_position)) for limit in limits]
        count = search.num_hypotheses
        # The samples of a source are adjacent rows, each with its own random numbers.
        copies = count if search.do_sample else 1
        rows = [index for index in range(len(sources)) for _ in range(copies)]
        # Without a prefix, the search itself forces the first token.
        openings = [search.opening(prefix) if prefix else [] for prefix in prefixes]
        outputs = (self._search if self._has_own_search() else self._generate)(
            [sources[row] for row in rows],
            self._tensor([[self.start_id, *openings[row]] for row in rows]),
            [limits[row] for row in rows],
            search,
        )
        # Beam search may pad rows with `</s>`; one beyond the limit does not end the output.
        hypotheses = [
            Hypothesis.of(output[: limits[index // count]], self.end_ids)
            for index, output in enumerate(outputs)
        ]
        is_ranked = search.do_sample and count > 1
        if search.scores or is_ranked:
            hypotheses = self._scored(sources, hypotheses, prefixes[0], search)
        starts = range(0, len(hypotheses), count)
        results = [hypotheses[start : start + count] for start in starts]
        if is_ranked:
            results = [sorted(group, key=lambda one: -one.score) for group in results]
        return results

    def _has_own_search(self) -> bool:
        """Whether the plugin's search takes these models and all of the generation config."""
        if len(self.models) > 1:
            return True
        config = self.model.generation_config
        others = torch_only(config).keys() - FIELDS_OF_A_SEARCH
        return (
            _is_vanilla(self.model)
            and not (others or getattr(config, "use_transformers_search", False))
            and reason_against(self.model) is None
        )

    def _generate(
        self, sources: list[list[int]], prompt: Tensor, limits: list[int], search: Search
    ) -> list[list[int]]:
        """Outputs of `generate` without the start token, padded to one length."""
        input_ids, attention_mask = self._pad(sources)
        outputs = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=prompt,
            do_sample=False,
            num_beams=search.num_beams,
            # Greedy search has no penalty, and `generate` would warn about one.
            length_penalty=search.length_penalty if search.num_beams > 1 else 1.0,
            num_return_sequences=1 if search.do_sample else search.num_hypotheses,
            repetition_penalty=search.repetition_penalty,
            no_repeat_ngram_size=search.no_repeat_ngram_size,
            # Counts the start token too. The limit of a source is stronger.
            min_length=1 + min(search.min_length, max(limits)) if search.min_length else 0,
            # Ids alone, whatever the generation config says.
            return_dict_in_generate=False,
            forced_bos_token_id=search.first_token,
            # What reaches the limit is cut there, and reported.
            forced_eos_token_id=None,
            # Counts the start token. `max_new_tokens` of the generation config would override it.
            max_length=1 + max(limits),
            max_new_tokens=None,
            stopping_criteria=[SourceLengthLimit(self._tensor(limits))],
            logits_processor=_sampling(search, sources),
        )
        rows: list[list[int]] = outputs[:, 1:].tolist()
        return rows

    def _search(
        self, sources: list[list[int]], prompt: Tensor, limits: list[int], search: Search
    ) -> list[list[int]]:
        """Outputs of the plugin's own search, without the start token."""
        input_ids, attention_mask = self._pad(sources)
        config = self.model.generation_config
        constraints = bans(config, prompt.device)
        constraints.others += self._processors(search)
        begun = prompt[:, 1:].tolist()
        beyond = [limit - len(tokens) for limit, tokens in zip(limits, begun, strict=True)]
        decodings = [
            IncrementalDecoder(
                model,
                model.get_encoder()(input_ids, attention_mask=attention_mask).last_hidden_state,
                attention_mask,
            )
            for model in self.models
        ]
        decoding = decodings[0] if len(decodings) == 1 else MeanDecoding(decodings)
        arguments = (decoding, prompt, beyond, self.end_ids, constraints)
        if search.num_beams == 1:
            noisy = _sampling(search, sources)
            draw = (lambda scores: noisy(prompt, scores).argmax(-1)) if search.do_sample else None
            found = [[tokens] for tokens in greedy_search(*arguments, draw)]
        else:
            settings = (search.num_beams, search.length_penalty, config.early_stopping or False)
            allowed = self.vocab_size - len(constraints.banned)
            if allowed < (needed := num_candidates(search.num_beams, self.end_ids)):
                raise ValueError(
                    f"{search.num_beams} beams need {needed} target tokens that are not banned, "
                    f"got {allowed}. Use fewer beams."
                )
            found = [
                [tokens for _, tokens in hypotheses[: search.num_hypotheses]]
                for hypotheses in beam_search(*arguments, *settings)
            ]
        return [
            [*tokens, *rest] for tokens, rests in zip(begun, found, strict=True) for rest in rests
        ]

    def _processors(self, search: Search) -> Iterator[generation.LogitsProcessor]:
        """The processors that `generate` makes of the same settings, in its order."""
        if search.repetition_penalty != 1:
            yield generation.RepetitionPenaltyLogitsProcessor(search.repetition_penalty)
        if search.no_repeat_ngram_size:
            yield generation.NoRepeatNGramLogitsProcessor(search.no_repeat_ngram_size)
        if search.min_length:
            ends, device = sorted(self.end_ids), str(self.model.device)
            yield generation.MinLengthLogitsProcessor(1 + search.min_length, ends, device)
        if search.first_token is not None:
            yield generation.ForcedBOSTokenLogitsProcessor(search.first_token)
        if self.model.generation_config.renormalize_logits:
            yield generation.LogitNormalization()

    @torch.inference_mode()
    def force(
        self,
        sources: list[list[int]],
        targets: list[list[int]],
        *,
        align: bool = False,
        end_length: int = 1,
        banned: Sequence[int] = (),
    ) -> Iterator[ForcedPass]:
        """Reads given outputs with their sources, all positions in one pass (teacher forcing).

        Alignments come from the mean of the heads of the decoder's last layer but one, or of its
        only one. In trained models that layer follows the words best (Garg et al. 2019, arXiv
        1909.02074); the last one predicts the next token. None is aligned to `</s>`.

        Args:
            sources: Ids with `</s>`.
            targets: Ids of outputs, with `</s>` if they ended; the same number for each source,
                the outputs of the first source first.
            align: Whether alignments are wanted; otherwise they are empty.
            end_length: Tokens at the end of each source that are no text, as `end_length` counts.
            banned: Ids that get no probability.

        Raises:
            ValueError: If a row is longer than the positions of the model.
        """
        self.check_lengths([*sources, *targets])
        copies = len(targets) // len(sources)
        width = max(map(len, targets))
        rows_at_a_time = max(1, FORCED_LOGITS // (width * self.vocab_size))
        input_ids, attention_mask = self._pad(sources)
        encoded = [
            model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)[0]
            for model in self.models
        ]
        for first in range(0, len(targets), rows_at_a_time):
            part = targets[first : first + rows_at_a_time]
            rows = self._tensor([(first + index) // copies for index in range(len(part))])
            states = [whole[rows] for whole in encoded]
            end = end_length if align else None
            yield from self._force_rows(part, states, attention_mask[rows], end, list(banned))

    def _force_rows(
        self,
        targets: list[list[int]],
        states: list[Tensor],
        mask: Tensor,
        end_length: int | None,
        banned: list[int],
    ) -> Iterator[ForcedPass]:
        """One pass over targets and the encoded source of each; aligns unless the end is None."""
        labels, _ = self._pad(targets)
        # Padded on the right: no real token sees what follows it.
        shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=self.start_id)
        align = end_length is not None
        with attention_weights(self.models) if align else nullcontext():
            outputs = [
                model(
                    encoder_outputs=(encoded,),
                    attention_mask=mask,
                    decoder_input_ids=shifted,
                    use_cache=False,
                    output_attentions=align,
                )
                for model, encoded in zip(self.models, states, strict=True)
            ]
        logits = [output.logits for output in outputs]
        for each in logits:
            each[..., banned] = -torch.inf
        log_probs = mean_log_probs(logits)
        chosen = log_probs.gather(-1, labels[..., None])[..., 0].tolist()
        alignment: list[list[int]] = [[]] * len(targets)
        if end_length is not None:
            attentions = [output.cross_attentions for output in outputs]
            alignment = _most_attended(attentions, mask.sum(-1) - end_length)
        for target, scores, positions in zip(targets, chosen, alignment, strict=True):
            yield ForcedPass(scores[: len(target)], positions[: len(target)])

    def check_lengths(self, rows: list[list[int]]) -> None:
        """Rejects ids for which the model has no positions."""
        longest = max(map(len, rows), default=0)
        if longest > self.last_position:
            raise ValueError(
                f"The positions of {self.model.config.model_type!r} end after "
                f"{self.last_position:.0f} tokens, got a sequence of {longest}. Cut it."
            )

    def _scored(
        self,
        sources: list[list[int]],
        hypotheses: list[Hypothesis],
        prefix: list[int],
        search: Search,
    ) -> list[Hypothesis]:
        forced, uncounted = len(search.opening(prefix)), search.uncounted(prefix)
        passes = self.force(sources, [hypothesis.ended for hypothesis in hypotheses])
        scores = (
            sum(one.log_probs[forced:]) / (len(one.log_probs) - uncounted) ** search.length_penalty
            for one in passes
        )
        return [replace(one, score=score) for one, score in zip(hypotheses, scores, strict=True)]

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask `[B, S]`, padded on the right."""
        ids, mask = padded(rows, self.model.config.pad_token_id)
        return ids.to(self.model.device), mask.to(self.model.device)

    def _tensor(self, rows: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self.model.device)


@contextmanager
def attention_weights(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Makes models return their attention weights: other classes only do so with `eager`."""
    others = [model for model in models if not _is_vanilla(model)]
    before = [model.config._attn_implementation for model in others]
    try:
        for model in others:
            model.set_attn_implementation("eager")
        yield
    finally:
        for model, implementation in zip(others, before, strict=True):
            model.set_attn_implementation(implementation)


def aligned_layer(layers: int) -> int:
    """Layer that alignments are read from, counted from 0; see `TorchEngine.force`."""
    return max(0, layers - 2)


def _most_attended(attentions: list[tuple[Tensor, ...]], ends: Tensor) -> list[list[int]]:
    """Source position to which each target position attends most, on average over models.

    Args:
        attentions: Weights of the layers of each model, `[B, H, T, S]`.
        ends: Place after the last word of each source, `[B]`.
    """
    layers = [weights[aligned_layer(len(weights))] for weights in attentions]
    mean = torch.stack([layer.float().mean(1) for layer in layers]).mean(0)
    is_word = torch.arange(mean.shape[-1], device=ends.device) < ends[:, None]
    positions: list[list[int]] = mean.masked_fill(~is_word[:, None], -1).argmax(-1).tolist()
    return positions


def _sampling(search: Search, sources: list[list[int]]) -> generation.LogitsProcessorList:
    """Processors that turn greedy search into sampling; none without `do_sample`.

    By the Gumbel-max trick (Gumbel 1954), the largest logit with noise is a random draw from the
    softmax. Each row has its own noise, whatever the other sentences of its batch.
    """
    processors = generation.LogitsProcessorList()
    if not search.do_sample:
        return processors
    if search.temperature != 1.0:
        processors.append(generation.TemperatureLogitsWarper(search.temperature))
    if search.top_k:
        processors.append(generation.TopKLogitsWarper(search.top_k))
    if search.top_p < 1.0:
        processors.append(generation.TopPLogitsWarper(search.top_p))
    generators = []
    for index, source in enumerate(sources):
        kind = search.seed, index % search.num_hypotheses, source
        digest = hashlib.blake2b(repr(kind).encode(), digest_size=8).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest, "big")))

    def with_noise(_: Tensor, scores: Tensor) -> Tensor:
        noise = torch.empty(scores.shape, dtype=torch.float32)
        for row, generator in zip(noise, generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.log().to(scores)

    processors.append(with_noise)
    return processors


def _is_vanilla(model: PreTrainedModel) -> bool:
    return bool(model.config.model_type == VanillaTransformerConfig.model_type)


def _last_position(model: PreTrainedModel) -> float:
    """Longest output that a model can write, in tokens."""
    if _is_vanilla(model):
        return float(model.config.last_position)
    # Tables of other classes end with their last row, apart from FSMT's, which grows.
    table = getattr(model.get_decoder(), "embed_positions", None)
    if isinstance(table, nn.Embedding) and not hasattr(table, "make_weight"):
        return float(table.num_embeddings - getattr(table, "offset", 0))
    return math.inf
