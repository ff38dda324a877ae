"""Text in, text out; importing it registers the pipeline."""

from vanilla_transformer.translation.pipeline import TranslationPipeline
from vanilla_transformer.translation.search import Search
from vanilla_transformer.translation.translator import Translation, Translator

__all__ = ["Search", "Translation", "TranslationPipeline", "Translator"]
