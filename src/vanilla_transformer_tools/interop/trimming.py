"""A smaller vocabulary for a model: the entries that given texts use, and what spells the rest.

NLLB's vocabulary has 256,000 entries for 200 languages, and most of its weights are their table.
Entries that remain keep their order, their scores and their rows, and get new ids.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer_tools.files import read_lines
from vanilla_transformer_tools.text.languages import language_codes
from vanilla_transformer_tools.text.tokenizer_pair import has_target_vocabulary

# Tensors with a row for each entry.
_TABLES = ("shared.weight", "embed_tokens.weight", "lm_head.weight", "lm_head.bias")
# Ids that must stay, each alone or in a list.
_NEEDED_IDS = (
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id"),
)
# Bans and biases of ids or of lists of them; what is gone is never generated.
_BANS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias")
_LINES_AT_A_TIME = 1000


@dataclass(frozen=True)
class Trimming:
    """Which entries of a vocabulary to keep besides characters, bytes and special ones.

    Attributes:
        files: Texts whose entries are kept.
        min_count: Number of times that an entry must occur in them.

    Raises:
        ValueError: If the number is below 1.
    """

    files: tuple[str, ...]
    min_count: int = 1

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"--min_count must be at least 1, got {self.min_count}.")

    def batches(self) -> Iterator[list[str]]:
        """All lines, a thousand at a time."""
        lines = chain.from_iterable(map(read_lines, self.files))
        while batch := list(islice(lines, _LINES_AT_A_TIME)):
            yield batch


@dataclass(frozen=True)
class Trimmed:
    """A model with a smaller vocabulary.

    Attributes:
        model: With the rows of the entries that were kept.
        tokenizer: With these entries.
        kept: Their former ids; the place of an id in the list is the new one.
        sizes: Entries and megabytes of the weights, before and after.
    """

    model: VanillaTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    kept: list[int]
    sizes: dict[str, list[float]]


def trim(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    trimming: Trimming,
) -> Trimmed:
    """The model and its tokenizer with the entries that texts use; neither is changed.

    Text all of whose tokens are kept has the same tokens, and kept entries have the same logits.

    Args:
        model: With one vocabulary.
        tokenizer: A fast one, with a BPE or a Unigram vocabulary.
        trimming: Entries to keep.

    Raises:
        ValueError: If this tokenizer or model cannot be trimmed, the files have no text, or a
            config names ids that the vocabulary lacks.
        OSError: If a file cannot be read.
    """
    kept = kept_ids(model, tokenizer, trimming)
    new_ids = {token_id: place for place, token_id in enumerate(kept)}
    smaller = _trimmed_tokenizer(tokenizer, new_ids)
    _compare(tokenizer, smaller, new_ids, trimming)
    result = _trimmed_model(model, kept, new_ids)
    sizes = {
        "entries": [model.config.vocab_size, len(kept)],
        "megabytes": [round(each.get_memory_footprint() / 1e6, 1) for each in (model, result)],
    }
    return Trimmed(result, smaller, kept, sizes)


def kept_ids(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    trimming: Trimming,
) -> list[int]:
    """Ids of the entries that `trim` keeps, in their order; the model may have no weights.

    Raises:
        ValueError: If `trim` would reject the model; nothing is made.
        OSError: If a file cannot be read.
    """
    vocabulary = _trimmable_vocabulary(model, tokenizer)
    for file in trimming.files:
        if not any(map(str.strip, read_lines(file))):
            raise ValueError(
                f"--keep_vocabulary needs text, got none in {file!r}. Leave the file out."
            )
    counts: Counter[int] = Counter()
    for lines in trimming.batches():
        for ids in tokenizer(lines, add_special_tokens=False, verbose=False)["input_ids"]:
            counts.update(ids)
    kept = {token_id for token_id, count in counts.items() if count >= trimming.min_count}
    entries = tokenizer.get_vocab()
    # All single characters and bytes; `▁a` is two characters.
    kept |= {
        token_id
        for token, token_id in entries.items()
        if len(token) == 1 or (len(token) == 6 and token.startswith("<0x"))
    }
    kept |= {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    kept |= {*language_codes(tokenizer).values()}
    if vocabulary["type"] == "BPE":
        kept |= _parts(vocabulary, kept)
    else:
        kept.add(vocabulary["unk_id"])
    known = {*entries.values()}
    for config, field in product((model.config, model.generation_config), _NEEDED_IDS):
        value: Any = getattr(config, field, None)
        needed = {*value} if isinstance(value, list) else {value} - {None}
        if not needed <= known:
            raise ValueError(
                f"`{field}` of the {type(config).__name__} must name entries of the tokenizer, "
                f"got {value}. Correct it in the source."
            )
        kept |= needed
    # Rows without an entry go.
    return sorted(kept & known)


def _trimmable_vocabulary(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The model of a tokenizer.json."""
    if has_target_vocabulary(model.config.to_dict()):
        raise ValueError(
            "--keep_vocabulary needs a model with one vocabulary for both sides, got "
            f"`decoder_vocab_size` {model.config.decoder_vocab_size}. Leave it out."
        )
    vocabulary: dict[str, Any] = {"type": type(tokenizer).__name__}
    if tokenizer.is_fast:
        vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if vocabulary["type"] not in ("BPE", "Unigram"):
        raise ValueError(
            "--keep_vocabulary needs a tokenizer.json with a BPE or a Unigram vocabulary, got "
            f"{vocabulary['type']}. Leave --keep_vocabulary out."
        )
    return vocabulary


def _parts(model: Mapping[str, Any], kept: set[int]) -> set[int]:
    """Ids of everything that BPE makes on its way to entries that are kept.

    Inside a longer word it takes the same way, since it never splits merged entries.
    """
    vocabulary = model["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    parts: set[int] = set()
    for token in (token for token, token_id in vocabulary.items() if token_id in kept):
        symbols = list(token)
        while possible := [
            (ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks
        ]:
            _, place = min(possible)
            symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
            parts.add(vocabulary[symbols[place]])
    return parts


def _trimmed_tokenizer(
    tokenizer: PreTrainedTokenizerBase, new_ids: Mapping[int, int]
) -> PreTrainedTokenizerBase:
    pipeline = json.loads(tokenizer.backend_tokenizer.to_str())
    model = pipeline["model"]
    if model["type"] == "BPE":
        model["vocab"] = {
            token: new_ids[token_id]
            for token, token_id in sorted(model["vocab"].items(), key=lambda item: item[1])
            if token_id in new_ids
        }
        known = model["vocab"].keys()
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= known]
    else:
        model["unk_id"] = new_ids[model["unk_id"]]
        rows = enumerate(model["vocab"])
        model["vocab"] = [entry for token_id, entry in rows if token_id in new_ids]
    for added in pipeline["added_tokens"]:
        added["id"] = new_ids[added["id"]]
    _renumber_special_tokens(pipeline["post_processor"] or {}, new_ids)
    # Those of the last call.
    pipeline["padding"] = pipeline["truncation"] = None
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        text = json.dumps(pipeline, ensure_ascii=False)
        Path(folder, "tokenizer.json").write_text(text, encoding="utf-8")
        smaller: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False
        )
    return smaller


def _renumber_special_tokens(processor: dict[str, Any], new_ids: Mapping[int, int]) -> None:
    """New ids for the tokens that a post-processor puts around text."""
    for part in processor.get("processors", ()):
        _renumber_special_tokens(part, new_ids)
    # TemplateProcessing has an object by token, RobertaProcessing and BertProcessing pairs.
    for token in processor.get("special_tokens", {}).values():
        token["ids"] = [new_ids[token_id] for token_id in token["ids"]]
    for name in processor.keys() & {"sep", "cls"}:
        token, token_id = processor[name]
        processor[name] = [token, new_ids[token_id]]


def _compare(
    tokenizer: PreTrainedTokenizerBase,
    smaller: PreTrainedTokenizerBase,
    new_ids: Mapping[int, int],
    trimming: Trimming,
) -> None:
    """Rejects a tokenizer that splits text differently although it could do the same."""
    for batch in trimming.batches():
        before = tokenizer(batch, verbose=False)["input_ids"]
        after = smaller(batch, verbose=False)["input_ids"]
        for line, old, new in zip(batch, before, after, strict=True):
            expected = [new_ids.get(token_id) for token_id in old]
            if None not in expected and expected != new:
                raise ValueError(
                    f"The trimmed {type(tokenizer).__name__} must split text as before, but "
                    f"{line[:60]!r} became {smaller.convert_ids_to_tokens(new)[:9]}. Please report "
                    "this with the versions of your packages."
                )


def _trimmed_model(
    model: VanillaTransformerForConditionalGeneration,
    kept: Sequence[int],
    new_ids: Mapping[int, int],
) -> VanillaTransformerForConditionalGeneration:
    config = copy.deepcopy(model.config)
    config.vocab_size = len(kept)
    if config.decoder_vocab_size is not None:
        config.decoder_vocab_size = len(kept)
    _renumber(config, new_ids)
    with torch.device("meta"):
        smaller = type(model)(config)
    rows = torch.tensor(kept, device=model.device)
    tied = model.all_tied_weights_keys
    weights = {
        name: tensor.index_select(0, rows) if name.endswith(_TABLES) else tensor.clone()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    smaller.load_state_dict(weights, strict=False, assign=True)
    smaller.tie_weights()
    smaller.generation_config = copy.deepcopy(model.generation_config)
    _renumber(smaller.generation_config, new_ids)
    return smaller.train(model.training)


def _renumber(config: Any, new_ids: Mapping[int, int]) -> None:
    """Gives a config the new ids; bans and biases of removed entries are left out."""

    def renumbered(value: Any) -> Any:
        """The value with new ids; None where an entry of it is gone."""
        if isinstance(value, list | tuple):
            new = [renumbered(one) for one in value]
            return None if None in new else new
        # A bias stays.
        return value if isinstance(value, float) else new_ids.get(value)

    for field in (*_NEEDED_IDS, *_BANS):
        value = getattr(config, field, None)
        if isinstance(value, dict):
            # A file has pairs, a program may have set a dictionary.
            value = [*value.items()]
        if isinstance(value, list):
            value = [new for one in value if (new := renumbered(one)) is not None] or None
            setattr(config, field, value)
        elif value is not None:
            setattr(config, field, new_ids[value])
