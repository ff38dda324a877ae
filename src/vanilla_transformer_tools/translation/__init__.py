"""Text in, text out; importing it registers the pipeline."""

from vanilla_transformer_tools.search import Search
from vanilla_transformer_tools.translation.pipeline import TranslationPipeline
from vanilla_transformer_tools.translation.results import Translation
from vanilla_transformer_tools.translation.translator import Translator

__all__ = ["Search", "Translation", "TranslationPipeline", "Translator"]
