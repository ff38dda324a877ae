"""Saves a small model with random weights, its tokenizer, and what it writes: `save.py FOLDER`.

Runs with every release of this package and of Transformers. Also imported by `load.py`.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

TEXTS = ["Ein Hund rennt.", "Zwei alte Männer schlafen im Garten.", "Ja"]
EXPECTED = "expected.json"


class Collector(BaseStreamer):
    """Keeps the tokens that `generate` streams."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Receives one token, or the first ones."""
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Receives the end."""


def search(**options: Any) -> Callable[[Any, Any], Any]:
    """A mode: `generate` with options, seeded."""

    def run(model: Any, inputs: Any) -> Any:
        torch.manual_seed(7)
        found = model.generate(**inputs, max_new_tokens=9, **options)
        return getattr(found, "sequences", found).tolist()

    return run


def prefixed(model: Any, inputs: Any) -> Any:
    """Continues a target of three tokens."""
    start = torch.tensor([[model.config.decoder_start_token_id, 7, 9]] * len(inputs["input_ids"]))
    return search(num_beams=2)(model, {**inputs, "decoder_input_ids": start})


def streamed(model: Any, inputs: Any) -> Any:
    """Tokens of one sentence as they are chosen."""
    collector = Collector()
    first = {name: value[1:2] for name, value in inputs.items()}
    model.generate(**first, max_new_tokens=9, num_beams=1, streamer=collector)
    return collector.tokens


def assisted(model: Any, inputs: Any) -> Any:
    """Greedy search on drafts, one sentence at a time as Transformers asks."""
    # The model drafts for itself: each draft is accepted.
    return [
        search(assistant_model=model)(
            model, {name: value[row : row + 1] for name, value in inputs.items()}
        )
        for row in range(len(inputs["input_ids"]))
    ]


def stepwise(model: Any, inputs: Any) -> Any:
    """Scores after two target tokens that are read one after the other, with the cache."""
    start = torch.full((len(inputs["input_ids"]), 1), model.config.decoder_start_token_id)
    first = model(**inputs, decoder_input_ids=start, use_cache=True)
    second = model(
        **inputs, decoder_input_ids=start + 5, past_key_values=first.past_key_values, use_cache=True
    )
    return second.logits[:, -1, :4].tolist()


def learned(model: Any, inputs: Any) -> Any:
    """The loss, and the norm of its gradient."""
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    squares = [weights.grad.square().sum() for weights in model.parameters()]
    return [loss.item(), float(sum(squares)) ** 0.5]


MODES: dict[str, Callable[[Any, Any], Any]] = {
    "loss": learned,
    "cache": stepwise,
    "greedy": search(num_beams=1),
    "beams": search(num_beams=3),
    "sampling": search(do_sample=True, top_k=9),
    "sampled beams": search(do_sample=True, num_beams=3, top_k=9),
    "static cache": search(num_beams=1, cache_implementation="static", disable_compile=True),
    "dictionary": search(num_beams=3, return_dict_in_generate=True, output_scores=True),
    "Transformers' search": search(num_beams=3, use_transformers_search=True),
    "prefix": prefixed,
    "streamer": streamed,
    "assistant": assisted,
}


def results(model: Any, tokenizer: Any, modes: Iterable[str] = MODES) -> dict[str, Any]:
    """What the model computes in each of some modes, or the first line of the error."""
    inputs = dict(tokenizer(TEXTS, return_tensors="pt", padding=True))
    found: dict[str, Any] = {"tokens": inputs["input_ids"].tolist()}
    for name in modes:
        try:
            found[name] = MODES[name](model, inputs)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


def save(folder: Path) -> None:
    """Saves model, tokenizer and results."""
    from vanilla_transformer import (
        VanillaTransformerConfig,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerTokenizer,
    )

    tokenizer = VanillaTransformerTokenizer.train(TEXTS, vocab_size=300)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=24,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=28,
        decoder_ffn_dim=36,
    )
    torch.manual_seed(0)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = json.dumps(results(model, tokenizer), indent=1)
    (folder / EXPECTED).write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    save(Path(sys.argv[1]))
