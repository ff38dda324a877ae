"""The searches of the package behind `generate`, and the door to what is fast.

A saved folder carries no such file: there Transformers' searches run, with the same results.
`fast_vanilla_transformer.py` adds kernels, layouts of weights and the loss in chunks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, generation
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module
from transformers.utils import logging

from .generation_vanilla_transformer import SETTINGS
from .modeling_vanilla_transformer import Backend
from .search_vanilla_transformer import Constraints, IncrementalDecoder, beam_search, greedy_search

logger = logging.get_logger(__name__)

# These look at single rows only, so rows may leave the batch.
ROWWISE_PROCESSORS = (
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.LogitNormalization,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SuppressTokensLogitsProcessor,
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
)
# Settings that choose another search than greedy search, sampling and beam search, or a cache.
OTHER_SEARCHES = (
    "assistant_early_exit",
    "cache_implementation",
    "constraints",
    "dola_layers",
    "force_words_ids",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "use_mtp",
)
# Arguments of `generate` that these searches support, or that nothing reads.
KNOWN_INPUTS = {
    *("attention_mask", "custom_generate", "decoder_input_ids", "encoder_outputs", "input_ids"),
    *("inputs", "inputs_embeds", "labels", "logits_processor", "stopping_criteria", "tokenizer"),
}


class SourceLengthLimit(generation.StoppingCriteria):
    """Ends each sentence at its own limit, whatever batch it is in.

    The limits `[B]` are in tokens, start token not counted.
    """

    def __init__(self, limits: Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each of the B * beams hypotheses `[B * beams, T]` has reached its limit."""
        beams = len(input_ids) // len(self.limits)
        return input_ids.shape[1] - 1 >= self.limits.repeat_interleave(beams)


class PackageBackend(Backend):
    """Runs greedy search, sampling and beam search by `search_vanilla_transformer.py`."""

    def generate(
        self, model: Any, use_transformers_search: bool | None = None, **arguments: Any
    ) -> Any:
        """As `Backend.generate`, with the searches of the package where they find the same."""
        reason = "`use_transformers_search` is set" if use_transformers_search else None
        reason = reason or _reason_against_call(model, arguments) or reason_against(model)

        def search(
            model: Any,
            input_ids: Tensor,
            logits_processor: generation.LogitsProcessorList,
            stopping_criteria: generation.StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            # Settings make processors too, which are known only now.
            if reason := _reason_against_parts((*logits_processor, *stopping_criteria)):
                return self._hand_over(model, reason, arguments)
            logger.debug("`generate` runs the search of vanilla_transformer.")
            parts = (input_ids, logits_processor, stopping_criteria, generation_config)
            return _outputs(model, *parts, **model_kwargs)

        if reason:
            return self._hand_over(model, reason, arguments)
        return super().generate(model, **{**arguments, "custom_generate": search})

    def _hand_over(self, model: Any, reason: str, arguments: dict[str, Any]) -> Any:
        logger.debug(f"`generate` runs Transformers' search, because {reason}.")
        return super().generate(model, **arguments)


def _outputs(
    model: Any,
    prompts: Tensor,
    logits_processor: Iterable[generation.LogitsProcessor],
    stopping_criteria: Iterable[generation.StoppingCriteria],
    config: GenerationConfig,
    encoder_outputs: Any,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Prompts and outputs of a call of `generate`, padded to one length, `[B * outputs, T]`.

    Prompts `[B * beams, P]`, the output of the encoder `[B * beams, S, D]` and its mask
    `[B * beams, S]` have a row for each hypothesis. `others`, such as an empty cache, are unused.
    """
    beams = config.num_beams
    source, mask = encoder_outputs[0][::beams], attention_mask
    mask = mask if mask is None else mask[::beams]
    prompts = prompts[::beams]
    limits, ends = _limits_and_ends(stopping_criteria, *prompts.shape)
    decoding, constraints = IncrementalDecoder(model, source, mask), Constraints(logits_processor)
    arguments = (decoding, prompts, limits, ends, constraints)
    own = config.eos_token_id
    first_end = own[0] if isinstance(own, list) else own
    fill, count = first_end if config.pad_token_id is None else config.pad_token_id, 1
    if beams == 1:
        outputs = greedy_search(*arguments, _draw if config.do_sample else None)
    else:
        found = beam_search(*arguments, beams, config.length_penalty, config.early_stopping)
        count = config.num_return_sequences
        outputs = [tokens for hypotheses in found for _, tokens in hypotheses[:count]]
        # Transformers pads the outputs of beams with the padding token only if its id is not 0.
        fill = fill or first_end
    rows = [torch.tensor(tokens, dtype=torch.long) for tokens in outputs]
    filled = pad_sequence(rows, batch_first=True, padding_value=fill or 0)
    prompts = prompts.repeat_interleave(count, 0)
    return torch.cat((prompts, filled.to(prompts.device)), dim=-1)


def _reason_against_call(model: Any, arguments: dict[str, Any]) -> str | None:
    """Why these searches do not support a call of `generate`; None: they do."""

    def setting(name: str) -> Any:
        own = getattr(model.generation_config, name, None)
        return arguments[name] if arguments.get(name) is not None else own

    plain = (None, False, "dynamic")
    others = [f"`{name}` is set" for name in OTHER_SEARCHES if setting(name) not in plain]
    are_grouped = (setting("num_beam_groups") or 1) > 1
    if (setting("num_beams") or 1) > 1 and (setting("do_sample") or are_grouped):
        others.append("beams are drawn (`do_sample`) or grouped (`num_beam_groups`)")
    if setting("use_cache") is False:
        others.append("`use_cache` is not set")
    given = arguments.keys() - SETTINGS - KNOWN_INPUTS
    given = {name for name in given if not (arguments[name] is None or arguments[name] is False)}
    if given:
        others.append(f"{' and '.join(f'`{name}`' for name in sorted(given))} is given")
    if arguments.get("custom_generate") is not None:
        others.append("`custom_generate` is given")
    is_one_of_several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_one_of_several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        others.append("all processes have to take the same number of steps")
    parts = (*(arguments.get("logits_processor") or ()), *arguments["stopping_criteria"])
    return next(iter(others), None) or _reason_against_parts(parts)


def _reason_against_parts(parts: Sequence[Any]) -> str | None:
    """Why these searches do not support logits processors and stopping criteria."""
    # These searches apply criteria without calling them.
    criteria = (generation.EosTokenCriteria, generation.MaxLengthCriteria, SourceLengthLimit)
    known = (*ROWWISE_PROCESSORS, *criteria)
    foreign = [type(part).__name__ for part in parts if type(part) not in known]
    names = " and ".join(foreign)
    return f"{names} is not known to look at single rows only" if foreign else None


def reason_against(model: Any) -> str | None:
    """Why only Transformers' searches support a model; None: these do, too.

    Hypotheses take the axis of target positions, which other classes of attention may read
    differently. Modules inside of a layer may be anything: they are called.
    """
    if (kernel := model.config._attn_implementation) not in ("eager", "sdpa"):
        return f"attention runs with {kernel!r}, which takes no mask of another form"
    stack = model.model.decoder
    attentions = [part for layer in stack.layers for part in _attentions(layer)]
    kinds = map(type, (model, model.model, stack, *stack.layers, *attentions))
    if not all(map(_is_ours, kinds)) or any(map(_is_changed, (model, model.model, stack))):
        return "other code than this package's decodes: a hook, a subclass or another method"
    return None


def _attentions(layer: nn.Module) -> list[nn.Module]:
    return [child for name, child in layer.named_children() if name.endswith("_attn")]


def _is_ours(kind: type) -> bool:
    """Whether a class, FSDP's changes aside, is this package's and no subclass of it."""
    kind = kind.__bases__[-1] if hasattr(kind, "unshard") else kind
    return kind.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def _is_changed(stage: nn.Module) -> bool:
    """Whether a call of a stage runs more than its class says; a search does not call it."""
    method: Any = vars(stage).get("forward")
    if getattr(method, "__module__", None) == "accelerate.utils.operations":
        # Accelerate's autocast, with outputs in float32: a search keeps the precision of weights.
        while hasattr(method, "__wrapped__") and method is not type(stage).forward:
            method = method.__wrapped__
    is_replaced = method not in (None, type(stage).forward)
    # PEFT puts the prefix of prefix tuning in there.
    is_replaced |= "prepare_inputs_for_generation" in vars(stage)
    return bool(is_replaced or stage._forward_hooks or stage._forward_pre_hooks)


def _limits_and_ends(
    stopping_criteria: Iterable[Any], sentences: int, prompt_length: int
) -> tuple[list[int], set[int]]:
    """Longest output of each sentence in tokens, prompt not counted, and what ends one."""
    limits = torch.full((sentences,), torch.iinfo(torch.long).max, device="cpu")
    ends: set[int] = set()
    for criterion in stopping_criteria:
        if isinstance(criterion, generation.EosTokenCriteria):
            ends.update(criterion.eos_token_id.tolist())
        elif isinstance(criterion, generation.MaxLengthCriteria):
            limits = limits.clamp(max=criterion.max_length - prompt_length)
        else:
            own = criterion.limits.cpu().repeat_interleave(sentences // len(criterion.limits))
            limits = limits.minimum(own + 1 - prompt_length)
    found: list[int] = limits.tolist()
    return found, ends


def _draw(scores: Tensor) -> Tensor:
    """A token of each row `[B]`, as Transformers draws it."""
    return scores.softmax(-1).multinomial(1).squeeze(1)
