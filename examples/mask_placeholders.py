"""Translates lines whose placeholders, addresses and tags must stay as they are.

Each is replaced by a symbol, <ph1>, <ph2> and so on, before the translation, and put back after it.
A model learns to keep the symbols if `train --symbols` names them. If an output lacks a symbol or
repeats one, the texts between the placeholders are translated one by one instead. So nothing is
lost, with any model and any engine.

python examples/mask_placeholders.py --model runs/de-en < in.de > out.en
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable

from vanilla_transformer_tools.translation import Translator

PLACEHOLDERS = re.compile(
    r"%(?:\d+\$)?[-+0#]*\d*(?:\.\d+)?[sdifuxXc@](?![A-Za-z])"  # %s, %1$s, %.2f
    r"|\{\{?[^{}\n]*\}\}?|\$\{[^{}\n]*\}"  # {name}, {{name}}, ${name}
    r"|https?://[^\s<>\"]+[^\s<>\".,;:!?)]|[\w.+-]+@[\w-]+\.[\w.-]*\w"
    r"|</?[A-Za-z][^<>\n]*>"
)


def mask(line: str) -> tuple[str, list[str]]:
    """A line with symbols for its placeholders, and the placeholders."""
    found: list[str] = []

    def replace(match: re.Match[str]) -> str:
        found.append(match[0])
        return f"<ph{len(found)}>"

    return PLACEHOLDERS.sub(replace, line), found


def unmask(text: str, found: list[str]) -> str | None:
    """The text with its placeholders; None if a symbol is missing or occurs twice."""
    symbols = [int(number) for number in re.findall(r"<ph(\d+)>", text)]
    if sorted(symbols) != list(range(1, len(found) + 1)):
        return None
    return re.sub(r"<ph(\d+)>", lambda match: found[int(match[1]) - 1], text)


def translate_around(line: str, translate: Callable[[list[str]], list[str]]) -> str:
    """A line whose texts between placeholders are translated one by one."""
    between, found = PLACEHOLDERS.split(line), PLACEHOLDERS.findall(line)
    wanted = [text for text in between if re.search(r"\w", text)]
    outputs = iter(translate(wanted))
    texts = []
    for text in between:
        if re.search(r"\w", text):
            before, after = re.match(r"\s*", text)[0], re.search(r"\s*$", text)[0]
            text = f"{before}{next(outputs).strip()}{after}"
        texts.append(text)
    return "".join(part for pair in zip(texts, [*found, ""], strict=True) for part in pair)


def translate_masked(
    lines: Iterable[str], translate: Callable[[list[str]], list[str]]
) -> list[str]:
    """Translations of lines, each with the placeholders of its source.

    Args:
        lines: Lines of text.
        translate: Translates a list of texts, with whatever engine.
    """
    lines = list(lines)
    masked = [mask(line) for line in lines]
    outputs = translate([text for text, _ in masked])
    results = []
    for line, (_, found), output in zip(lines, masked, outputs, strict=True):
        whole = unmask(output, found)
        results.append(translate_around(line, translate) if whole is None else whole)
    return results


def main() -> None:
    """Reads lines from standard input and writes their translations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder or Hub name of a model.")
    parser.add_argument("--engine", default="torch", help="Engine: torch or ctranslate2.")
    given = parser.parse_args()
    translator = Translator.from_pretrained(given.model, engine=given.engine)
    lines = [line.rstrip("\n") for line in sys.stdin]
    for line in translate_masked(
        lines, lambda texts: [t.text for t in translator.translate(texts)]
    ):
        print(line)


if __name__ == "__main__":
    main()
