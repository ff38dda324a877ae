"""Text in, text out."""

from vanilla_transformer.translation.translator import Translation, Translator

__all__ = ["Translation", "Translator"]
