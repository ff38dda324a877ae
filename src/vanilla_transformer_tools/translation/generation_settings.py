"""What the generation config of a model asks for besides a `Search`, and who cannot do it."""

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from vanilla_transformer.search_vanilla_transformer import Constraints

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
# Fields of a generation config that a `Search` has, and the engine of torch follows.
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
    """Rejects searches that an export, or whatever `what` names, cannot do.

    The error names all such settings, and ends with `instead`.
    """
    if fields := torch_only(generation_config):
        raise ValueError(
            f"{what} translates without these settings of generation_config.json: "
            f"{', '.join(f'{name}={value}' for name, value in fields.items())}. Delete them there, "
            f"or {instead}."
        )
