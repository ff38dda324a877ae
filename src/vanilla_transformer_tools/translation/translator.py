"""Text in, text out: translating lines with a trained model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count, repeat
from os import PathLike
from typing import Any, NamedTuple, Self, TypeVar, cast

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer_tools.saved_folder import gpu_computes_bfloat16
from vanilla_transformer_tools.search import Search
from vanilla_transformer_tools.settings import EngineName
from vanilla_transformer_tools.text.languages import end_length
from vanilla_transformer_tools.text.sentences import has_letter
from vanilla_transformer_tools.text.tokenizer_pair import (
    TokenizerPair,
    has_target_vocabulary,
    knows_both_sides,
    speller,
)
from vanilla_transformer_tools.translation.engine import Engine, Hypothesis
from vanilla_transformer_tools.translation.loading import folders_of, load_engine, training_defaults
from vanilla_transformer_tools.translation.results import (
    Translation,
    different_first,
    join_parts,
    translation_of,
    with_alternatives,
)
from vanilla_transformer_tools.translation.segments import (
    Piece,
    cut_lines,
    encode_prefix,
    with_prefixes,
    without_surrogates,
)
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

# A window of lines is sorted by length: at most this number of lines, and no further line after
# this number of characters. Results come in order, so a line waits for its window only.
WINDOW_LINES = 2048
WINDOW_CHARACTERS = 2**20

# Source tokens of a batch, unless the caller gives another number.
TOKENS_ON_CPU, TOKENS_ON_GPU = 4096, 64_000

# Shorter sources count as this many tokens of a batch, since each hypothesis takes memory too.
LEAST_TOKENS = 16

Item = TypeVar("Item")


class _Line(NamedTuple):
    """A line, its number in messages, and the ids that its translation begins with."""

    number: int
    text: str
    prefix: list[int]


# Why only the engine `torch` can do what these settings ask for.
_NEEDS_TORCH = {
    "details": "the tokens of an output are scored and aligned by reading it again",
    "seed": "CTranslate2 has its own random numbers",
}


class Translator:
    """Translates lines of text, independently of each other.

    Args:
        model: A sequence-to-sequence model in any dtype, on any device; or an engine.
        tokenizer: Of any class; one that names languages by codes is copied for those given.
        search: How to search; None: as the generation config says.
        target_tokenizer: Tokenizer of the output, if the target has its own vocabulary; None:
            `tokenizer`.
        source_language: Language of the lines, for a model whose tokenizer names languages of both
            sides, such as NLLB's; None: the one that the tokenizer was saved with.
        target_language: To translate into, for a model of several directions; None: the one with
            which the model begins its outputs, if it has one. A tag counts as a token of each
            source.
        generation_config: Where the defaults of a search come from; None: the model's.
        max_tokens_per_batch: Source tokens of a batch; padding, beams and samples counted, and a
            shorter source as one of 16; None: 64,000 on a GPU, else 4,096.
        max_source_length: Lines of more tokens, `</s>` counted, are cut into pieces, and so are
            those beyond the model's last position; None: the longest that the model expects.
        split_sentences: Whether each sentence of a line is translated separately: a model that was
            trained on single sentences leaves out most of a line of several. None: no.
        copy_without_letters: Whether text without letters, such as `12:30` or `-`, is its own
            translation; not if it has a prefix. None: no.
        details: Whether tokens, their scores and alignments are wanted; engine `torch` only.
        settings: Fields of `Search` that differ, such as `num_beams=5`.

    Raises:
        ValueError: If settings are out of range or exclude each other, the model does not have a
            language or needs one, or the tokenizer of its target is missing.
        TypeError: If `Search` has no such field, or the model is wrapped in something else.
    """

    def __init__(
        self,
        model: PreTrainedModel | Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        search: Search | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        generation_config: GenerationConfig | None = None,
        max_tokens_per_batch: int | None = None,
        max_source_length: int | None = None,
        split_sentences: bool | None = None,
        copy_without_letters: bool | None = None,
        details: bool = False,
        **settings: Any,
    ) -> None:
        if isinstance(model, PreTrainedModel):
            generation_config = generation_config or model.generation_config
        self.engine = _engine_of(model)
        self.generation_config = generation_config = generation_config or GenerationConfig()
        self.tokenizers = TokenizerPair(tokenizer, target_tokenizer or tokenizer).between(
            source_language, target_language, generation_config
        )
        self.source_language, self.target_language = source_language, target_language
        search = replace(search, **settings) if search else Search.of(generation_config, **settings)
        forced = (
            self.tokenizers.first_token,
            search.first_token,
            generation_config.forced_bos_token_id,
        )
        first_token = next((token for token in forced if token is not None), None)
        self.search = search = replace(search, first_token=first_token)
        self.details = details
        self.split_sentences = bool(split_sentences)
        self.copy_without_letters = bool(copy_without_letters)
        if max_source_length is None:
            max_source_length = self.engine.max_positions
        self.max_source_length = int(min(max_source_length, self.engine.last_position))
        rows = search.num_hypotheses if search.do_sample else search.num_beams
        if max_tokens_per_batch is None:
            on_gpu = (
                isinstance(self.engine, TorchEngine) and self.engine.model.device.type == "cuda"
            )
            max_tokens_per_batch = TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU
        self._budget = max_tokens_per_batch
        self.max_tokens_per_batch = max_tokens_per_batch // rows
        if faults := list(self._faults(generation_config.decoder_start_token_id)):
            raise ValueError("\n".join(faults))

    def _faults(self, start_token: int | None) -> Iterator[str]:
        pair = self.tokenizers
        if pair.start_token not in (None, start_token):
            yield (
                "`target_language` must be the one that `decoder_start_token_id` names, got "
                f"{pair.target.convert_ids_to_tokens(pair.start_token)}, whose id is "
                f"{pair.start_token}, and {start_token}. Leave it out, set "
                "`decoder_start_token_id` of generation_config.json, or train with "
                "--target_language."
            )
        config = self.engine.model.config if isinstance(self.engine, TorchEngine) else None
        has_one = pair.is_joint and not knows_both_sides(pair.target)
        if config and has_one and has_target_vocabulary(config.to_dict()):
            yield (
                "`target_tokenizer` must be the one of the model's own target vocabulary, of "
                f"{config.decoder_vocab_size} tokens, got none. Give it, or let "
                "`from_pretrained` load both."
            )
        prefix = len(pair.source_prefix)
        if self.max_source_length < 2 + prefix:
            yield (
                f"`max_source_length` must be at least {2 + prefix}, one token of text and `</s>`"
                f"{' after a tag' * prefix}, got {self.max_source_length}."
            )
        wanted = {"details": self.details, "seed": self.search.seed}
        for name, reason in _NEEDS_TORCH.items():
            if wanted[name] and not isinstance(self.engine, TorchEngine):
                engine = type(self.engine).__name__
                yield f"`{name}` needs the engine 'torch', since {reason}; got {engine}."

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | PathLike[str] | Sequence[str],
        *,
        engine: EngineName = "torch",
        dtype: str = "auto",
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> Self:
        """Loads model and tokenizer from a folder or the Hub, onto a GPU if there is one.

        Args:
            model_name_or_path: Several names: an ensemble. Models of other classes become ours in
                memory where the logits agree, and otherwise search with their own `generate`.
            engine: Library; `ctranslate2` takes a folder that `vanilla-transformer export` made.
            dtype: Dtype of the weights while they are used, such as `bfloat16`; `auto`: as saved,
                or bfloat16 on a GPU that computes in it.
            trust_remote_code: Runs the code in the folder of a model of another architecture.
            settings: Arguments of the class. If the folder has a record of the training, the
                default of `max_source_length` is its `max_length`, and `split_sentences` and
                `copy_without_letters` are the defaults for a model of single sentences.
        """
        if dtype == "auto" and engine != "ctranslate2" and gpu_computes_bfloat16():
            dtype = "bfloat16"
        if isinstance(model_name_or_path, str | PathLike):
            model_name_or_path = [str(model_name_or_path)]
        names = folders_of(engine, list(model_name_or_path))
        given = {name: value for name, value in settings.items() if value is not None}
        settings = training_defaults(names[0]) | given
        loading: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        tokenizers, *others = (TokenizerPair.from_pretrained(name, **loading) for name in names)
        for name, pair in zip(names[1:], others, strict=True):
            if pair.contents != tokenizers.contents:
                raise ValueError(
                    "The models of an ensemble must share one tokenizer, got another one in "
                    f"{name!r} than in {names[0]!r}. Train them with the same tokenizer."
                )
        loaded, config = load_engine(engine, names, dtype=dtype, **loading)
        settings.setdefault("target_tokenizer", tokenizers.target)
        settings.setdefault("generation_config", config)
        return cls(loaded, tokenizers.source, **settings)

    def changed(self, **settings: Any) -> Self:
        """A translator with the same engine, in which these arguments of the class differ."""
        kept = ["search", "target_tokenizer", "source_language", "target_language"]
        kept += ["generation_config", "max_source_length", "split_sentences"]
        kept += ["copy_without_letters", "details"]
        arguments = {name: getattr(self, name) for name in kept}
        arguments["max_tokens_per_batch"] = self._budget
        return type(self)(self.engine, self.tokenizer, **arguments | settings)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the source."""
        return self.tokenizers.source

    @property
    def target_tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the target."""
        return self.tokenizers.target

    def translate(
        self,
        lines: Iterable[str],
        prefixes: str | Iterable[str] = "",
        *,
        numbers: Iterable[int] | None = None,
        has_next: Callable[[], bool] = lambda: True,
    ) -> Iterator[Translation]:
        """Translates lines, in order, one result for each; blank lines are returned unchanged.

        White space and invisible characters around a line, and around its pieces, are not
        translated, and are in the result as they were; a line feed becomes a blank.
        Only the lines of one window are in memory. Lone surrogates, which Python puts in place of
        bytes that are not UTF-8, are translated as U+FFFD. An error of `lines` or `prefixes` is
        raised after the translations of all earlier lines, an error of the engine after those
        before the first unfinished line.

        Args:
            lines: Text.
            prefixes: Text that translations begin with: one for all lines, or one for each. A
                blank at its end is dropped. If the line is cut, its first piece has the prefix.
            numbers: One for each line, for warnings; None: from 1.
            has_next: Whether another line is there now; if not, those before it need not wait.

        Raises:
            ValueError: If there are more lines than prefixes or numbers, or fewer prefixes, a
                prefix is too long or has words that the target vocabulary lacks, or `lines` is a
                single string.
        """
        if isinstance(lines, str):
            raise ValueError(
                f"`lines` must hold several strings, got the single one {lines!r:.60}."
            )
        read = self._read(with_prefixes(iter(lines), prefixes), numbers or count(1))
        for window in windows(read, has_next, lambda line: len(line.text)):
            yield from self._translate_window(window)

    def _read(self, pairs: Iterator[tuple[str, str]], numbers: Iterable[int]) -> Iterator[_Line]:
        room = self.engine.last_position - len(self.search.opening([])) - 1
        own_numbers = iter(numbers)
        for line, begun in pairs:
            number = next(own_numbers, None)
            if number is None:
                raise ValueError(
                    "There must be as many numbers as lines, got fewer. Give one for each, or none."
                )
            prefix = encode_prefix(begun, self.target_tokenizer, number)
            if len(prefix) > room:
                raise ValueError(
                    f"The prefix of line {number:,} must leave room for what follows it: the model "
                    f"writes at most {self.engine.last_position:.0f} tokens, got a prefix of "
                    f"{len(prefix)}. Shorten it."
                )
            yield _Line(number, without_surrogates(line), prefix)

    def _translate_window(self, window: list[_Line]) -> Iterator[Translation]:
        """The translation of each line, in order; an error comes after those before it."""
        rows = cut_lines(
            [line.text for line in window],
            self.tokenizer,
            self.max_source_length,
            tag=self.tokenizers.source_prefix,
            split_sentences=self.split_sentences,
            numbers=[line.number for line in window],
        )
        for line, row in zip(window, rows, strict=True):
            for piece in row[:1]:
                piece.prefix = line.prefix
            for piece in row:
                if self.copy_without_letters and not (piece.prefix or has_letter(piece.text)):
                    piece.translation = self._copy(piece.text)
        fault: Exception | None = None
        try:
            pieces = chain.from_iterable(rows)
            for batch in self._batches([piece for piece in pieces if not piece.translation]):
                for piece, translation in zip(batch, self._translate_batch(batch), strict=True):
                    piece.translation = translation
        except Exception as error:
            fault = error
        for line, row in zip(window, rows, strict=True):
            ready = [piece.translation for piece in row if piece.translation]
            if fault and len(ready) < len(row):
                raise fault
            yield join_parts(ready or [self._copy(line.text)])

    def _copy(self, text: str) -> Translation:
        """The translation of a blank line, or of text without letters: the text."""
        copy = Translation(text.replace("\n", " "), score=0.0 if self.search.scores else None)
        return with_alternatives([copy] * self.search.num_hypotheses)

    def _batches(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Pieces of similar length, longest first, within the token budget."""

        def lengths(piece: Piece) -> tuple[int, int]:
            return len(piece.prefix), len(piece.source)

        batch: list[Piece] = []
        for piece in sorted(pieces, key=lengths, reverse=True):
            prefix_length, width = lengths(batch[0] if batch else piece)
            is_full = (len(batch) + 1) * max(width, LEAST_TOKENS) > self.max_tokens_per_batch
            if batch and (is_full or len(piece.prefix) != prefix_length):
                yield batch
                batch = []
            batch.append(piece)
        if batch:
            yield batch

    def _translate_batch(self, batch: list[Piece]) -> list[Translation]:
        """The translation of each piece, in the white space of its source."""
        search, count = self.search, self.search.num_hypotheses
        limits = [
            max(
                len(piece.source) + search.max_extra_tokens,
                len(search.opening(piece.prefix)) + 1,
            )
            for piece in batch
        ]
        may_repeat = count > 1 and not search.do_sample
        if may_repeat:
            # Several outputs of a beam may have one text.
            search = replace(search, num_hypotheses=search.num_beams)
        sources, prefixes = [piece.source for piece in batch], [piece.prefix for piece in batch]
        found = self.engine.translate_batch(sources, prefixes, limits, search)
        details = self._details(batch, found) if self.details else repeat({})
        # Not all tokenizers count the codes of languages among their special tokens.
        first = len(search.opening([]))
        translations = []
        for piece, hypotheses in zip(batch, found, strict=True):
            ranked = [
                translation_of(
                    hypothesis,
                    piece.text,
                    self.target_tokenizer,
                    first,
                    unknown_source=piece.unknown,
                    score=hypothesis.score if search.scores else None,
                    **one,
                )
                for hypothesis, one in zip(hypotheses, details, strict=False)
            ]
            ranked = different_first(ranked)[:count] if may_repeat else ranked
            translations.append(with_alternatives(ranked))
        return translations

    def _details(
        self, batch: list[Piece], found: list[list[Hypothesis]]
    ) -> Iterator[dict[str, Any]]:
        """Tokens, their scores and alignments, from a teacher-forced pass over the outputs."""
        rows = [
            (piece.source, hypothesis)
            for piece, hypotheses in zip(batch, found, strict=True)
            for hypothesis in hypotheses
        ]
        passes = cast(TorchEngine, self.engine).force(
            [piece.source for piece in batch],
            [hypothesis.ended for _, hypothesis in rows],
            align=True,
            end_length=end_length(self.tokenizers.source),
        )
        spell_source = speller(self.tokenizers.source, "source")
        spell_target = speller(self.tokenizers.target, "target")
        for (source, hypothesis), forced in zip(rows, passes, strict=True):
            yield {
                "source_tokens": tuple(spell_source(source)),
                "tokens": tuple(spell_target(hypothesis.ended)),
                "token_scores": tuple(forced.log_probs),
                "alignment": tuple(
                    (forced.alignment[place], place) for place in range(len(hypothesis.tokens))
                ),
            }


def windows(
    items: Iterator[Item], has_next: Callable[[], bool], characters: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Items that are translated together; an error is raised after those before it."""
    window: list[Item] = []
    size = 0
    try:
        for item in items:
            window.append(item)
            size += characters(item)
            is_full = len(window) == WINDOW_LINES or size >= WINDOW_CHARACTERS
            if is_full or not has_next():
                yield window
                window, size = [], 0
    except Exception:
        if window:
            yield window
        raise
    if window:
        yield window


def _engine_of(model: PreTrainedModel | Engine) -> Engine:
    """The engine that searches with a model, or is one."""
    if isinstance(model, PreTrainedModel):
        return TorchEngine(model)
    if not hasattr(model, "translate_batch"):
        raise TypeError(
            "`model` must be a PreTrainedModel or an engine, got "
            f"{type(model).__name__}. Unwrap it: `get_base_model()` of a PEFT model keeps its "
            "adapter, and `torch.compile` leaves the model that it was given as it was."
        )
    return model
