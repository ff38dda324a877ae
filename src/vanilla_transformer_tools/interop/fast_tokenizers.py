"""Fast tokenizers from SentencePiece models, with the ids of a table, that split text as these do.

`tokenizers` has the same algorithms, but not the same normaliser: its `Precompiled` looks at one
grapheme at a time and takes the shortest rule. Here marks keep text apart that no rule joins, so
that it sees single characters, and Unicode's own composition does the rest.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    M2M100Tokenizer,
    MarianTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

END, UNKNOWN, PAD = "</s>", "<unk>", "<pad>"
_BLANK = "\u2581"
# Noncharacters, which no text has: between what rules take together, between characters, for what
# becomes one `<unk>`, and after the tag that a text begins with or inside another one.
_BETWEEN_RULES, _BETWEEN_CHARACTERS, _UNKNOWN_RUN, _TAG = "\ufdd0\ufdd1\ufdd2\ufdd3"
# Kinds of pieces, and of models, in SentencePiece's file.
_NORMAL, _UNKNOWN, _, _USER_DEFINED, _, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
# Of each of two kinds.
_SAMPLE_LINES = 500


def read_pieces(file: Path) -> Any:
    """A SentencePiece model, as the message of the library.

    Raises:
        ImportError: If `sentencepiece` or `protobuf` are not installed.
        ValueError: If it is damaged, or of a kind that cannot be expressed.
        OSError: If there is none.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError as error:
        raise ImportError(
            "Models of SentencePiece need the packages `sentencepiece` and `protobuf`. "
            "Install them: pip install -e '.[import]'"
        ) from error
    try:
        model = ModelProto.FromString(file.read_bytes())
    except DecodeError as error:
        raise ValueError(
            f"{file} must be a model of SentencePiece, got a damaged or other file. Copy it again."
        ) from error
    trainer, kinds = model.trainer_spec, {piece.type for piece in model.pieces}
    is_known = trainer.model_type in (_UNIGRAM, _BPE) and not kinds & {_USER_DEFINED, _BYTE}
    if not (is_known and kinds) or trainer.treat_whitespace_as_suffix:
        raise ValueError(
            f"{file} must be a Unigram or a BPE model without symbols of its user, bytes and "
            f"blanks as suffixes, got kind {trainer.model_type} with pieces of the kinds "
            f"{', '.join(map(str, sorted(kinds))) or 'none'}."
        )
    return model


def piece_ids(model: Any) -> dict[str, int]:
    """Ids of the pieces themselves, with the usual name of the unknown one."""
    return {
        UNKNOWN if piece.type == _UNKNOWN else piece.piece: place
        for place, piece in enumerate(model.pieces)
    }


def sentencepiece_backend(
    model: Any,
    entries: Mapping[str, int],
    tags: Sequence[str] | None = None,
    special: Sequence[str] = (END, UNKNOWN, PAD),
) -> Tokenizer:
    """A pipeline that splits text as a SentencePiece model does, with ids of a table.

    Entries of the table that are none of its pieces keep their ids, and no text becomes one.

    Args:
        model: What `read_pieces` returns; it splits text.
        entries: Ids by token, `<unk>` among them.
        tags: Entries such as `>>deu<<` that a text may begin with, and no others; None: none.
        special: Entries that are found in text as a whole, and that decoding may leave out.

    Raises:
        ValueError: If the table lacks a piece, for which the original gives `<unk>`.
    """
    scores = _scores(model, entries)
    known = {piece for piece in scores if len(piece) == 1}
    named = {*special, *(tags or ())}
    # A run of unknown characters is looked up as a whole, and may be an entry of the other side.
    runs = {token for token in entries if token not in named and not set(token) & known}
    # A whole one must be better than its parts.
    scores |= {run: len(run) - 1.0 for run in runs}
    backend = Tokenizer(_vocabulary(model.trainer_spec.model_type, entries, scores, named))
    tag = "|".join(map(re.escape, tags or ())) or "(?!)"
    steps = list(_normaliser(model.normalizer_spec, None if tags is None else tag))
    if runs:
        steps += _joining_unknown(runs, known, tag)
    for start in {one[1:3] for one in tags or ()}:
        if any(start in piece for piece in scores) or not (runs or known.intersection(start)):
            raise ValueError(f"{start!r} of its tags is in a piece, or unknown")
    if tags:
        steps.append(normalizers.Replace(Regex(rf"(?=(?:{tag})(?!{_TAG}))>>\K"), _TAG))
        steps.append(normalizers.Replace(Regex(rf"\A(?:{tag})\K{_TAG}"), ""))
    backend.normalizer = normalizers.Sequence(steps)
    _set_splitting(backend)
    # Where a text does not begin with one, it has a mark inside when this is looked for.
    backend.add_tokens([AddedToken(tag, normalized=True) for tag in tags or ()])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return backend


def _scores(model: Any, entries: Mapping[str, int]) -> dict[str, float]:
    """Scores of the pieces that text is split into, all of which the table must have."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
    if parts := {*"".join(scores)} - scores.keys():
        raise ValueError(f"pieces of the model have {min(parts)!r}, which is none itself")
    if missing := [piece for piece in scores if piece not in entries]:
        raise ValueError(
            f"the table of ids has no {missing[0]!r}, of which the slow one makes {UNKNOWN} "
            f"({len(missing):,} pieces in all)"
        )
    return scores


def _vocabulary(
    kind: int, entries: Mapping[str, int], scores: Mapping[str, float], named: Collection[str]
) -> models.Model:
    """The entries at their ids; those that no text becomes have names with a blank."""
    names = {
        token_id: token if token in scores or token in named else f"{token} "
        for token, token_id in entries.items()
    }
    # Normalised text has no blanks, so that none spells these.
    rows = [names.get(row, f"<unused {row}>") for row in range(1 + max(names))]
    if kind == _UNIGRAM:
        # Scores of what is not matched must not lower the least one, on which `<unk>` depends.
        vocabulary = [(name, scores.get(name, 0.0)) for name in rows]
        return models.Unigram(vocabulary, unk_id=entries[UNKNOWN])
    ids = {name: row for row, name in enumerate(rows)}
    return models.BPE(ids, list(_merges(scores)), unk_token=UNKNOWN, fuse_unk=True)


def _joining_unknown(
    runs: Collection[str], known: Collection[str], tag: str
) -> list[normalizers.Normalizer]:
    """Steps that make one `<unk>` of unknown characters in a row, but of those in `runs`."""
    unknown = f"[^{_one_of({*known, _TAG})[1:]}"
    others = rf"(?<!{unknown})(?!{_any_of(runs)}(?!{unknown})){unknown}{{2,}}"
    return [
        # The first alternative steps over a tag.
        normalizers.Replace(Regex(rf"(?m)\A(?:{tag}){_TAG}\K|{others}"), _UNKNOWN_RUN),
        normalizers.Replace(_TAG + _UNKNOWN_RUN, _TAG),
    ]


def _set_splitting(backend: Tokenizer) -> None:
    # What only looks like a special token after normalisation is none.
    split = pre_tokenizers.Split(Regex(r"<(?=(?:/s|unk|pad)>)"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(_TAG, "removed"), split])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(" ", ""),
            decoders.Replace(_BLANK, " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"\A +| +\z"), ""),
        ]
    )


def ending_in_eos(backend: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of a pipeline, which ends each text in `</s>`."""
    special = [AddedToken(token, special=True, normalized=False) for token in (END, UNKNOWN, PAD)]
    backend.add_special_tokens(special)
    end = backend.token_to_id(END)
    backend.post_processor = TemplateProcessing(
        single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[(END, end)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        unk_token=UNKNOWN,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        **settings,
    )


def fast_pair(pair: TokenizerPair) -> TokenizerPair:
    """Fast tokenizers that give the ids of slow ones of the classes of Marian and M2M100.

    Others, and fast ones, stay as they are.

    Raises:
        ValueError: If there are none; says where they would first differ.
    """
    slow = pair.source
    if isinstance(slow, MarianTokenizer):
        found = _fast_marian(slow)
    elif isinstance(slow, M2M100Tokenizer):
        found = TokenizerPair.joint(_fast_m2m100(slow))
    else:
        return pair
    sides = [("text", found.source), ("text_target", found.target)]
    for side, fast in sides[:1] if found.is_joint else sides:
        for line in _sample(slow):
            theirs, ours = ([*one(**{side: line})["input_ids"]] for one in (slow, fast))
            if theirs != ours:
                raise ValueError(
                    f"{line!r} becomes {fast.convert_ids_to_tokens(ours)} instead of "
                    f"{slow.convert_ids_to_tokens(theirs)}"
                )
    return found


def _fast_marian(slow: Any) -> TokenizerPair:
    models = [read_pieces(Path(file)) for file in slow.spm_files]
    tables = [slow.encoder, slow.target_encoder if slow.separate_vocabs else slow.encoder]
    settings = {"model_max_length": slow.model_max_length}
    tags = slow.supported_language_codes
    sides = [
        ending_in_eos(sentencepiece_backend(model, table, tags), **settings)
        for model, table in zip(models, tables, strict=True)
    ]
    if models[0] == models[1] and not slow.separate_vocabs:
        return TokenizerPair.joint(sides[0])
    return TokenizerPair(*sides)


def _fast_m2m100(slow: Any) -> PreTrainedTokenizerBase:
    model = read_pieces(Path(slow.spm_file))
    table = {**slow.encoder, **slow.lang_token_to_id}
    backend = sentencepiece_backend(model, table, special=slow.all_special_tokens)
    # The class of NLLB, which puts codes beside the text in the same way.
    return NllbTokenizer(
        tokenizer_object=backend,
        src_lang=slow.get_lang_token(slow.src_lang),
        tgt_lang=slow.tgt_lang and slow.get_lang_token(slow.tgt_lang),
        extra_special_tokens=list(slow.lang_token_to_id),
        mask_token=None,
        model_max_length=slow.model_max_length,
        clean_up_tokenization_spaces=False,
    )


def _sample(slow: Any) -> Iterator[str]:
    """Lines of the pieces of a vocabulary, and of characters of all scripts."""
    random = Random(0)
    pieces = sorted(slow.encoder.keys() - {*slow.all_special_tokens})
    letters = [chr(code) for code in range(0x20, 0x1F000) if chr(code).isprintable()]
    for _ in range(_SAMPLE_LINES):
        yield "".join(random.choices(pieces, k=random.randint(1, 9))).replace(_BLANK, " ")
        start = random.randrange(len(letters) - 60)
        words = ("".join(random.choices(letters[start : start + 60], k=4)) for _ in range(3))
        yield random.choice(["", " ", "  "]).join(words)


def _merges(scores: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Pairs that make pieces, the best piece first."""
    for piece in sorted(scores, key=lambda one: -scores[one]):
        for cut in range(1, len(piece)):
            if piece[:cut] in scores and piece[cut:] in scores:
                yield piece[:cut], piece[cut:]


def _normaliser(spec: Any, tag: str | None) -> Iterator[normalizers.Normalizer]:
    """Steps of a model; what a text begins with and the pattern matches is kept, and marked."""
    if tag is not None:
        yield normalizers.Replace(Regex(rf"\A(?:{tag})\K"), _TAG)
        other = rf"(?m)\A(?!(?:{tag}){_TAG})>>(?:(?!<<).)*<<"
        yield normalizers.Replace(Regex(other), _UNKNOWN_RUN + _TAG)
    if spec.precompiled_charsmap:
        yield from _rules(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(" {2,}"), " ")
        yield normalizers.Replace(Regex(rf"\A |(?<={_TAG}) | \z"), "")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(_BLANK)
        yield normalizers.Replace(Regex(rf"\A{_BLANK}(?=[^{_TAG}]+{_TAG})"), "")
        yield normalizers.Replace(Regex(rf"(?m){_TAG}(?=.)"), _TAG + _BLANK)
    yield normalizers.Replace(_UNKNOWN_RUN + _TAG, _UNKNOWN_RUN)
    yield normalizers.Replace(" ", _BLANK)


@cache
def _rules(charsmap: bytes) -> list[normalizers.Normalizer]:
    """Steps that replace text as the longest fitting rules do, from left to right."""
    from sentencepiece import SentencePieceNormalizer
    from sentencepiece.sentencepiece_model_pb2 import NormalizerSpec

    spec = NormalizerSpec(precompiled_charsmap=charsmap)
    rules = dict(SentencePieceNormalizer(normalizer_spec=spec).Decompile())
    joined = [rule for rule in rules if len(rule) > 1]
    steps = [
        normalizers.NFC(),
        normalizers.Replace(Regex(r"(?m).\K"), _BETWEEN_CHARACTERS),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_BETWEEN_CHARACTERS, ""),
        normalizers.NFC(),
    ]
    made = normalizers.Sequence(steps)
    # Characters that are newer than the tables of `tokenizers`. Hangul, most rules, is old.
    newer = [
        normalizers.Replace(rule + _BETWEEN_RULES, result + _BETWEEN_RULES)
        for rule, result in rules.items()
        if not "\uac00" <= result[:1] <= "\ud7a3" and made.normalize_str(rule) != result
    ]
    if joined:
        # The empty place after each rule, or else each character.
        begins = rf"(?=.{_one_of({rule[1] for rule in joined})}){_any_of(joined)}"
        newer.insert(0, normalizers.Replace(Regex(rf"(?m)(?:{begins}|.)\K"), _BETWEEN_RULES))
    return [*newer, *steps, normalizers.Replace(_BETWEEN_RULES, "")]


def _any_of(texts: Collection[str]) -> str:
    """A pattern for texts, the longest that fits; characters with the same rests are one class."""
    rests: dict[str, set[str]] = defaultdict(set)
    for text in filter(None, sorted(texts)):
        rests[text[0]].add(text[1:])
    begins: dict[frozenset[str], set[str]] = defaultdict(set)
    for first, found in rests.items():
        begins[frozenset(found)].add(first)
    choices = (_one_of(firsts) + _any_of(found) for found, firsts in begins.items())
    return f"(?:{'|'.join(choices)}){'?' * ('' in texts)}" if begins else ""


def _one_of(characters: Iterable[str]) -> str:
    """A class of characters, as ranges."""
    codes = sorted({*map(ord, characters)})
    # Neighbours differ by as much as their places do.
    runs = (list(run) for _, run in groupby(enumerate(codes), lambda one: one[1] - one[0]))
    spans = (rf"\x{{{run[0][1]:X}}}-\x{{{run[-1][1]:X}}}" for run in runs)
    return f"[{''.join(spans)}]"
