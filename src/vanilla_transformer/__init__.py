"""The vanilla encoder-decoder Transformer as a Hugging Face model; importing it registers it."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from .backend_vanilla_transformer import PackageBackend
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerPreTrainedModel,
)
from .tokenization_vanilla_transformer import VanillaTransformerTokenizer

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

__all__ = [
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "VanillaTransformerTokenizer",
]
