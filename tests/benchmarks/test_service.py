"""`benchmarks/service.py`: what its clients send, and whether they notice a wrong answer."""

import json
import os
import random
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
from transformers import GenerationConfig

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.service.app import Service
from vanilla_transformer_tools.service.languages import ServedLanguages
from vanilla_transformer_tools.service.requests import Limits
from vanilla_transformer_tools.service.translators import Translators
from vanilla_transformer_tools.translation import Translator

from ..conftest import save_small_model
from ..support.http_service import running

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import service_load
from service import outcome_table, speed_table
from service_load import (
    KINDS,
    Expected,
    Outcome,
    ServiceProcess,
    Stopped,
    as_json,
    percentiles,
    request,
    send_one,
    speed,
    storm,
)

LINES = ["ein hund rennt", "ja", "der alte mann", "oh nein"]


def test_table_compares_with_the_row_without_a_service():
    *_, none, one = speed_table([("none", 50.0, 0.02, 0.03), (8, 125.0, 0.004, 0.1)]).splitlines()

    assert none == "| none | 50 | 1.00 | 20.0 | 30.0 |"
    assert one == "| 8 | 125 | 2.50 | 4.0 | 100.0 |"


def test_table_of_outcomes_ends_with_sums():
    counts = {
        "text": {"sent": 3, "right": 1, "wrong": 2, "lost": 0, "busy": 7},
        "list": {"sent": 2000, "right": 10, "wrong": 0, "lost": 1, "busy": 0},
    }

    *_, text, _, total = outcome_table(counts).splitlines()

    assert text == "| text | 3 | 1 | 2 | 0 | 7 |"
    assert total == "| all | 2,003 | 11 | 2 | 1 | 7 |"


def test_percentiles_are_those_of_the_sorted_seconds():
    assert percentiles([float(number) for number in random.Random(1).sample(range(101), 101)]) == (
        50.0,
        99.0,
    )


def test_speed_without_a_service_is_lines_by_seconds():
    assert Expected({}, [1.0, 3.0, 2.0]).speed == (0.5, 2.0, 3.0)


@pytest.mark.parametrize("kind", KINDS)
def test_request_of_each_kind_has_what_must_come_back(kind):
    expected = Expected({line: line.upper() for line in LINES}, [])

    for seed in range(20):
        rng = random.Random(seed)
        body, content_type, status, answer = request(kind, rng, LINES, expected)
        assert status == {"10 MB": 413, "invalid UTF-8": 400}.get(kind, 200)
        if status == 413:
            assert len(body) > 10**7
        elif status == 400:
            with pytest.raises(UnicodeDecodeError):
                parse_qs(body.decode(), errors="strict")
        else:
            is_json = content_type == "application/json"
            q = json.loads(body)["q"] if is_json else parse_qs(body.decode())["q"][0]
            wanted = [text.upper() for text in q] if kind == "list" else q.upper()
            assert answer == {"translatedText": wanted}


@pytest.fixture(scope="module")
def expected_and_service(tmp_path_factory):
    tokenizer = VanillaTransformerTokenizer.train(LINES * 3, vocab_size=320)
    folder = save_small_model(tmp_path_factory.mktemp("model"), tokenizer)
    translator = Translator.from_pretrained(str(folder), num_beams=1, max_extra_tokens=2)
    languages = ServedLanguages(("xx",), ("yy",))
    translators = Translators(translator, languages, GenerationConfig(), 4096)
    limits = Limits(max_characters=10_000, max_texts=100, max_requests=32)
    service = Service(translators, limits, max_delay=0.001, max_waiting_characters=100_000)
    found = [one.text for one in translator.translate(LINES)]
    assert len(set(found)) == len(LINES)
    with running(service) as running_service:
        process = ServiceProcess.__new__(ServiceProcess)
        process.port = running_service.port
        process.process = SimpleNamespace(pid=os.getpid())
        yield Expected(dict(zip(LINES, found, strict=True)), []), process


def test_storm_finds_all_answers_right_and_measures_memory_by_quarters(expected_and_service):
    expected, service = expected_and_service

    outcome = storm(service, expected, 60, seed=3)

    assert outcome.faults == 0
    assert sum(found["sent"] for found in outcome.counts.values()) == 60
    assert all(found["sent"] == found["right"] for found in outcome.counts.values())
    assert len(outcome.memory) == 5
    assert min(outcome.memory) > 0


def test_storm_and_speed_notice_answers_that_are_mixed_up(expected_and_service):
    expected, service = expected_and_service
    swapped = Expected(
        dict(expected.translations)
        | {one: expected.translations[other] for one, other in pairwise([*LINES, LINES[0]])},
        [],
    )

    outcome = storm(service, swapped, 20, seed=3)

    counts = outcome.counts["text"]
    assert counts["wrong"] == counts["sent"] > 0
    assert outcome.faults > 0
    with pytest.raises(ValueError, match="must be"):
        speed(service, swapped, clients=2)


def test_speed_counts_each_line_once(expected_and_service, monkeypatch):
    expected, service = expected_and_service
    asked = []
    monkeypatch.setattr(service_load, "as_json", lambda line: asked.append(line) or as_json(line))

    rate, median, last = speed(service, expected, clients=3)

    assert sorted(asked) == sorted(LINES)
    assert rate > 0
    assert 0 < median <= last


def test_lost_answers_and_answers_after_a_429_are_counted():
    answers = [OSError("lost"), (429, {}), (200, {"translatedText": "JA"})]

    class Service:
        def ask(self, *_):
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return answer

    expected = Expected({"ja": "JA"}, [])
    arguments = (Service(), "text", random.Random(1), ["ja"], expected)

    assert send_one(*arguments) == ["sent", "lost"]
    assert send_one(*arguments) == ["sent", "busy", "right"]
    counts = {"sent": 3, "right": 1, "wrong": 1, "lost": 1, "busy": 0}
    assert Outcome([], {"text": counts}).faults == 2


def test_stop_without_an_answer_or_with_a_status_is_a_fault():
    assert Stopped(4, 4, 0, 1.0).faults == 0
    assert Stopped(3, 4, 0, 1.0).faults == 1
    assert Stopped(4, 4, -15, 1.0).faults == 1
