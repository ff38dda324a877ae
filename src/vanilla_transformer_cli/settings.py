"""What a user can set on the command line; the documentation of each field feeds `--help`.

Nothing here imports torch, so that `--help` answers at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


def option(help_text: str, default: Any = None, **metadata: Any) -> Any:
    """A field with its help text; a list as default is copied for each instance."""
    metadata["help"] = help_text
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Preset:
    """Sizes that go together, with the dropout and learning rate that suit them."""

    layers: int
    d_model: int
    ffn_dim: int
    heads: int
    dropout: float
    learning_rate: float
    warmup_steps: int

    def config(self) -> dict[str, int | float]:
        """Fields of `VanillaTransformerConfig`; encoder and decoder alike."""
        return {
            "d_model": self.d_model,
            "dropout": self.dropout,
            "encoder_layers": self.layers,
            "decoder_layers": self.layers,
            "encoder_attention_heads": self.heads,
            "decoder_attention_heads": self.heads,
            "encoder_ffn_dim": self.ffn_dim,
            "decoder_ffn_dim": self.ffn_dim,
        }


# tiny: Wu et al. 2021 (arXiv 2105.14462). small: the width and depth that fairseq made usual for
# IWSLT14. base and big: table 3 of the paper, whose schedule peaks at (d_model * warmup)^-0.5.
PRESETS = {
    "tiny": Preset(4, 128, 256, 4, dropout=0.3, learning_rate=5e-3, warmup_steps=2000),
    "small": Preset(6, 512, 1024, 4, dropout=0.3, learning_rate=5e-4, warmup_steps=4000),
    "base": Preset(6, 512, 2048, 8, dropout=0.1, learning_rate=7e-4, warmup_steps=4000),
    "big": Preset(6, 1024, 4096, 16, dropout=0.3, learning_rate=5e-4, warmup_steps=4000),
}


# Titles of `vanilla_transformer.evaluation.metrics.METRICS`, whose import would delay `--help`.
METRIC_TITLES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "exact_match": "exact match",
    "wer": "WER",
    "per": "PER",
    "codexglue_bleu": "CodeXGLUE BLEU",
}
DEFAULT_METRICS = ["bleu", "chrf", "exact_match"]

_TRUST_REMOTE_CODE = (
    "Runs the code that lies in the folder of a model of another kind. A vanilla_transformer model "
    "runs with the code of the installed package, whatever lies in its folder."
)


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run beyond those of Transformers' `Seq2SeqTrainingArguments`."""

    train: list[str] = option(
        "Training pairs: two files, source and target line by line (plain or .gz), or one .tsv, "
        ".jsonl or .parquet file, or the folder or Hub name of a dataset.",
        [],
    )
    validation: list[str] = option(
        "Validation pairs, given like --train; the best checkpoint is chosen on them. Without "
        "them the last one is kept.",
        [],
    )
    data: str | None = option(
        "Folder in which the files of --train and --validation lie, unless their paths say so."
    )
    max_validation_pairs: int | None = option(
        "Pairs of --validation that are scored, from its beginning. Default: all."
    )
    source_column: str = option(
        "Column of the source text, for .jsonl, .parquet and datasets; dots reach into nested "
        "columns, as in translation.de.",
        "source",
    )
    target_column: str = option("Column of the target text.", "target")
    tag_column: str | None = option(
        "Column with the target language of each pair, such as de, for one model of several "
        "directions: the source begins with a token that names it (Johnson et al. 2017). For "
        ".tsv any name means the third column."
    )
    dataset_config: str | None = option("Configuration of a Hub dataset, such as de-en.")
    train_split: str = option("Split of a dataset that --train reads.", "train")
    validation_split: str = option("Split of a dataset that --validation reads.", "validation")
    streaming: bool = option(
        "Reads --train while it trains, pass after pass, and stores none of it: for corpora larger "
        "than the disk. Needs --max_steps; saves and evaluates every --save_steps and --eval_steps "
        "updates, 1,000 by default. Pairs are shuffled in a buffer only: shuffle a sorted corpus.",
        False,
    )
    shuffle_buffer: int = option(
        "Pairs of a --streaming run that are shuffled, and sorted into batches, together. A "
        "larger buffer has less padding; two of them are in memory.",
        50_000,
    )
    tokenizer_pairs: int = option(
        "Pairs from the beginning of a --streaming run on which the vocabulary is trained; they "
        "alone are counted by the filters, which all pairs pass through.",
        200_000,
    )
    filter_empty: bool = option(
        "Drops training pairs with a side of nothing but white space. Like all filters, it tells "
        "how many it dropped, and dropped.jsonl in --output_dir holds them.",
        False,
    )
    filter_identical: bool = option("Drops pairs whose source is their target.", False)
    filter_max_characters: int | None = option(
        "Drops pairs with a longer side than so many characters; --max_length would cut it."
    )
    filter_max_ratio: float | None = option(
        "Drops pairs of which a side has more than so many times the characters of the other."
    )
    filter_script: list[str] | None = option(
        "Drops pairs of which a side has most of its letters in another script than this; codes "
        "of ISO 15924, such as Latn Cyrl, with + between several of a side.",
        action="store",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
    )
    filter_overlap: list[str] | None = option(
        "Drops pairs of which a side stands in --validation or in these files, on whichever side; "
        "text, .tsv, .jsonl or .parquet. Case, white space and compatibility forms (NFKC) make no "
        "difference.",
        action="store",
        nargs="*",
        metavar="FILE",
    )
    filter_duplicates: bool = option("Drops pairs equal to an earlier one.", False)
    preset: Literal["tiny", "small", "base", "big"] = option(
        "Sizes, dropout, learning rate and warm-up: tiny (4+4 layers, d_model 128), small (6+6, "
        "512), base and big (the paper's).",
        "tiny",
    )
    config: list[str] = option(
        "Fields of VanillaTransformerConfig that differ from the preset, each KEY=VALUE, such as "
        "d_model=256 encoder_layers=2.",
        [],
    )
    init_from: str | None = option(
        "Saved model to fine-tune, with its own tokenizer and sizes; --preset, --config and the "
        "tokenizer's options then do not apply."
    )
    tokenizer_kind: Literal["bpe", "unigram", "char", "word"] = option(
        "Kind of the vocabulary that is trained on both sides of --train.", "bpe"
    )
    vocab_size: int = option(
        "Entries of the vocabulary, the 4 special and (bpe, unigram) 256 byte tokens included.",
        10_000,
    )
    separate_vocabularies: bool = option(
        "Trains a vocabulary of each side and keeps two tokenizers: for sides that have nothing in "
        "common, such as two scripts, or that need different sizes. Default: a joint one.",
        False,
    )
    target_vocab_size: int | None = option(
        "Entries of the target's vocabulary with --separate_vocabularies. Default: --vocab_size."
    )
    pretokenized: bool = option(
        "The text is already tokenised: blanks are its only token boundaries.", False
    )
    bpe_dropout: float = option(
        "Share of merges left out when training text is cut into pieces, anew in each epoch "
        "(Provilkov et al. 2020, who use 0.1); for small corpora, with --tokenizer_kind bpe.",
        0.0,
    )
    max_length: int = option(
        "Longest side of a training pair, in tokens, </s> included; longer ones are cut off "
        "there, and counted.",
        256,
    )
    max_tokens_per_batch: int = option(
        "Source plus target tokens of a batch, padding counted, over all processes together.",
        8192,
    )
    bleu_tokenize: str = option(
        "sacreBLEU's tokenizer for the validation score: 13a, intl, char, zh, ja-mecab, or none "
        "for text that is already tokenised.",
        "13a",
    )
    metrics: list[str] = option(
        "Scores of the validation pairs, as in the command evaluate. The first chooses the best "
        "checkpoint, unless --metric_for_best_model names another one.",
        DEFAULT_METRICS,
        choices=tuple(METRIC_TITLES),
    )
    max_minutes: float | None = option(
        "Ends training after so many minutes, evaluates, and keeps the best checkpoint."
    )
    average_last: int = option(
        "Checkpoints whose mean is saved (section 6.1 of the paper) unless both its score "
        "and its loss on --validation are worse than those of the best one alone. So many are kept "
        "beside the best; 1: no averaging.",
        5,
    )
    moving_average: float | None = option(
        "Decay of an exponential moving average of the weights, such as 0.999. At the end it is "
        "tried like the mean of --average_last. Default: none."
    )
    attn_implementation: Literal["eager", "sdpa", "varlen", "flash_attention_2"] | None = option(
        "Attention kernel. varlen leaves all padding out, of attention by torch's kernel for "
        "sequences of various lengths (a GPU in half precision, else sdpa) and of all layers; it "
        "pays where a batch has much of it. Default: sdpa; eager for talking heads."
    )
    r_drop: float = option(
        "Weight of R-Drop (Wu et al. 2021, who use 5): each pair is trained twice in a batch, and "
        "both passes should agree in spite of dropout. An update takes twice the time.",
        0.0,
    )
    early_stopping_patience: int | None = option(
        "Evaluations without a better --metric_for_best_model after which training ends."
    )
    resume: bool = option("Goes on from the last checkpoint in --output_dir.", False)
    language: list[str] = option(
        "Languages of the pairs for the model card, as ISO 639 codes, such as de en.", []
    )
    dataset_tags: list[str] = option(
        "Datasets on the Hub for the model card. Default: the one that --train names.", []
    )
    license: str | None = option("Licence of the model for its card, such as apache-2.0.")

    def __post_init__(self) -> None:
        """A single name that is neither file nor folder is a dataset on the Hub."""
        if self.data is not None:
            for name in ("train", "validation"):
                paths = [str(Path(self.data, path)) for path in getattr(self, name)]
                object.__setattr__(self, name, paths)
        is_on_hub = len(self.train) == 1 and not Path(self.train[0]).exists()
        if is_on_hub and not self.dataset_tags:
            object.__setattr__(self, "dataset_tags", list(self.train))


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search, those of `Translator`."""

    model: list[str] | None = option(
        "Folder or Hub name of a model. Several, each with a --model of its own, translate "
        "together (an ensemble: the mean of their probabilities).",
        action="append",
    )
    engine: Literal["torch", "ctranslate2"] = option(
        "What searches; ctranslate2 takes a folder that the command export made.", "torch"
    )
    target_language: str | None = option(
        "Language to translate into, of a model that was trained with --tag_column."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "Of the weights while they are used; auto: as they were saved.", "auto"
    )
    num_beams: int | None = option(
        "Width of the beam; 1 is greedy. Default: the model's, 4; for --do_sample 1."
    )
    length_penalty: float | None = option(
        "Exponent a in the rank of a finished hypothesis, log-probability / length^a, </s> "
        "counted (Transformers' definition): above 0 favours long output. Default: the model's, "
        "0.6; without a beam 1."
    )
    max_extra_tokens: int = option(
        "Longest output in tokens beyond the tokens of its own source (section 6.1 of the paper).",
        50,
    )
    max_tokens_per_batch: int = option(
        "Source tokens of a batch; padding, beams and samples counted, and a shorter source as "
        "one of 16. Changes speed and memory, never results; a GPU has room for more.",
        4096,
    )
    max_source_length: int | None = option(
        "Longest source in tokens, </s> counted; a longer line is cut at sentence ends, else at "
        "blanks, else between tokens, and its translation is that of its pieces with blanks "
        "between them. Default: --max_length of the model's training, else its "
        "max_position_embeddings."
    )
    do_sample: bool = option(
        "Draws translations at random instead of searching likely ones.", False
    )
    temperature: float = option("Of --do_sample: below 1 draws likelier tokens.", 1.0)
    top_k: int = option("Of --do_sample: only the k likeliest tokens are drawn; 0: all.", 0)
    top_p: float = option(
        "Of --do_sample: only the likeliest tokens that together have this probability are drawn.",
        1.0,
    )
    seed: int = option(
        "Of --do_sample, engine torch: what is drawn depends on this and the line alone.", 0
    )
    mbr_candidates: int = option(
        "Minimum Bayes risk: of so many samples (with --do_sample) or best hypotheses, the one "
        "most like the others (chrF). 0: the likeliest.",
        0,
    )
    trust_remote_code: bool = option(_TRUST_REMOTE_CODE, False)


@dataclass(frozen=True)
class TranslateSettings(SearchSettings):
    """Settings of a translation."""

    input: str | None = option(
        "File to translate, one line each, plain or .gz. Default: standard input."
    )
    output: str | None = option(
        "File for the translations; one that already holds text is an error, unless --resume is "
        "given. At any moment it holds whole lines in order. Default: standard output."
    )
    resume: bool = option(
        "Continues after the complete lines that an interrupted run has left in --output. The run "
        "is recorded in OUTPUT.job.json; another model, input or setting is refused.",
        False,
    )
    prefix: str = option("What every translation begins with.", "")
    prefix_file: str | None = option("File with the beginning of each translation, one a line.")
    n_best: int = option(
        "Translations of each line, each on a row of its own: number of the line, score, text, "
        "with tabs between them.",
        1,
    )
    scores: bool = option(
        "Writes number of the line, score and text, with tabs between them. The score is the "
        "log-probability / length^length_penalty, or with --mbr_candidates the expected chrF.",
        False,
    )
    details: bool = option(
        "Writes one JSON object a line: all hypotheses with their scores, tokens, log-probability "
        "of each token, and alignment as pairs source-target of positions. Engine torch only.",
        False,
    )


@dataclass(frozen=True)
class EvaluateSettings(SearchSettings):
    """Settings of an evaluation: translations that are scored."""

    test: list[str] = option(
        "Test pairs: two files, or one .tsv, .jsonl or .parquet file, or a dataset.", []
    )
    source_column: str = option("Column of the source text.", "source")
    target_column: str = option("Column of the target text.", "target")
    dataset_config: str | None = option("Configuration of a Hub dataset, such as de-en.")
    test_split: str = option("Split of a dataset that --test reads.", "test")
    hypotheses: str | None = option(
        "File of translations to score, one a line, instead of those of a --model."
    )
    against: str | None = option(
        "Other system to compare with on the same lines by paired bootstrap: a file of its "
        "translations, one a line, or a folder or Hub name of a model, searched alike."
    )
    metrics: list[str] = option(
        "Scores to compute. wer and per: word and phoneme error rate of spelling to phonemes, "
        "lines whose tokens are not all right, and edits per token of the references; "
        "codexglue_bleu: the smoothed BLEU of CodeXGLUE's code to code. Tokens of these three "
        "stand between blanks.",
        DEFAULT_METRICS,
        choices=tuple(METRIC_TITLES),
    )
    bleu_tokenize: str = option("sacreBLEU's tokenizer; none for tokenised text.", "13a")
    bootstrap: int = option(
        "Resamples of the lines for the confidence intervals and --against; 0: none. 1,000 take "
        "about 70 MB of memory for each 1,000 lines.",
        1000,
    )
    output: str | None = option("File for the translations, one a line.")
    name: str = option("Name of the test set in results.json and the model card.", "test")


@dataclass(frozen=True)
class PushSettings:
    """Settings of an upload to the Hub."""

    model: str = option("Folder of a model, the --output_dir of its training.")
    private: bool = option("Makes a new repository private.", False)
    revision: str | None = option("Branch to commit to, made where there is none. Default: main.")
    commit_message: str = option("First line of the commit.", "Upload model")


@dataclass(frozen=True)
class ExportSettings:
    """Settings of an export to another runtime."""

    format: Literal["ctranslate2", "onnx"] = option(
        "Runtime to export for: CTranslate2, which `translate --engine ctranslate2` uses too, or "
        "ONNX Runtime.",
        "ctranslate2",
    )
    quantization: Literal[
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "int8_float32",
        "int8_float16",
        "int8_bfloat16",
        "int16",
    ] = option(
        "Type of the weights, for --format ctranslate2; behind int8_ stands the type of all that "
        "is not quantised. On a device that lacks the type CTranslate2 takes another one.",
        "float32",
    )
    sample: str | None = option(
        "File of source lines on which the export is compared with the model. Default: 100 "
        "random sequences of tokens."
    )
    force: bool = option("Replaces an earlier export at OUT.", False)
    trust_remote_code: bool = option(_TRUST_REMOTE_CODE, False)


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of a look inside."""

    model: str | None = option("Folder or Hub name of a model.")
    output: str | None = option(
        "File to write: .html, a page on which one chooses kind, layer and head; .png or .svg, a "
        "picture of one of them. Default: attention.html; with --positions positions.svg. With "
        "--alignments the file of the links. Default: standard output."
    )
    kind: Literal["cross", "encoder", "decoder"] = option(
        "Attention to draw, or that the page shows first: the decoder's to the source, or the "
        "self-attention of encoder or decoder.",
        "cross",
    )
    layer: int | None = option(
        "Layer to draw, or that the page shows first, counted from 1. Default: the last but one, "
        "from which alignments are read."
    )
    head: int | None = option(
        "Head to draw, or that the page shows first, counted from 1. Default: mean of all."
    )
    positions: int | None = option(
        "Draws the encodings of so many positions, and nothing else.",
    )
    alignments: list[str] | None = option(
        "Aligns the words of these files, source and target line by line, by the model's "
        "cross-attention, and nothing else; without a target file, of the model's translations. "
        "One line of links for each pair, such as 0-0 1-2: source and target, counted from 0.",
        action="store",
        nargs="+",
        metavar="FILE",
    )
    units: list[str] | None = option(
        "The files of --alignments once more, with blanks between what shall count as a word, "
        "such as the words of a Chinese text.",
        action="store",
        nargs=2,
        metavar=("SOURCE", "TARGET"),
    )
    gold: str | None = option(
        "File with the right links of --alignments, sure ones as 0-0 and possible ones as 0?0. "
        "Prints the alignment error rate, and the links only to --output."
    )
    target_language: str | None = option(
        "Language to translate into, of a model that was trained with --tag_column."
    )
    num_beams: int | None = option(
        "Width of the beam of the model's own translation; 1 is greedy. Default: the model's, 4."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "Of the weights while they are used; auto: as they were saved.", "auto"
    )
    trust_remote_code: bool = option(_TRUST_REMOTE_CODE, False)


@dataclass(frozen=True)
class ImportSettings:
    """Settings of an import of pretrained weights."""

    dry_run: bool = option(
        "Lists which tensors of the source make up which of ours, and everything that does not "
        "fit; writes nothing.",
        False,
    )
