"""Options of the command line; the help text of each field feeds `--help`.

Nothing here imports torch, so that `--help` answers immediately.
"""

from argparse import BooleanOptionalAction
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vanilla_transformer_tools.search import Search


def option(help_text: str, default: Any = None, **metadata: Any) -> Any:
    """A field with its help text; a list as default is copied for each instance.

    Metadata are arguments of `add_argument`, and `group`, the title of options that belong
    together. With the action `extend`, `nargs` is `+`.
    """
    metadata["help"] = help_text
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Options of one group in `--help`.
_data = partial(option, group="data")
_filters = partial(option, group="filters")
_vocabulary = partial(option, group="vocabulary")
_model = partial(option, group="model")
_updates = partial(option, group="batches and updates")
_length = partial(option, group="length of the run")
_tuning = partial(option, group="fine-tuning")
_evaluation = partial(option, group="evaluation")
_card = partial(option, group="model card")
_search = partial(option, group="search")


@dataclass(frozen=True)
class Preset:
    """Sizes of a model, with the dropout and learning rate that suit them."""

    layers: int
    d_model: int
    ffn_dim: int
    heads: int
    dropout: float
    learning_rate: float
    warmup_steps: int

    def config(self) -> dict[str, int | float]:
        """Fields of `VanillaTransformerConfig`, the same for encoder and decoder."""
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


# tiny: Wu et al. 2021 (arXiv 2105.14462). small: the sizes that fairseq uses for IWSLT14. base and
# big: table 3 of the paper, whose schedule peaks at (d_model * warmup)^-0.5.
PRESETS = {
    "tiny": Preset(4, 128, 256, 4, dropout=0.3, learning_rate=5e-3, warmup_steps=2000),
    "small": Preset(6, 512, 1024, 4, dropout=0.3, learning_rate=5e-4, warmup_steps=4000),
    "base": Preset(6, 512, 2048, 8, dropout=0.1, learning_rate=7e-4, warmup_steps=4000),
    "big": Preset(6, 1024, 4096, 16, dropout=0.3, learning_rate=5e-4, warmup_steps=4000),
}


class Metric(NamedTuple):
    """A score for readers: title, definition, and whether the lowest one is the best."""

    title: str
    definition: str
    is_error_rate: bool = False


# All scores; `evaluation.metrics` computes them.
METRICS = {
    "bleu": Metric("BLEU", "corpus BLEU (Papineni et al. 2002), computed by sacreBLEU"),
    "chrf": Metric("chrF", "chrF2 (Popović 2015): character n-grams up to 6"),
    "chrf++": Metric("chrF++", "chrF with word n-grams up to 2 (Popović 2017)"),
    "ter": Metric("TER", "translation edit rate (Snover et al. 2006) of lower-cased text", True),
    "exact_match": Metric("exact match", "lines that equal a reference, but for blanks at ends"),
    "wer": Metric("WER", "lines with a wrong token: word error rate of spelling to phonemes", True),
    "per": Metric("PER", "edits per reference token, which speech recognition calls WER", True),
    "codexglue_bleu": Metric("CodeXGLUE BLEU", "BLEU with the smoothing of CodeXGLUE"),
}
DEFAULT_METRICS = ["bleu", "chrf", "exact_match"]
# Name of the scores of `--validation`.
VALIDATION = "validation"
BLEU_TOKENIZE = (
    "sacreBLEU's tokenizer for BLEU: none for tokenised text, 13a, intl, char, zh, ja-mecab, "
    "ko-mecab, flores200. auto: by the target language, else by the script of the references, and "
    "the output says which and why."
)

PresetName = Literal["tiny", "small", "base", "big"]
EngineName = Literal["torch", "ctranslate2"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]

SOURCE_LANGUAGE = (
    "Language of the sources, for a model whose tokenizer names the languages of both sides: "
    "deu_Latn for NLLB, de for M2M100, de_DE for mBART-50. Default: the one that the tokenizer was "
    "saved with."
)
TARGET_LANGUAGE = (
    "Language to translate into, of a model of several directions: one of --tag_column, or of the "
    "pretrained model. Default: the one with which the model begins its outputs, if it has one."
)
DTYPE = (
    "Type of the weights in memory; auto: as they were saved, or bfloat16 on a GPU that computes "
    "in it."
)
TRUST_REMOTE_CODE = (
    "Runs the code in the folder of a model of another kind. A vanilla_transformer model always "
    "runs with the installed package."
)

# Options that train on text in other letters than it has.
CASINGS = ("all_caps_every", "title_case_every")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training run that Transformers' `Seq2SeqTrainingArguments` do not have."""

    train: list[str] = _data(
        "Training pairs: two parallel text files, source and target (plain, .gz, .bz2 or "
        ".xz), or one .tsv, .jsonl or .parquet file, or the folder or Hub name of a dataset. Of "
        "several files, all: a.de a.en b.de b.en, or a.tsv b.tsv.",
        [],
    )
    validation: list[str] = _data(
        "Validation pairs, in the form of --train. They decide which checkpoint is best; without "
        "them, the last one is kept.",
        [],
    )
    data: str | None = _data(
        "Folder of the files of --train and --validation. Default: the current folder."
    )
    source_column: str = _data(
        "Column of the source text in .jsonl, .parquet and datasets; dots lead to nested columns, "
        "as in translation.de.",
        "source",
    )
    target_column: str = _data("Column of the target text.", "target")
    tag_column: str | None = _data(
        "Column with the target language of each pair, such as de: each source then begins with a "
        "token for that language (Johnson et al. 2017). In .tsv files, any name means the third "
        "column."
    )
    dataset_config: str | None = _data("Configuration of a Hub dataset, such as de-en.")
    train_split: str = _data("Split of a dataset that --train reads.", "train")
    validation_split: str = _data("Split of a dataset that --validation reads.", "validation")
    streaming: bool = _data(
        "Reads --train during training and stores none of it: for corpora larger than the disk. "
        "Needs --max_steps; saves and evaluates every 1,000 updates by default. Shuffle a sorted "
        "corpus first.",
        False,
    )
    shuffle_buffer: int = _data(
        "Number of pairs that a --streaming run shuffles and batches together. A larger buffer "
        "needs less padding; two buffers are in memory.",
        50_000,
    )
    tokenizer_pairs: int = _data(
        "Number of pairs, from the beginning, that a --streaming run trains the vocabulary on. "
        "Filters apply to all pairs, but report only these.",
        200_000,
    )
    filter_empty: bool = _filters(
        "Drops training pairs with a blank side. Each filter reports how many pairs it dropped, "
        "and dropped.jsonl in --output_dir lists them.",
        False,
    )
    filter_identical: bool = _filters("Drops pairs with equal source and target.", False)
    filter_max_characters: int | None = _filters(
        "Drops pairs with a side of more than N characters, which --max_length would cut."
    )
    filter_max_ratio: float | None = _filters(
        "Drops pairs where one side has more than X times as many characters as the other."
    )
    filter_overlap: list[str] | None = _filters(
        "Drops pairs where either side also occurs, on either side, in --validation or in these "
        "files (text, .tsv, .jsonl or .parquet). Case, white space and compatibility forms (NFKC) "
        "are ignored.",
        nargs="*",
        metavar="FILE",
    )
    filter_duplicates: bool = _filters("Drops pairs that repeat an earlier pair.", False)
    tokenizer: str | None = _vocabulary(
        "Folder of a model of this package, or of its tokenizer, which the new model gets; the "
        "other tokenizer options are ignored."
    )
    symbols: str | None = _vocabulary(
        "File of symbols, one a line, such as <ph>, that a new vocabulary keeps whole; with "
        "--tokenizer_kind word, between blanks. They count for --vocab_size.",
        metavar="FILE",
    )
    tokenizer_kind: Literal["bpe", "unigram", "char", "word"] = _vocabulary(
        "Kind of vocabulary to train on both sides of --train.", "bpe"
    )
    vocab_size: int = _vocabulary(
        "Size of the vocabulary, including 4 special tokens and, for bpe and unigram, 256 bytes.",
        10_000,
    )
    lowercase_sources: bool = _vocabulary(
        "Reads sources in lower case, in training and in every later use of the model: for tasks "
        "in which their case carries nothing. Targets keep theirs.",
        False,
    )
    separate_vocabularies: bool = _vocabulary(
        "Trains one vocabulary for each side instead of a joint one: for languages in different "
        "scripts, or sides that need vocabularies of different sizes.",
        False,
    )
    target_vocab_size: int | None = _vocabulary(
        "Size of the target vocabulary with --separate_vocabularies. Default: --vocab_size."
    )
    pretokenized: bool = _vocabulary(
        "Text that is already tokenised: only blanks separate tokens.", False
    )
    preset: PresetName = _model(
        "Sizes, dropout, learning rate and warm-up: tiny (4+4 layers, d_model 128), small (6+6, "
        "512), base and big (the paper's).",
        "tiny",
    )
    config: list[str] = _model(
        "Fields of VanillaTransformerConfig that differ from the preset, each as KEY=VALUE, such "
        "as d_model=256 encoder_layers=2. Those of a recipe stay, unless they are given again.",
        [],
        action="extend",
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = _model(
        "Attention kernel. Default: sdpa; eager for talking heads."
    )
    compile_layers: bool = _model(
        "Compiles the layers with torch.compile, once for all shapes of batches. Meant for GPUs.",
        False,
    )
    max_length: int = _updates(
        "Longest side of a training pair, in tokens with </s>. Longer sides are truncated, and "
        "their number is reported.",
        256,
    )
    max_tokens_per_batch: int | None = _updates(
        "Source plus target tokens of a batch, padding included, over all processes together. "
        "Default: 8,192; on a GPU 50,000 for base and big with a million pairs or more, or as "
        "many as the memory holds."
    )
    bpe_dropout: float = _updates(
        "Probability of skipping a merge when training text is segmented, again in each epoch "
        "(BPE-dropout, Provilkov et al. 2020, who use 0.1). Needs --tokenizer_kind bpe.",
        0.0,
    )
    all_caps_every: int | None = _updates(
        "In each epoch, trains on another one of N pairs in capitals, for sources in capitals. "
        "Default: none."
    )
    title_case_every: int | None = _updates(
        "In each epoch, trains on another one of N pairs with a source In Title Case. Default: "
        "none."
    )
    r_drop: float = _updates(
        "Weight of R-Drop (Wu et al. 2021, who use 5): each pair is read twice, and both outputs "
        "should agree in spite of dropout. An update takes twice as long.",
        0.0,
    )
    optimizer: Literal["adam", "muon"] = _updates(
        "adam: the optimizer of --optim, Adam, for all parameters. muon: Muon (Jordan et al. "
        "2024) for the matrices of the layers, Adam for the rest; --weight_decay is then for the "
        "matrices alone, and 0.5 by default.",
        "adam",
    )
    moving_average: float | None = _updates(
        "Decay of an exponential moving average of the weights, such as 0.999, which is "
        "evaluated at the end, and saved if it is better. Default: no moving average."
    )
    average_last: int | None = _updates(
        "Number of last checkpoints to keep and to average (section 6.1 of the paper); 1: no "
        "averaging. The average is saved unless both its score and its loss are worse than the "
        "best checkpoint's; without --validation, only if this option is given. Default: 5."
    )
    minutes: float | None = _length(
        "Minutes for the whole run. All settings that are not given are chosen by the data and by "
        "the speed of the machine, each with a line that says why; the learning rate reaches 0 at "
        "the end. Instead of --max_steps, --num_train_epochs, --lr_scheduler_type and "
        "--max_minutes."
    )
    max_minutes: float | None = _length(
        "Minutes after which training ends, evaluates, and keeps the best checkpoint. Default: no "
        "limit."
    )
    early_stopping_patience: int | None = _length(
        "Number of evaluations without a better --metric_for_best_model after which training ends. "
        "Default: never."
    )
    resume: bool = _length("Continues from the last checkpoint in --output_dir.", False)
    init_from: str | None = _tuning(
        "Saved model to fine-tune. It keeps its tokenizer and sizes; --preset and the tokenizer "
        "options are ignored. --learning_rate is then 1e-4 by default, and --warmup_steps 100."
    )
    source_language: str | None = _tuning(f"For --init_from and --tokenizer. {SOURCE_LANGUAGE}")
    target_language: str | None = _tuning(
        "Target language of all pairs, for models of --init_from and --tokenizer that know "
        "several. A model with language codes (NLLB, M2M100) then translates into it by default."
    )
    freeze: list[str] = _tuning(
        "Parts of the model of --init_from that stay as they are: encoder, decoder (layers and "
        "norms), embeddings (tables, and an output projection that is tied to one), or patterns of "
        "parameter names, such as 'model.encoder.layers.0.*'.",
        [],
    )
    max_validation_pairs: int | None = _evaluation(
        "Number of validation pairs that are scored: a sample in which each file and language has "
        "its share, the same in each run. Default: all."
    )
    metrics: list[str] = _evaluation(
        "Scores of the validation pairs; see evaluate --help. The first decides which checkpoint "
        "is best, unless --metric_for_best_model names another one.",
        DEFAULT_METRICS,
        choices=tuple(METRICS),
    )
    bleu_tokenize: str = _evaluation(BLEU_TOKENIZE, "auto")
    language: list[str] = _card(
        "Languages of the pairs for the model card, as ISO 639 codes, such as de en.", []
    )
    dataset_tags: list[str] = _card(
        "Datasets on the Hub for the model card. Default: the one that --train names.", []
    )
    license: str | None = _card("Licence of the model for its card, such as apache-2.0.")

    def __post_init__(self) -> None:
        """Joins paths with `data`; a single name that does not exist is a dataset on the Hub."""
        if self.data is not None:
            for name in ("train", "validation"):
                paths = [str(Path(self.data, path)) for path in getattr(self, name)]
                object.__setattr__(self, name, paths)
            # A copy with other settings has these paths already.
            object.__setattr__(self, "data", None)
        is_on_hub = len(self.train) == 1 and not Path(self.train[0]).exists()
        if is_on_hub and not self.dataset_tags:
            object.__setattr__(self, "dataset_tags", list(self.train))


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search, as in `Translator`."""

    model: list[str] | None = _model(
        "Folder or Hub name of a model. Given several times, the models translate as an ensemble, "
        "by the mean of their probabilities.",
        action="append",
    )
    engine: EngineName = _model(
        "Library that translates; ctranslate2 needs a folder made by the command export.",
        "torch",
    )
    source_language: str | None = _model(SOURCE_LANGUAGE)
    target_language: str | None = _model(TARGET_LANGUAGE)
    dtype: DTypeName = _model(DTYPE, "auto")
    # Each field of `Search` that has a help text is an option.
    search: dict[str, Any] = field(
        default_factory=dict, metadata={"options_of": Search, "group": "search"}
    )
    max_tokens_per_batch: int | None = _search(
        "Source tokens of a batch, counted with padding once for each beam or sample; sources of "
        "fewer than 16 tokens count as 16. Changes speed and memory, never results. Default: 4096; "
        "64000 on a GPU."
    )
    max_source_length: int | None = _search(
        "Longest source, in tokens with </s>. A longer line is cut at sentence ends, else at "
        "blanks, else between tokens; the translations of its pieces are joined with blanks. "
        "Default: --max_length of the model's training, else its max_position_embeddings."
    )
    split_sentences: bool | None = _search(
        "Translates each sentence of a line separately: a model that was trained on single "
        "sentences leaves out most of a longer line. Default: on if the training lines were single "
        "sentences, as run.json of the model says.",
        action=BooleanOptionalAction,
    )
    copy_without_letters: bool | None = _search(
        "Copies text without letters, such as 12:30 or -. Default: on if, as run.json of the "
        "model says, its training lines were single sentences, and at most one in a hundred had "
        "no letter.",
        action=BooleanOptionalAction,
    )
    trust_remote_code: bool = _model(TRUST_REMOTE_CODE, False)


@dataclass(frozen=True)
class TranslateSettings(SearchSettings):
    """Settings of a translation."""

    input: str | None = option(
        "File to translate line by line, plain, .gz, .bz2 or .xz. Default: standard input."
    )
    output: str | None = option(
        "File for the translations; it must not hold text already, except with --resume. It holds "
        "complete lines in order at any moment. Default: standard output."
    )
    shard: str | None = option(
        "Translates a part of --input, such as 3/64: the third of 64 parts of consecutive lines, "
        "for arrays of jobs. The outputs of all parts in order are the translation of the input.",
        metavar="NUMBER/OF",
    )
    tag_column: int | None = option(
        "Number of the column of the target language in an input whose columns are separated by "
        "tabs, from 2; the text is in column 1. For models of several directions."
    )
    resume: bool = option(
        "Continues an --input after the last complete line of --output; a complete one stays as "
        "it is. OUTPUT.job.json records what the translation depends on; another model, input or "
        "setting is refused.",
        False,
    )
    prefix: str = option("Text that every translation begins with.", "")
    prefix_file: str | None = option("File with the beginning of each translation, one a line.")
    n_best: int = option(
        "Number of translations of each line, one a row: line number, score and text, separated by "
        "tabs.",
        1,
    )
    scores: bool = option(
        "Writes line number, score and text, separated by tabs. The score is log-probability / "
        "length^length_penalty.",
        False,
    )
    details: bool = option(
        "Writes one JSON object a line: all hypotheses with their scores, tokens, the "
        "log-probability of each token, and the alignment as pairs source-target of token "
        "positions. Engine torch only.",
        False,
    )


# Formats of exports to a runtime; the others are files of other programs.
RUNTIMES = ("ctranslate2", "onnx")
# Where a model's folder keeps its own export to CTranslate2.
EXPORT_FOLDER = "ctranslate2"
