"""`benchmarks/service.py`: what its clients send, and whether they notice a wrong answer."""

import os
from itertools import pairwise

import pytest

from service import (
    Service,
    ask_lines,
    faults,
    storm,
)
from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.service.app import Service as AppService
from vanilla_transformer_tools.service.translators import ServedLanguages, Translators
from vanilla_transformer_tools.settings import ServeSettings
from vanilla_transformer_tools.translation import Translator

from ..models import save_small_model
from ..support.http_service import running

LINES = ["ein hund rennt", "ja", "der alte mann", "oh nein"]


@pytest.fixture(scope="module")
def expected_and_service(tmp_path_factory):
    tokenizer = VanillaTransformerTokenizer.train(LINES * 3, vocab_size=320)
    folder = save_small_model(tmp_path_factory.mktemp("model"), tokenizer)
    translator = Translator.from_pretrained(str(folder), num_beams=1, max_extra_tokens=2)
    languages = ServedLanguages(("xx",), ("yy",))
    translators = Translators(translator, languages)
    app = AppService(translators, ServeSettings(max_texts=100, max_requests=32, max_delay=1))
    found = [one.text for one in translator.translate(LINES)]
    assert len(set(found)) == len(LINES)
    with running(app) as running_service:
        yield dict(zip(LINES, found, strict=True)), Service(running_service.port, os.getpid())


def test_storm_finds_all_answers_right_and_measures_memory_by_quarters(expected_and_service):
    expected, found = expected_and_service

    memory, counts = storm(found, expected, 60, seed=3)

    assert faults(counts) == 0
    assert sum(each["sent"] for each in counts.values()) == 60
    assert all(each["sent"] == each["right"] for each in counts.values())
    assert len(memory) == 5
    assert min(memory) > 0


def test_storm_and_speed_notice_answers_that_are_mixed_up(expected_and_service):
    expected, found = expected_and_service
    swapped = {one: expected[other] for one, other in pairwise([*LINES, LINES[0]])}

    _, counts = storm(found, swapped, 20, seed=3)

    assert counts["text"]["wrong"] == counts["text"]["sent"] > 0
    assert faults(counts) > 0
    with pytest.raises(ValueError, match="must be"):
        ask_lines(found, swapped, clients=2)
