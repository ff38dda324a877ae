"""Translates an HTML page, text by text; tags, attributes, code and comments stay as they are.

python examples/translate_html.py --model runs/de-en < seite.html > page.html
"""

import argparse
import re
import sys
from collections.abc import Iterator

from bs4 import BeautifulSoup, NavigableString

from vanilla_transformer_tools.translation import Translator

KEPT = {"script", "style", "code", "pre", "kbd", "samp", "textarea", "svg", "math", "template"}


def texts_of(soup: BeautifulSoup) -> Iterator[NavigableString]:
    """Texts to translate: those with a letter, outside of `KEPT` and of translate="no"."""
    for text in soup.find_all(string=re.compile(r"[^\W\d_]")):
        # Comments, declarations and the contents of scripts are of other classes.
        if type(text) is NavigableString and not any(
            parent.name in KEPT or parent.get("translate") == "no" for parent in text.parents
        ):
            yield text


def translate_html(page: str, translator: Translator) -> str:
    """The page with its texts translated, white space around each as before.

    A text that inline tags divide is translated in parts.
    """
    soup = BeautifulSoup(page, "html.parser")
    texts = list(texts_of(soup))
    # White space within a text means no more than a blank.
    lines = [" ".join(text.split()) for text in texts]
    for text, found in zip(texts, translator.translate(lines), strict=True):
        before, after = re.match(r"\s*", text)[0], re.search(r"\s*$", text)[0]
        text.replace_with(f"{before}{found.text.strip()}{after}")
    return soup.decode(formatter="minimal")


def main() -> None:
    """Reads a page from standard input and writes it to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder or Hub name of a model.")
    given = parser.parse_args()
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8")
    translator = Translator.from_pretrained(given.model, split_sentences=True)
    sys.stdout.write(translate_html(sys.stdin.read(), translator))


if __name__ == "__main__":
    main()
