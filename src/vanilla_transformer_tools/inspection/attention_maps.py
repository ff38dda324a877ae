"""The attention weights of one pair, with human-readable tokens, and a page that shows them."""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import torch
from tokenizers import decoders
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vanilla_transformer.text_vanilla_transformer import without_blank_ends
from vanilla_transformer_tools.text.tokenizer_pair import speller
from vanilla_transformer_tools.translation import Translator
from vanilla_transformer_tools.translation.segments import without_surrogates
from vanilla_transformer_tools.translation.teacher_forcing import encode_pair
from vanilla_transformer_tools.translation.torch_engine import (
    TorchEngine,
    aligned_layer,
    attention_weights,
)

AttentionKind = Literal["encoder", "decoder", "cross"]

TITLES: dict[AttentionKind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}

BLANK = "␣"
_LONGEST_CHARACTER = 4
_TEMPLATE = "attention_page.html"
_PLACE = ">DATA<"
# Escaped, so that no text can end the script element that holds it.
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
# Of the weights on the page.
_DIGITS = 4


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one kind of attention.

    Attributes:
        kind: "encoder", "decoder" or "cross".
        rows: Tokens that attend: the source's, or the ones that the decoder writes.
        columns: Tokens attended to: the source's, or what the decoder has read, `<s>` first.
        weights: `[layers, H, rows, columns]`, by which the values are multiplied.
        sums_to_one: Whether each row sums to 1. Talking heads after the softmax need not.
    """

    kind: AttentionKind
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: Tensor
    sums_to_one: bool

    @property
    def default_layer(self) -> int:
        """Layer, counted from 1, that alignments are read from; see `TorchEngine.force`."""
        return aligned_layer(len(self.weights)) + 1

    def select(self, layer: int | None = None, head: int | None = None) -> Tensor:
        """Weights of a layer and a head, or the mean of its heads, `[rows, columns]`.

        Both count from 1. Without a layer, it is the `default_layer`.

        Raises:
            ValueError: If there is no such layer or head.
        """
        layers, heads = self.weights.shape[:2]
        layer = self.default_layer if layer is None else layer
        faults = [
            f"`{name}` must be between 1 and {last} in this model's {TITLES[self.kind]}, got "
            f"{value}."
            for name, value, last in (("layer", layer, layers), ("head", head, heads))
            if value is not None and not 1 <= value <= last
        ]
        if faults:
            raise ValueError("\n".join(faults))
        weights = self.weights[layer - 1]
        return weights.mean(0) if head is None else weights[head - 1]

    def title(self, layer: int | None = None, head: int | None = None) -> str:
        """A title for what `select` returns."""
        layers, heads = self.weights.shape[:2]
        which = f"mean of {heads} heads" if head is None else f"head {head} of {heads}"
        note = "" if self.sums_to_one else "\ntalking heads: rows need not sum to 1"
        layer = self.default_layer if layer is None else layer
        return f"{TITLES[self.kind]}, layer {layer} of {layers}, {which}{note}"


@dataclass(frozen=True)
class AttentionMaps:
    """The attention of a model while it reads one pair.

    Attributes:
        source: Text of the source.
        target: Text of the target.
        encoder: Self-attention of the encoder.
        decoder: Self-attention of the decoder.
        cross: Attention of the decoder to the source.
    """

    source: str
    target: str
    encoder: AttentionMap
    decoder: AttentionMap
    cross: AttentionMap


@torch.inference_mode()
def read_attention(translator: Translator, source: str, target: str | None = None) -> AttentionMaps:
    """Weights of all layers and heads, from one forward pass over a pair.

    Args:
        translator: With one model and the torch engine; with any attention kernel.
        source: Text; it is not cut, however long it is.
        target: Its translation; None: the tokens of the best one that the search finds.

    Raises:
        ValueError: If the translator has several models or another engine, or texts are too long.
    """
    engine = _checked_engine(translator)
    source = without_blank_ends(without_surrogates(source))
    tokenizers = translator.tokenizers
    read, written = encode_pair(tokenizers, source, without_blank_ends(target or ""))
    source_ids = [*tokenizers.source_prefix, *read["input_ids"]]
    if target is None:
        search = translator.search
        limit = len(source_ids) + search.max_extra_tokens
        ((best, *_),) = engine.translate_batch([source_ids], [[]], [limit], search)
        target_ids = best.ended
    else:
        target_ids = written["input_ids"]
    engine.check_lengths([source_ids, target_ids])
    model = engine.model
    read_ids = [engine.start_id, *target_ids[:-1]]
    with attention_weights(engine.models):
        output = model(
            input_ids=torch.tensor([source_ids], device=model.device),
            decoder_input_ids=torch.tensor([read_ids], device=model.device),
            use_cache=False,
            output_attentions=True,
        )
    target_tokenizer = translator.target_tokenizer
    source_labels = token_labels(translator.tokenizer, source_ids, "source")
    read_labels, labels = (token_labels(target_tokenizer, ids) for ids in (read_ids, target_ids))
    # Learned mixing after the softmax may give any sum.
    sums_to_one = getattr(model.config, "talking_heads", None) not in ("weights", "both")
    sides: dict[AttentionKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
        "encoder": (source_labels, source_labels),
        "decoder": (labels, read_labels),
        "cross": (labels, source_labels),
    }
    maps = {}
    for kind, both in sides.items():
        # Of a batch of one row.
        weights = torch.stack([layer[0] for layer in output[f"{kind}_attentions"]])
        maps[kind] = AttentionMap(kind, *both, weights.float().cpu(), sums_to_one)
    text = target_tokenizer.decode(target_ids, skip_special_tokens=True)
    return AttentionMaps(source, text, **maps)


def _checked_engine(translator: Translator) -> TorchEngine:
    engine = translator.engine
    if isinstance(engine, TorchEngine) and len(engine.models) == 1:
        return engine
    got = type(engine).__name__
    if isinstance(engine, TorchEngine):
        got = f"{len(engine.models)} models"
    raise ValueError(f"Attention is read from one model, with the engine 'torch', got {got}.")


def token_labels(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], side: str = "target"
) -> tuple[str, ...]:
    r"""Human-readable tokens.

    Blanks become ␣. Bytes that form a character together are named after it, with their number,
    such as `é 1/2`. Other invisible characters are written as in Python, such as `\t`.

    Args:
        tokenizer: The one that made the ids.
        ids: Token ids of one text.
        side: `source` or `target`, for tokenizers with two vocabularies.
    """
    tokens = speller(tokenizer, side)(ids)
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    in_bytes = isinstance(decoder, decoders.ByteLevel)
    special = set(tokenizer.all_special_tokens)
    contents = [None if one in special else _content(one, in_bytes=in_bytes) for one in tokens]
    labels: list[str] = []
    while (place := len(labels)) < len(tokens):
        if contents[place] is None:
            # SentencePiece has its own mark for a blank.
            labels.append(_readable(tokens[place].replace("▁", " ")))
        else:
            text, count = _first_characters(contents[place : place + _LONGEST_CHARACTER])
            parts = [f"{text} {number}/{count}" for number in range(1, count + 1)]
            labels += parts if count > 1 else [text or tokens[place]]
    return tuple(labels)


def _first_characters(contents: list[bytes | None]) -> tuple[str, int]:
    """The text of the first few tokens, and their number; empty if that is not UTF-8."""
    spelled = b""
    for count, content in enumerate(contents, start=1):
        if content is None:
            break
        spelled += content
        try:
            return _readable(spelled.decode()), count
        except UnicodeDecodeError:
            continue
    return "", 1


def _content(token: str, *, in_bytes: bool) -> bytes | None:
    """Bytes that a token spells; None if it is text, such as a token that was added later."""
    if in_bytes:
        known = _byte_of_character()
        return bytes(map(known.__getitem__, token)) if known.keys() >= set(token) else None
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return None


@cache
def _byte_of_character() -> dict[str, int]:
    """The characters by which GPT-2's vocabulary, and others like it, spell bytes."""
    return {character: byte for byte, character in bytes_to_unicode().items()}


def _readable(text: str) -> str:
    # A combining mark would attach to the character before it.
    if text and unicodedata.category(text[0]).startswith("M"):
        text = "◌" + text
    shown = (one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return "".join(shown).replace(" ", BLANK)


def attention_page(
    maps: AttentionMaps,
    *,
    kind: AttentionKind = "cross",
    layer: int | None = None,
    head: int | None = None,
) -> str:
    """A page on which readers choose kind, layer and head, and follow tokens.

    Args:
        maps: Attention maps of one pair. Weights are rounded to four digits.
        kind: Shown first.
        layer: Shown first, counted from 1; None: the one that alignments are read from.
        head: Shown first, counted from 1; None: the mean of all heads.

    Raises:
        ValueError: If there is no such layer or head.
    """
    first: AttentionMap = getattr(maps, kind)
    first.select(layer, head)
    content = {
        "source": maps.source,
        "target": maps.target,
        "maps": [
            {
                "kind": part.kind,
                "title": TITLES[part.kind],
                "rows": part.rows,
                "columns": part.columns,
                "sums_to_one": part.sums_to_one,
                "weights": part.weights.double().round(decimals=_DIGITS).tolist(),
            }
            for part in (maps.encoder, maps.decoder, maps.cross)
        ],
        "view": {"kind": kind, "layer": layer or first.default_layer, "head": head or "mean"},
    }
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)
    template = files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    before, after = template.split(_PLACE)
    return f"{before}>{data}<{after.rstrip()}"
