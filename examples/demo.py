"""A page to try a model in the browser: translations with scores, and attention.

The same file is the `app.py` of a Space, whose variable MODEL names the model.
"""

import argparse
import html
import os
from dataclasses import replace
from functools import partial
from typing import Any

import gradio as gr
from huggingface_hub import ModelCard

from vanilla_transformer_tools.inspection.attention_maps import attention_page, read_attention
from vanilla_transformer_tools.translation import Translator

MOST_CHARACTERS, MOST_ALTERNATIVES = 1000, 10


def first_line(text: str) -> str:
    """The text up to its first line end.

    Raises:
        gr.Error: If it is blank or too long; the page shows the message.
    """
    line = text.strip().split("\n")[0]
    if not 0 < len(line) <= MOST_CHARACTERS:
        raise gr.Error(f"Type one sentence of at most {MOST_CHARACTERS} characters.")
    return line


def translate(translator: Translator, text: str, count: float = 3) -> list[list[Any]]:
    """The best translations of the first line, each with its score."""
    count, search = int(count), translator.search
    beams = max(search.num_beams, count)
    search = replace(search, num_hypotheses=count, num_beams=beams, scores=True)
    (best,) = translator.changed(search=search).translate([first_line(text)])
    return [[one.text, round(one.score, 3)] for one in best.ranked]


def attention(translator: Translator, text: str) -> str:
    """The page of attention maps of the best translation, in a frame of its own."""
    page = html.escape(attention_page(read_attention(translator, first_line(text))))
    return f'<iframe srcdoc="{page}" style="width: 100%; height: 44rem; border: 0"></iframe>'


def describe(model: str) -> tuple[str, list[str]]:
    """What the card says that the model is, and its examples; nothing without a card."""
    try:
        card = ModelCard.load(os.path.join(model, "README.md") if os.path.isdir(model) else model)
    except (OSError, ValueError):
        return "", []
    lines = [line for line in card.text.split("\n") if not line.startswith(("#", "<!--"))]
    widgets = card.data.to_dict().get("widget") or []
    return "\n".join(lines).strip().partition("\n\n")[0], [one["text"] for one in widgets]


def build_page(model: str) -> gr.Blocks:
    """The page; `model` is a folder or a Hub name."""
    translator = Translator.from_pretrained(model)
    about, examples = describe(model)
    with gr.Blocks(title=model) as page:
        gr.Markdown(f"# {os.path.basename(model)}\n\n{about}")
        text = gr.Textbox(label="Text, one sentence", max_length=MOST_CHARACTERS, autofocus=True)
        count = gr.Slider(1, MOST_ALTERNATIVES, 3, step=1, label="Translations")
        if examples:
            gr.Examples(examples, text, label="Examples")
        button = gr.Button("Translate", variant="primary")
        # Both columns fit a phone.
        table = gr.Dataframe(
            headers=["translation", "score"], column_widths=["75%", "25%"], wrap=True
        )
        gr.Markdown("The score is the log-probability per token, with the length penalty.")
        maps = gr.Button("Show attention")
        frame = gr.HTML()
        shown = partial(translate, translator)
        for event in (text.submit, button.click):
            event(shown, [text, count], table, api_name="translate")
        maps.click(partial(attention, translator), text, frame, api_name="attention")
    return page


def main() -> None:
    """Opens the page and waits for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="Folder or Hub name.")
    given = parser.parse_args()
    if not given.model:
        parser.error("--model, or the variable MODEL, needs the folder or Hub name of a model")
    try:
        page = build_page(given.model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    page.launch()


if __name__ == "__main__":
    main()
