"""Fragments of HTML about numbers, and what belongs in their tags when a translation runs back."""

import random
from html.parser import HTMLParser

from number_words import english, german

from .aligned_numbers import NUMBERS

_INLINE = ("b", "i", "em", "a", "span", "code", "u")


class Outline(HTMLParser):
    """The elements of a fragment with the words in each, and whether all are closed in order."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.is_balanced = True
        self.words: dict[str, list[str]] = {}
        self.text = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(fragment)
        self.close()
        self.is_balanced &= not self._open

    def handle_starttag(self, tag, attrs):
        self._open.append((tag, dict(attrs).get("id")))
        self.words.setdefault(self._open[-1][1], [])

    def handle_endtag(self, tag):
        self.is_balanced &= bool(self._open) and self._open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        for _, name in self._open:
            if name is not None:
                self.words[name] += data.split()


def draw_fragment(rng: random.Random) -> tuple[str, dict[str, list[str]], int]:
    """A fragment, the words of the translation that belong in its inline tags, and its numbers.

    Inline tags have an `id`; the order of words in a tag does not matter.
    """
    expected: dict[str, list[str]] = {}
    count = 0

    def words(number: int, depth: int = 0) -> tuple[list[str], list[str]]:
        """Parts of a line, and the words of the translation."""
        nonlocal count
        parts, translated = [], []
        while number > 0:
            if number > 1 and depth < 2 and rng.random() < 0.4:
                size = rng.randint(1, min(2, number))
                inner, of_inner = words(size, depth + 1)
                tag, name = rng.choice(_INLINE), f"{len(expected)}"
                expected[name] = of_inner
                href = ' href="?a=1&amp;b=2"' if tag == "a" else ""
                parts.append(f'<{tag} id="{name}"{href}>{" ".join(inner)}</{tag}>')
                number, translated = number - size, translated + of_inner
            else:
                one = rng.choice(NUMBERS)
                shown = german(one)
                if rng.random() < 0.2:
                    shown = shown.replace("ü", "&uuml;").replace("s", "&#115;")
                parts.append(shown)
                translated.append(english(one))
                number, count = number - 1, count + 1
        return parts, translated

    lines = (" ".join(words(rng.randint(1, 4))[0]) for _ in range(2))
    return "\n".join(f"<p>{line}</p>" for line in lines), expected, count
