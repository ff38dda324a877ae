"""Weights in and out; a model is kept only if it computes what its source does."""

from transformers import GenerationConfig

from vanilla_transformer.modeling.search_vanilla_transformer import Constraints


def never_generated(generation_config: GenerationConfig) -> list[int]:
    """Ids that are never generated: `<pad>` and `<s>`, unless the model's owner chose others.

    Raises:
        ValueError: If sequences of several tokens are forbidden, which an export cannot express.
    """
    constraints = Constraints.of(generation_config)
    if constraints.others:
        sequences = [ids for ids in generation_config.bad_words_ids if len(ids) != 1]
        raise ValueError(
            "`bad_words_ids` of the generation config must name single tokens, which are then "
            f"never generated, got {sequences}. Leave them out, or use the engine `torch`."
        )
    return sorted(constraints.banned)
