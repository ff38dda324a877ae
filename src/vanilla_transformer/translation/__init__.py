"""Text in, text out."""

from vanilla_transformer.translation.search import Search
from vanilla_transformer.translation.translator import Translation, Translator

__all__ = ["Search", "Translation", "Translator"]
