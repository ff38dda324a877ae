"""The service over HTTP: a real server on the loopback address, a real client, and rude ones."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPResponse
from urllib.error import HTTPError
from urllib.parse import urlencode

import pytest
from libretranslatepy import LibreTranslateAPI
from prometheus_client.parser import text_string_to_metric_families

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.service.app import Service
from vanilla_transformer_tools.service.connections import allowed_hosts
from vanilla_transformer_tools.service.requests import most_bytes
from vanilla_transformer_tools.service.translators import ServedLanguages, Translators
from vanilla_transformer_tools.settings import ServeSettings
from vanilla_transformer_tools.translation import Translator

from ..models import save_small_model
from ..support.http_service import SECONDS, RunningService, running, wait_until

LINES = ["ein hund rennt.", "ja", "der alte mann schläft", "oh nein!", "x"]
SETTINGS = ServeSettings(
    max_characters=2000, max_texts=20, max_requests=12, max_waiting_characters=5000
)
JSON, FORM = "application/json", "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A small model with random weights, whose translations of different lines differ."""
    tokenizer = VanillaTransformerTokenizer.train(LINES * 3, vocab_size=320)
    folder = save_small_model(tmp_path_factory.mktemp("model"), tokenizer)
    return Translator.from_pretrained(
        str(folder), num_beams=3, max_extra_tokens=4, max_source_length=12
    )


def serve(translator, **callers):
    translators = Translators(translator, ServedLanguages(("de",), ("en",)))
    return running(Service(translators, replace(SETTINGS, **callers)))


@pytest.fixture(scope="module")
def server(translator):
    with serve(translator) as server:
        yield server


@pytest.fixture
def own_server(translator):
    """For tests that change it."""
    with serve(translator) as server:
        yield server


@pytest.fixture
def expected(translator):
    return lambda *lines: [found.text for found in translator.translate(lines)]


class Blocked:
    """Lets no batch end before `open`; notes the texts of each."""

    def __init__(self, server: RunningService) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.pool = ThreadPoolExecutor(32)
        translators = server.service.translators
        translate = translators.translate
        self.server = server

        def wait(kind, texts):
            self.batches.append(list(texts))
            assert self.gate.wait(SECONDS)
            return translate(kind, texts)

        translators.translate = wait

    def ask(self, q: str):
        return self.pool.submit(self.server.translate, q)

    def __enter__(self) -> "Blocked":
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self.pool.shutdown()

    def occupy(self):
        """A request whose batch lasts until the gate opens."""
        future = self.ask("ja")
        wait_until(lambda: self.batches)
        return future

    def waiting(self) -> int:
        return self.server.service.batcher.waiting_characters


@pytest.fixture
def blocked(own_server):
    with Blocked(own_server) as blocked:
        yield blocked


# What comes back


def test_libretranslates_own_client_gets_the_translations_of_translator(server, expected):
    client = LibreTranslateAPI(server.url)

    assert [client.translate(line, "de", "en") for line in LINES] == expected(*LINES)
    assert client.languages() == [{"code": "de", "name": "de", "targets": ["en"]}]
    with pytest.raises(HTTPError, match="501") as refused:
        client.detect("ein hund")
    assert "does not detect languages" in json.loads(refused.value.read())["error"]
    refused.value.close()


def test_list_comes_back_as_a_list_in_order(server, expected):
    assert server.translate(LINES).content == {"translatedText": expected(*LINES)}
    assert server.translate([LINES[0]]).content == {"translatedText": expected(LINES[0])}
    assert server.translate([]).content == {"translatedText": []}


def test_lines_of_a_text_stay_lines_and_blank_ones_stay(server, expected):
    one, two, three = expected(*LINES[:3])

    answer = server.translate([f"\n{LINES[0]}\r\n \t\r{LINES[1]}\n\n{LINES[2]}\n", "", " "])

    assert answer.content == {
        "translatedText": [f"\n{one}\r\n \t\r{two}\n\n{three}\n", "", " "],
    }


def test_alternatives_are_the_next_best(server, translator):
    search = replace(translator.search, num_hypotheses=3)
    several = Translator(translator.engine, translator.tokenizer, search=search)
    found = list(several.translate(LINES[:2]))
    others = [[other.text for other in one.alternatives] for one in found]

    answer = server.translate(LINES[:2], alternatives=2)
    alone = server.translate(LINES[0], alternatives=2)

    assert answer.content == {"translatedText": [one.text for one in found], "alternatives": others}
    assert alone.content == {"translatedText": found[0].text, "alternatives": others[0]}
    assert len(set(others[0])) == 2
    assert server.translate(["", "ja"], alternatives=1).content["alternatives"][0] == [""]


def test_html_is_translated_as_translator_does(server, translator):
    page = "<ul>\n<li>ja <b>nein</b>. <!-- ja -->Ja! <i>Nein</i><li><img src=x></ul>\n<p>hund"
    found = [one.text for one in translator.changed(markup="html").translate([page, "<br>"])]

    answer = server.translate([page, "<br>"], format="html", alternatives=1)
    alone = server.translate(page, format="html")

    assert answer.content["translatedText"] == found
    assert alone.content["translatedText"] == found[0]
    for text in (found[0], answer.content["alternatives"][0][0]):
        counts = [text.count(part) for part in ("<b>", "</b>", "<!-- ja -->", "</p>", "</li>")]
        assert counts == [1, 1, 1, 1, 2]


def test_html_needs_an_engine_that_aligns(server, monkeypatch):
    monkeypatch.setattr("vanilla_transformer_tools.service.app.can_align", lambda *_: False)

    answer = server.translate("<b>ja</b>", format="html")

    assert answer.status == 400
    assert "--engine torch" in answer.content["error"]
    assert server.translate("ja").status == 200


@pytest.mark.parametrize(
    ("query", "body", "kind", "texts"),
    [
        ("?q=ja&source=de&target=en", None, "", "ja"),
        ("", "q=&source=de&target=en", FORM, ""),
        (
            "",
            "q=ja&source=de&q=x&target=en&format=text",
            f"{FORM}; charset=UTF-8",
            ["ja", "x"],
        ),
        # Halves of surrogate pairs.
        (
            "",
            rb'{"q": "ja \ud800 \ud83d\ude00", "source": "de", "target": "en", "format": ""}',
            JSON,
            "ja \ufffd \U0001f600",
        ),
        ("", b'{"q": "ja", "source": "de", "target": "en", "format": null}', JSON, "ja"),
    ],
    ids=["in the address", "empty", "repeated", "surrogates", "no format"],
)
def test_text_may_come_in_every_form(server, expected, query, body, kind, texts):
    answer = server.send("POST", f"/translate{query}", body, content_type=kind)

    found = expected(*texts) if isinstance(texts, list) else expected(texts)[0]
    assert (answer.status, answer.content) == (200, {"translatedText": found})


# What is refused


def as_json(**fields):
    return json.dumps({"q": "ja", "source": "de", "target": "en", **fields}).encode()


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b'{"q": "ja"', JSON, 400, "must be application/json, got something that cannot be parsed"),
        (b"q=%ff&source=de&target=en", FORM, 400, "must be UTF-8, got invalid start byte"),
        (b"q=ja", FORM, 400, "`source` must be a language; /languages lists them; `target` must"),
        (as_json(format="xml"), JSON, 400, "`format` must be text or html, got 'xml'"),
        (as_json(format="html", q="<b>" * 200), JSON, 400, "at most 100 deep"),
        (as_json(alternatives=-1), JSON, 400, "`alternatives` must be a whole number, got '-1'"),
        (b'{"q": "ja", "q": "nein"}', JSON, 400, "a name occurs twice"),
        (as_json(), f"{JSON}; charset=utf-16", 415, "must be UTF-8, got 'utf-16'"),
        (as_json(), "text/plain", 415, "Content-Type must be application/json or application/x-"),
        (as_json(q=["x"] * 21), JSON, 413, "at most 20 texts, got 21"),
        (as_json(q=["x" * 1000, "y" * 1001]), JSON, 413, "at most 2,000 characters, got 2,001"),
    ],
)
def test_request_that_cannot_be_translated_is_refused_with_a_reason(
    server, body, kind, status, message
):
    answer = server.send("POST", "/translate", body, content_type=kind)

    assert (answer.status, answer.content.keys()) == (status, {"error"})
    assert message in answer.content["error"]


def test_request_that_can_be_read_in_two_ways_is_refused(server):
    form = {"body": "q=ja&source=de&target=en", "content_type": FORM}
    answers = {
        server.send("POST", "/translate?target=fr", **form): (400, "got both"),
        server.send("POST", "/translate", **form, content_encoding="gzip"): (415, "compressed"),
        server.send("POST", "/%74ranslate", **form): (400, "without escapes"),
        server.send("POST", "/health/..%2ftranslate", **form): (400, "without escapes"),
    }

    for answer, (status, message) in answers.items():
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert message in answer.content["error"]


# Callers


def test_only_this_machine_and_the_page_of_the_server_are_answered(server):
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:5000", "[::1]:5000"):
        assert server.send("GET", "/health", host=host).status == 200
    assert server.send("HEAD", "/health", origin=server.url).status == 200
    for host in ("evil.com", "127.0.0.1.evil.com", "localhost.evil.com:5000", ""):
        answer = server.send("POST", "/translate", "q=ja&source=de&target=en", host=host)
        assert (answer.status, answer.content) == (400, "Invalid host header")
    for origin in ("http://evil.com", "null", "http://localhost:1"):
        answer = server.send("GET", "/health", origin=origin)
        assert answer.status == 403
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/translate", 405), ("POST", "/suggest", 404), ("GET", "//health", 404)],
)
def test_other_paths_and_methods_are_refused_in_the_same_form(server, method, path, status):
    answer = server.send(method, path)

    assert (answer.status, answer.content.keys()) == (status, {"error"})


def test_origins_and_hosts_that_are_named_are_answered(translator):
    named = {"allowed_hosts": ["a.example"], "allowed_origins": ["https://b.example"]}
    with serve(translator, **named) as server:
        asked = {"host": "a.example", "origin": "https://b.example"}
        preflight = server.send(
            "OPTIONS",
            "/translate",
            **asked,
            access_control_request_method="POST",
            access_control_request_headers="content-type",
        )
        answer = server.send("GET", "/languages", **asked)
        refused = server.send("GET", "/languages", **{**asked, "origin": "https://c.example"})
        elsewhere = server.send("GET", "/languages", host="c.example")

    for allowed in (preflight, answer):
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == "https://b.example"
        assert "access-control-allow-credentials" not in allowed.headers
    assert (refused.status, elsewhere.status) == (403, 400)


@pytest.mark.parametrize(
    ("host", "names", "expected"),
    [
        ("::1", [], ["localhost", "127.0.0.1", "[::1]", "[::1]"]),
        ("0.0.0.0", [], ["*"]),
        ("0.0.0.0", ["*.b.de"], ["localhost", "127.0.0.1", "[::1]", "0.0.0.0", "*.b.de"]),
    ],
)
def test_hosts_depend_on_the_address(host, names, expected):
    assert allowed_hosts(host, names) == expected


def test_only_source_language_need_not_be_named(server, expected):
    answer = server.send("POST", "/translate", as_json(source="auto"), content_type=JSON)

    assert (answer.status, answer.content["translatedText"]) == (200, expected("ja")[0])
    assert answer.content["detectedLanguage"] == {"language": "de", "confidence": 100.0}
    listed = server.translate(["ja", "nein"], source="auto").content["detectedLanguage"]
    assert [found["language"] for found in listed] == ["de", "de"]
    assert "detectedLanguage" not in server.translate("ja").content


@pytest.mark.parametrize("write", [json.dumps, lambda fields: urlencode(fields, doseq=True)])
def test_largest_body_has_room_for_the_most_characters_and_texts(write):
    most = most_bytes(ServeSettings(max_characters=40_000, max_texts=20_000))

    most_characters = write({"q": ["\U0001f600" * 20_000] * 2})
    most_texts = write({"q": ["\U0001f600" * 2] * 20_000})

    assert max(len(most_characters), len(most_texts)) < most < 2 * len(most_characters)


def test_body_of_ten_megabytes_is_refused_whether_it_declares_its_size_or_not(server):
    megabyte = b"x" * 2**20

    declared = server.send("POST", "/translate", 10 * megabyte, content_type=FORM)
    chunked = server.send("POST", "/translate", iter([megabyte] * 10), content_type=FORM)

    most = most_bytes(SETTINGS)
    for answer in (declared, chunked):
        assert answer.status == 413
        assert answer.content["error"].startswith(f"A body must have at most {most:,} bytes")
    assert server.translate("ja").status == 200


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["ja"] * 11, "At most 12 requests may wait"), (["x" * 2000] * 2, "At most 5,000 characters")],
)
def test_more_than_may_wait_is_refused_for_the_moment(blocked, texts, message):
    taken = [blocked.occupy(), *map(blocked.ask, texts)]
    wait_until(lambda: blocked.waiting() == len("\n".join(["ja", *texts, ""])))

    refused = blocked.server.translate("x" * 999)

    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.content["error"].startswith(message)
    blocked.gate.set()
    assert {future.result().status for future in taken} == {200}
    assert blocked.server.translate("ja").status == 200


# Rude clients, failures, and the end


def half_sent(server: RunningService) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\n"
    connection.sendall(f"{head}Content-Length: 99\r\n\r\n".encode() + b'{"q": "j')
    return connection


def counted(server: RunningService, path: str, status: int) -> float:
    metrics = server.send("GET", "/metrics").content
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    return samples.get(("vanilla_transformer_requests_total", path, str(status)), 0)


def test_body_that_is_cut_off_is_counted_and_forgotten(own_server):
    connection = half_sent(own_server)
    wait_until(lambda: own_server.service.open_requests == 1)

    connection.close()

    wait_until(lambda: own_server.service.open_requests == 0)
    assert counted(own_server, "/translate", 499) == 1
    assert own_server.translate("ja").status == 200


def test_body_that_does_not_come_is_not_waited_for(own_server, monkeypatch):
    monkeypatch.setattr("vanilla_transformer_tools.service.app._BODY_SECONDS", 0.05)

    with half_sent(own_server) as connection, HTTPResponse(connection) as answer:
        answer.begin()
        assert answer.status == 408
        assert b"got 8 bytes" in answer.read()


def test_request_of_a_client_that_has_left_leaves_the_queue(blocked):
    first = blocked.occupy()
    with socket.create_connection(("127.0.0.1", blocked.server.port)) as connection:
        body = urlencode({"q": "gone", "source": "de", "target": "en"})
        head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM}\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_until(lambda: blocked.waiting() == len("ja\n") + len("gone\n"))

    wait_until(lambda: blocked.waiting() == len("ja\n"))
    after = blocked.ask("x")
    wait_until(lambda: blocked.waiting() == len("ja\n") + len("x\n"))
    blocked.gate.set()

    assert (first.result().status, after.result().status) == (200, 200)
    assert [[str(text) for text in batch] for batch in blocked.batches] == [["ja"], ["x"]]
    assert counted(blocked.server, "/translate", 499) == 1


def test_failure_fails_one_request_only_and_is_reported_in_a_line(own_server, expected, caplog):
    translators = own_server.service.translators
    translate = translators.translate

    def fail(kind, texts):
        if "bad" in map(str, texts):
            raise RuntimeError("a secret of the engine\n" * 100)
        return translate(kind, texts)

    def fail_early(*_):
        raise RuntimeError("a secret of the service")

    translators.translate = fail
    with ThreadPoolExecutor(8) as pool:
        bad, *good = pool.map(own_server.translate, ["bad", *LINES])

    assert (bad.status, bad.content) == (500, {"error": "The translation failed: RuntimeError."})
    assert [answer.content["translatedText"] for answer in good] == expected(*LINES)
    assert counted(own_server, "/translate", 500) == 1
    assert own_server.send("GET", "/health").status == 200
    line = caplog.messages[-1]
    assert line.startswith("A translation has failed: RuntimeError: ")
    assert len(line) < 300
    # Outside of a batch too, nothing else is told.
    translators.kind = fail_early
    assert own_server.translate("bad").content == bad.content


def test_metrics_count_requests_batches_and_what_waits(blocked):
    first = blocked.occupy()
    others = [blocked.ask("x") for _ in range(3)]
    wait_until(lambda: blocked.waiting() == len("ja\n") + 3 * len("x\n"))
    during = blocked.server.send("GET", "/metrics")
    blocked.gate.set()
    assert {future.result().status for future in (first, *others)} == {200}
    blocked.server.send("GET", "/nothing/here")

    found = {
        family.name.removeprefix("vanilla_transformer_"): family
        for family in text_string_to_metric_families(blocked.server.send("GET", "/metrics").content)
    }

    assert "vanilla_transformer_waiting_characters 9.0" in during.content
    assert during.headers["content-type"].startswith("text/plain")
    totals = {
        sample.name.removeprefix("vanilla_transformer_"): sample.value
        for name in ("batch_lines", "batch_seconds", "request_seconds", "waiting_characters")
        for sample in found[name].samples
        if not sample.labels
    }
    assert (totals["batch_lines_count"], totals["batch_lines_sum"]) == (2, 4)
    assert (totals["batch_seconds_count"], totals["request_seconds_count"]) == (2, 4)
    assert totals["waiting_characters"] == 0
    assert counted(blocked.server, "other", 404) == 1
    assert "process_resident_memory_bytes" in during.content


def test_health_fails_when_nothing_is_answered(own_server):
    own_server.service.batcher.close()

    assert own_server.send("GET", "/health").status == 503
    assert own_server.send("HEAD", "/health").status == 503
