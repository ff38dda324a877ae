"""What `lab/contracts.md` says of this model and its neighbours."""

from itertools import chain
from pathlib import Path

import pytest

from contracts import CHECKS, Candidate, Check, computing, sharing, training

DOCUMENT = Path(__file__).parents[2] / "lab" / "contracts.md"
ALL_CHECKS = list(chain(*CHECKS.values()))
# Each takes seconds, and quick tests of `import` and `export` repeat most of it.
SLOW = (computing.exports, computing.exports_past_the_maximum, sharing.loads_elsewhere)

# Transformers' own doing.
BROKEN = {
    computing.asking_leaves_a_model_that_pickles: "its recording hooks are local functions",
}

# What the neighbours do instead; a check that all three pass shows elsewhere that it can fail.
BREACHES = [
    (training.accumulates_exactly, "m2m100", r"gradient norms [\d.]+ / [\d.]+ / [\d.]+"),
    (training.smooths_through_trainer, "m2m100", "decoder_input_ids"),
    (training.never_holds_all_logits, "m2m100", "2,048,000 entries"),
    (computing.positions_survive_the_meta_device, "m2m100", "off by nan"),
    (computing.reads_past_the_maximum, "marian", "index out of range"),
    (computing.writes_past_the_maximum, "marian", "index out of range"),
    (computing.left_padding_of_sources_changes_nothing, "marian", r"off by 0\.\d"),
    (computing.left_padding_of_targets_changes_nothing, "marian", r"off by 0\.\d"),
    (computing.left_padded_prefixes_decode, "m2m100", r"off by 0\.\d"),
    (computing.returns_weights_when_asked, "m2m100", "none are returned"),
    (computing.generation_returns_weights_when_asked, "m2m100", "none are returned"),
    (computing.beams_leave_the_source_alone, "m2m100", "copied 8 times in 9 steps"),
    (computing.generation_has_room, "m2m100", "stops at 21 tokens"),
    (computing.never_writes_padding_or_start, "m2m100", r"wrote \[0, 0"),
    (computing.embeddings_stand_for_ids, "marian", "encoder_inputs_embeds off by"),
    (sharing.untied_projection_survives, "m2m100", "a table each"),
    (sharing.resizes, "marian", r"size of tensor a \(48\)"),
    (sharing.lists_all_faults, "m2m100", "names 0 of 4"),
    (sharing.reports_misspelt_fields, "m2m100", "accepted silently"),
    (sharing.trains_a_tokenizer, "m2m100", "no method that trains it"),
]


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, marks=pytest.mark.slow if check in SLOW else ()) for check in ALL_CHECKS],
    ids=name_of,
)
def test_this_model_keeps_each_contract(request, tmp_path, check: Check):
    if check in BROKEN:
        request.applymarker(pytest.mark.xfail(reason=BROKEN[check], strict=True))

    check(Candidate("vanilla", tmp_path))


# Theirs, not ours: what Transformers warns about when a model has no length of its own.
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize(("check", "family", "breach"), BREACHES, ids=name_of)
def test_checks_fail_where_a_neighbour_breaks_a_contract(tmp_path, check, family, breach):
    with pytest.raises(Exception, match=breach):
        check(Candidate(family, tmp_path))


def test_document_has_a_row_for_each_check():
    rows = DOCUMENT.read_text(encoding="utf-8").split("\n")

    documented = [row.split(" | ")[1] for row in rows if row.startswith("| ")][2:-1]
    assert documented == [check.__doc__.removesuffix(".") for check in ALL_CHECKS]
