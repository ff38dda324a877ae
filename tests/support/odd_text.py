"""Lines with everything that takes part in splitting text into words."""

import numpy as np

# Letters, marks, joiners, digits, signs, blanks of several kinds, and what spells special tokens,
# byte tokens and language tags.
CHARACTERS = [*"aébßç漢한12.!-<>😀", "\u0301", "\u200d", "\t", "\r", "\u00a0", "\u2028", "\x85"]
CHARACTERS += ["\x1c", "\u180e", "\u3000"]
SPELLED = ["<pad>", "</s>", "<unk>", "<0x41>", "<2de>", "<s"]


def odd_lines(size):
    """Lines of which every third has more than one blank somewhere."""
    rng = np.random.default_rng(5)
    lines = []
    for number in range(size):
        words = [
            "".join(rng.choice([*CHARACTERS, *SPELLED], rng.integers(1, 6)))
            for _ in range(rng.integers(1, 6))
        ]
        if number % 3 == 0:
            words.insert(rng.integers(len(words) + 1), "")
        lines.append(" ".join(words))
    return ["", " ", *lines]
