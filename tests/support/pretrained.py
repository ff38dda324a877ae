"""Folders of pretrained models as the Hub has them: real classes and tokenizers, tiny sizes.

Tests download nothing, so SentencePiece models are trained here, on the built-in corpus.
"""

import io
import json
from functools import cache
from pathlib import Path

import sentencepiece
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartTokenizer,
    FSMTTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from number_words import english, german

GERMAN = [german(number) for number in range(0, 3000, 7)]
ENGLISH = [english(number) for number in range(0, 3000, 7)]
BOTH = (*GERMAN, *ENGLISH)
SIZES = {
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 36,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "max_position_embeddings": 60,
}
NLLB_CODES = ["deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans"]
M2M100_CODES = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
PIECES = 60


def fsmt_tokenizer(folder: Path, sides: dict[str, list[str]]) -> FSMTTokenizer:
    """A tokenizer of two vocabularies, which calls its `</s>` a separator; its files are kept.

    The ids of the pieces of `src` and `tgt` begin at 4.
    """
    for side, pieces in sides.items():
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces]
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        (folder / f"vocab-{side}.json").write_text(json.dumps(ids))
    (folder / "merges.txt").write_text("t h\nth e</w>\nc a\nca t</w>\n")
    files = {f"{side}_vocab_file": str(folder / f"vocab-{side}.json") for side in sides}
    return FSMTTokenizer(["en", "ru"], merges_file=str(folder / "merges.txt"), **files)


@cache
def train_pieces(lines: tuple[str, ...], kind: str, **options) -> bytes:
    """A SentencePiece model, with other options of its trainer; each is trained once."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=writer,
        model_type=kind,
        minloglevel=2,
        **{"vocab_size": PIECES, **options},
    )
    return writer.getvalue()


def pieces_of(model: bytes) -> list[str]:
    """Its pieces, without `<unk>`, `<s>` and `</s>`."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(number) for number in range(3, processor.get_piece_size())]


def from_sentencepiece(
    kind: type, folder: Path, model: bytes, **options
) -> PreTrainedTokenizerBase:
    """A tokenizer of a class that converts a SentencePiece model."""
    folder.mkdir()
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    settings = {"tokenizer_class": kind.__name__}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return kind.from_pretrained(folder, **options)


def nllb(scratch: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Its table has two rows more than the tokenizer has entries."""
    model = train_pieces(BOTH, "bpe")
    tokenizer = from_sentencepiece(
        NllbTokenizer, scratch / "pieces", model, extra_special_tokens=NLLB_CODES
    )
    config = M2M100Config(vocab_size=len(tokenizer) + 2, **SIZES)
    return M2M100ForConditionalGeneration(config), tokenizer


def m2m100(scratch: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The tokenizer has no fast form."""
    model = train_pieces(BOTH, "bpe")
    (scratch / "pieces.model").write_bytes(model)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces_of(model)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    (scratch / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = M2M100Tokenizer(
        str(scratch / "vocab.json"),
        str(scratch / "pieces.model"),
        additional_special_tokens=list(M2M100_CODES),
    )
    config = M2M100Config(vocab_size=len(tokens) + 108, **SIZES)
    return M2M100ForConditionalGeneration(config), tokenizer


def marian(scratch: Path, tags: tuple[str, ...] = ()) -> tuple[PreTrainedModel, MarianTokenizer]:
    """Two SentencePiece models, and one list of the pieces of both."""
    sides = {"source": GERMAN, "target": ENGLISH}
    models = {side: train_pieces(tuple(lines), "unigram") for side, lines in sides.items()}
    for side, model in models.items():
        (scratch / f"{side}.spm").write_bytes(model)
    pieces = [piece for model in models.values() for piece in pieces_of(model)]
    tokens = list(dict.fromkeys(["</s>", "<unk>", *pieces, *tags, "<pad>"]))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    (scratch / "vocab.json").write_text(json.dumps(vocabulary))
    files = (str(scratch / name) for name in ("source.spm", "target.spm", "vocab.json"))
    tokenizer = MarianTokenizer(*files)
    pad = vocabulary["<pad>"]
    config = MarianConfig(
        vocab_size=len(tokens),
        pad_token_id=pad,
        decoder_start_token_id=pad,
        scale_embedding=True,
        **SIZES,
    )
    model = MarianMTModel(config)
    model.generation_config.update(
        bad_words_ids=[[pad]], forced_eos_token_id=0, num_beams=4, max_length=60
    )
    return model, tokenizer


def marian_to_several(scratch: Path) -> tuple[PreTrainedModel, MarianTokenizer]:
    """The source begins with the tag of the target language."""
    return marian(scratch, (">>deu<<", ">>fra<<"))


def bart(scratch: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Outputs begin with `<s>`."""
    learner = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    learner.train_from_iterator(BOTH, vocab_size=320, special_tokens=special, show_progress=False)
    learner.save_model(str(scratch))
    files = (str(scratch / name) for name in ("vocab.json", "merges.txt"))
    vocabulary, merges = (Path(file).read_text(encoding="utf-8") for file in files)
    pairs = [tuple(line.split(" ")) for line in merges.splitlines()[1:]]
    tokenizer = BartTokenizer(vocab=json.loads(vocabulary), merges=pairs)
    model = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **SIZES))
    model.generation_config.update(forced_bos_token_id=0, forced_eos_token_id=2, num_beams=4)
    return model, tokenizer


def mbart50(scratch: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = train_pieces(BOTH, "unigram")
    tokenizer = from_sentencepiece(MBart50Tokenizer, scratch / "pieces", model)
    config = MBartConfig(
        vocab_size=len(tokenizer), decoder_start_token_id=2, scale_embedding=True, **SIZES
    )
    return MBartForConditionalGeneration(config), tokenizer


def mbart(scratch: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Sources and targets end with the code of their language, and the decoder reads it first."""
    model = train_pieces(BOTH, "unigram")
    tokenizer = from_sentencepiece(MBartTokenizer, scratch / "pieces", model)
    config = MBartConfig(
        vocab_size=len(tokenizer),
        decoder_start_token_id=tokenizer.lang_code_to_id["de_DE"],
        scale_embedding=True,
        **SIZES,
    )
    return MBartForConditionalGeneration(config), tokenizer


BUILD = {
    one.__name__: one for one in (nllb, m2m100, marian, marian_to_several, bart, mbart50, mbart)
}


def save_pretrained_model(name: str, folder: Path) -> Path:
    """A folder with a model, whose every weight matters, and its tokenizer."""
    scratch = folder.with_name(f"{folder.name}.making")
    scratch.mkdir(parents=True)
    torch.manual_seed(len(name))
    model, tokenizer = BUILD[name](scratch)
    has_sinusoids = isinstance(model, M2M100ForConditionalGeneration | MarianMTModel)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if not (has_sinusoids and "embed_positions" in key):
                tensor.copy_(0.5 * torch.randn_like(tensor))
        if hasattr(tokenizer, "src_lang"):
            # Most entries are codes, of which outputs should not consist.
            model.get_input_embeddings().weight[PIECES + 1 :] *= 0.3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
