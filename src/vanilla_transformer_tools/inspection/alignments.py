"""Word alignments that a model's cross-attention implies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer_tools.text.units import units_of_tokens
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.teacher_forcing import forced_passes
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

# Position of a unit in the source and of one in the target, both counted from 0.
Link = tuple[int, int]


@dataclass(frozen=True)
class WordAlignment:
    """Which words of a pair belong together.

    Attributes:
        links: Source and target, in order.
    """

    links: tuple[Link, ...]

    def __str__(self) -> str:
        """In Pharaoh format, such as `0-0 1-2`: source and target, counted from 0."""
        return " ".join(f"{source}-{target}" for source, target in self.links)


def align_words(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    units: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Iterator[WordAlignment]:
    """Links the words of pairs of lines by the model's attention while it reads the pair.

    The words of a target token and of the source token it attends to most (see
    `TorchEngine.force`) are linked.

    Args:
        translator: With the torch engine and fast tokenizers, which know the place of each token.
        sources: Lines.
        targets: Their translations.
        units: Words to align: sources and targets once more, with blanks between the units,
            such as segmented Chinese text. None: words are separated by blanks.

    Returns:
        The alignment of each pair, in order.

    Raises:
        ValueError: If the engine cannot read pairs, a tokenizer is not fast, the sides have
            different numbers of lines, or units do not spell the text of their line.
    """
    engine = _checked_engine(translator)
    # As the model was trained.
    sources, targets = (list(map(without_blank_ends, lines)) for lines in (sources, targets))
    columns = [sources, targets, *(units or (sources, targets))]
    if len(set(map(len, columns))) > 1:
        raise ValueError(
            "Sources, targets and their units must have the same number of lines, got "
            f"{', '.join(str(len(column)) for column in columns)}. Check that they belong together."
        )
    tag: list[set[int]] = [set() for _ in translator.tokenizers.source_prefix]
    rows = list(zip(*columns, strict=True))
    pairs = zip(sources, targets, strict=True)
    read = forced_passes(translator.tokenizers, engine, pairs, align=True)
    for lines, (source, target, forced) in zip(rows, read, strict=True):
        source_words = tag + units_of_tokens(source["offset_mapping"], lines[0], lines[2])
        target_words = units_of_tokens(target["offset_mapping"], lines[1], lines[3])
        links = {
            (source_word, target_word)
            for position, words in zip(forced.alignment, target_words, strict=True)
            for target_word in words
            for source_word in source_words[position]
        }
        yield WordAlignment(tuple(sorted(links)))


def _checked_engine(translator: Translator) -> TorchEngine:
    engine = translator.engine
    if not isinstance(engine, TorchEngine):
        raise ValueError(
            "Alignments need the engine 'torch', which can read a given translation, got "
            f"{type(engine).__name__}."
        )
    for tokenizer in (translator.tokenizer, translator.target_tokenizer):
        if not tokenizer.is_fast:
            raise ValueError(
                "Alignments need a fast tokenizer, which knows the place of each token in the "
                f"text, got {type(tokenizer).__name__}."
            )
    return engine
