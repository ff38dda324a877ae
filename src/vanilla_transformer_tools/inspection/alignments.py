"""Word alignments that a model's cross-attention implies."""

from collections.abc import Iterator, Sequence

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer_tools.text.units import units_of_tokens
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.teacher_forcing import force_pairs

# Position of a unit in the source and of one in the target, both counted from 0.
Link = tuple[int, int]


def align_words(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    units: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Iterator[list[Link]]:
    """The links between the words of each pair, by the model's attention while it reads the pair.

    The words of a target token and of the source token it attends to most (see
    `TorchEngine.force`) are linked.

    Args:
        translator: With the torch engine and fast tokenizers, which know the place of each token.
        sources: Lines.
        targets: Their translations.
        units: Words to align: sources and targets once more, with blanks between the units,
            such as segmented Chinese text. None: words are separated by blanks.

    Raises:
        ValueError: If the engine cannot read pairs, a tokenizer is not fast, the sides have
            different numbers of lines, or units do not spell the text of their line.
    """
    for tokenizer in (translator.tokenizer, translator.target_tokenizer):
        if not tokenizer.is_fast:
            raise ValueError(
                "Alignments need a fast tokenizer, which knows the place of each token in the "
                f"text, got {type(tokenizer).__name__}."
            )
    # As the model was trained.
    sources, targets = (list(map(without_blank_ends, lines)) for lines in (sources, targets))
    columns = [sources, targets, *(units or (sources, targets))]
    if len(set(map(len, columns))) > 1:
        raise ValueError(
            "Sources, targets and their units must have the same number of lines, got "
            f"{', '.join(str(len(column)) for column in columns)}. Check that they belong together."
        )
    tag: list[set[int]] = [set() for _ in translator.tokenizers.source_prefix]
    read = force_pairs(translator, sources, targets, align=True)
    for lines, (source, target, forced) in zip(zip(*columns, strict=True), read, strict=True):
        source_words = tag + units_of_tokens(source["offset_mapping"], lines[0], lines[2])
        target_words = units_of_tokens(target["offset_mapping"], lines[1], lines[3])
        links = {
            (source_word, target_word)
            for position, words in zip(forced.alignment, target_words, strict=True)
            for target_word in words
            for source_word in source_words[position]
        }
        yield sorted(links)
