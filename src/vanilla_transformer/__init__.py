"""The vanilla encoder-decoder Transformer as a Hugging Face model; importing it registers it."""

import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import logging

from . import releases
from .releases import TESTED

try:
    from .backend_vanilla_transformer import PackageBackend
    from .configuration_vanilla_transformer import VanillaTransformerConfig
    from .modeling_vanilla_transformer import (
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerModel,
        VanillaTransformerPreTrainedModel,
    )
    from .tokenization_vanilla_transformer import VanillaTransformerTokenizer
except (AttributeError, ImportError, TypeError) as error:
    raise releases.unsupported(error) from error


def _tell_of_untested(version: str) -> None:
    """Says at level INFO that a minor release of Transformers is newer than the tested ones."""
    if Version(version).release[:2] > Version(TESTED[1]).release:
        logging.get_logger(__name__).info(
            f"Transformers {version} is newer than those that vanilla_transformer was tested "
            f"with, {TESTED[0]} to {TESTED[1]}."
        )


_tell_of_untested(transformers.__version__)

try:
    from .fast_vanilla_transformer import FastBackend
except ModuleNotFoundError:
    VanillaTransformerModel.fast_backend = PackageBackend
else:
    VanillaTransformerModel.fast_backend = FastBackend

AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration)
AutoTokenizer.register(VanillaTransformerConfig, tokenizer_class=VanillaTransformerTokenizer)
releases.check(
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)

__all__ = [
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "VanillaTransformerTokenizer",
]
