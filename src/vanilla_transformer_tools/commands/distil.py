"""The `distil` command: a small model from the translations of a large one."""

from dataclasses import Field, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from vanilla_transformer_tools.commands.command import load_translator
from vanilla_transformer_tools.commands.train import read_options
from vanilla_transformer_tools.commands.translate import JobRecord, plan_translation, record_path
from vanilla_transformer_tools.settings import (
    SearchSettings,
    TrainSettings,
    TranslateSettings,
    option,
)

_EXAMPLE = """The teacher translates the sources of --train, and the student is trained on its
translations (sequence-level knowledge distillation, Kim and Rush 2016). The options of train
apply, Trainer's too; --help-all lists them. OUTPUT_DIR/teacher keeps the translations.
Called again after a crash or Ctrl-C, the same command continues; --resume is not needed.

example:
  vanilla-transformer distil --teacher runs/de-en --train train.de train.en \\
      --validation valid.de valid.en --config d_model=64 --output_dir runs/student
"""

# Files of the folder of the teacher's outputs.
TEACHER_FOLDER = "teacher"
SOURCES_FILE = "sources.txt"
REFERENCES_FILE = "references.txt"
OUTPUTS_FILE = "outputs.txt"
PAIR_FILES = ("student_sources.txt", "student_targets.txt")

_PREFIX = "teacher_"


def _of_teacher(name: str) -> Any:
    """The option of a search, for the teacher."""
    searched: Field[Any] = SearchSettings.__dataclass_fields__[name]
    return option(f"Of the teacher: {searched.metadata['help']}", searched.default, group="teacher")


@dataclass(frozen=True)
class DistilSettings(TrainSettings):
    """Settings of a distillation; names with `teacher_` are options of `translate`."""

    teacher: list[str] = option(
        "Folders or Hub names of the teacher: models of this package or other sequence-to-sequence "
        "models of Transformers. Several are an ensemble.",
        [],
        group="teacher",
    )
    targets: Literal["teacher", "both"] = option(
        "Targets of the student: only the teacher's outputs, or the references too.",
        "teacher",
        group="teacher",
    )
    word_level: float = option(
        "Share of the loss that compares the student's distribution over the vocabulary with the "
        "teacher's at each target token (Kim and Rush 2016, section 3.1). The student then has the "
        "teacher's tokenizers.",
        0.0,
        group="teacher",
    )
    teacher_n_best: int = option(
        "Number of outputs of each source, at most --teacher_num_beams. The student learns from "
        "all of them, or from the --nearest.",
        1,
        group="teacher",
    )
    nearest: Literal["chrf", "bleu"] | None = option(
        "Of the --teacher_n_best outputs, keeps only the one most like the reference, by chrF or "
        "BLEU of the sentence.",
        group="teacher",
    )
    teacher_engine: Literal["auto", "torch", "ctranslate2"] = _of_teacher("engine")
    teacher_source_language: str | None = _of_teacher("source_language")
    teacher_target_language: str | None = _of_teacher("target_language")
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _of_teacher("dtype")
    teacher_num_beams: int | None = _of_teacher("num_beams")
    teacher_length_penalty: float | None = _of_teacher("length_penalty")
    teacher_max_extra_tokens: int = _of_teacher("max_extra_tokens")
    teacher_max_tokens_per_batch: int | None = _of_teacher("max_tokens_per_batch")
    teacher_max_source_length: int | None = _of_teacher("max_source_length")
    teacher_trust_remote_code: bool = _of_teacher("trust_remote_code")


def distil(argv: list[str]) -> None:
    """Train a small student on the translations of a teacher."""
    settings, arguments, _ = read_options(distil, DistilSettings, _EXAMPLE, argv)
    _check(settings, arguments.world_size)

    from vanilla_transformer_tools.training.checkpoints import (
        check_free,
        claimed,
        closed_checkpoints,
        discard_stopped,
    )
    from vanilla_transformer_tools.training.distillation import load_teachers, word_level
    from vanilla_transformer_tools.training.recipe import check_settings
    from vanilla_transformer_tools.training.run import train as train_model
    from vanilla_transformer_tools.training.starting_model import saved_start

    check_settings(settings, arguments)
    if settings.word_level and not settings.init_from:
        settings = replace(settings, tokenizer=settings.tokenizer or settings.teacher[0])
    start = settings.init_from or settings.tokenizer or ""
    if start in settings.teacher:
        # The student then has its teacher's languages too.
        settings = replace(
            settings,
            source_language=settings.source_language or settings.teacher_source_language,
            target_language=settings.target_language or settings.teacher_target_language,
        )
    if start:
        # Faults are reported before the teacher translates.
        saved_start(settings, start)
    training_pass = None
    if settings.word_level:
        teachers = load_teachers(settings.teacher, start, arguments.device)
        training_pass = partial(word_level, teachers=teachers, weight=settings.word_level)
    output = Path(arguments.output_dir)
    folder = output / TEACHER_FOLDER
    has_outputs = (folder / OUTPUTS_FILE).exists()
    with claimed(output):
        continues = has_outputs and bool(closed_checkpoints(output))
        if not continues:
            if has_outputs:
                discard_stopped(output)
            check_free(output)
        search = _translate(settings, folder)
        if not continues:
            # Those of a run that has begun stay as they are: training compares their options.
            _write_pairs(settings, folder)
    student = replace(
        settings,
        # Plain text, so that `source_column` and `target_column` are those of the validation pairs.
        train=[str(folder / name) for name in PAIR_FILES],
        teacher_num_beams=search["num_beams"],
        teacher_length_penalty=search["length_penalty"],
        resume=continues,
    )
    train_model(student, arguments, training_pass)


def _check(settings: DistilSettings, processes: int) -> None:
    faults = []
    if processes > 1:
        faults.append(
            f"distil translates in one process, got {processes}. Run it in one until the teacher "
            "is done, and train on the two files that it names with `accelerate launch "
            "scripts/train.py --train ...`."
        )
    if not settings.teacher:
        faults.append("--teacher needs the folders or Hub names of one or more models.")
    if not 0 <= settings.word_level <= 1:
        faults.append(f"--word_level must be between 0 and 1, got {settings.word_level}.")
    if faults:
        raise ValueError("\n".join(faults))


def _translate(settings: DistilSettings, folder: Path) -> dict[str, Any]:
    """Translates the training sources as far as that is not done; returns the teacher's search."""
    from vanilla_transformer_tools.files import opened_whole
    from vanilla_transformer_tools.text.parallel_text import parallel_text, read_pairs

    text = parallel_text(settings, settings.train, settings.train_split)
    folder.mkdir(parents=True, exist_ok=True)
    with opened_whole([folder / SOURCES_FILE, folder / REFERENCES_FILE]) as files:
        for pair in read_pairs(text):
            for file, side in zip(files, pair, strict=False):
                file.write(side.replace("\n", " ") + "\n")
    outputs = folder / OUTPUTS_FILE
    of_teacher: dict[str, Any] = {
        item.name.removeprefix(_PREFIX): getattr(settings, item.name)
        for item in fields(settings)
        if item.name.startswith(_PREFIX)
    }
    wanted = TranslateSettings(
        model=settings.teacher,
        input=str(folder / SOURCES_FILE),
        output=str(outputs),
        resume=True,
        **of_teacher,
    )
    job = plan_translation(wanted, [])
    if not job.is_complete:
        n_best = settings.teacher_n_best
        translator = load_translator(wanted, num_hypotheses=n_best, scores=n_best > 1)
        job.run(translator).show(limit="--teacher_max_extra_tokens")
    return JobRecord.read(record_path(outputs)).search


def _write_pairs(settings: DistilSettings, folder: Path) -> None:
    """Writes the pairs from which the student learns."""
    from sacrebleu.metrics.base import Metric
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    from vanilla_transformer_tools.evaluation.bleu_tokenizers import resolve
    from vanilla_transformer_tools.files import read_lines
    from vanilla_transformer_tools.training.distillation import read_outputs, write_pairs

    similarity: Metric | None = CHRF() if settings.nearest else None
    if settings.nearest == "bleu":
        # Some lines are enough to see the script.
        lines = list(islice(read_lines(folder / REFERENCES_FILE), 10_000))
        languages = [settings.target_language, *settings.language[1:2]]
        tokenizer = resolve(settings.bleu_tokenize, lines, languages, settings.pretokenized).name
        similarity = BLEU(effective_order=True, tokenize=tokenizer, force=True)
    pairs = [folder / name for name in PAIR_FILES]
    counts = write_pairs(
        pairs,
        folder / SOURCES_FILE,
        folder / REFERENCES_FILE,
        read_outputs(folder / OUTPUTS_FILE, settings.teacher_n_best),
        settings.targets == "both",
        similarity,
    )
    print(f"{pairs[0]} and {pairs[1]}: {counts}")
