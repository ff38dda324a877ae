"""The page as its readers have it: in a browser, and through its API."""

import json
import re
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.page.page import Page
from vanilla_transformer_tools.page.served_model import Choices

from ..models import build_variant, save_small_model

pytestmark = [
    pytest.mark.slow,
    # Of Gradio's client.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TEXT = "ein hund\n\nja"
EVIL = "<script>document.title = 'broken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    """Two models with other weights."""
    root = tmp_path_factory.mktemp("models")
    for name, changes in (("one", {}), ("two", {"pre_norm": False})):
        build_variant(**changes).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return [str(root / name) for name in ("one", "two")]


@pytest.fixture(scope="module")
def page(folders):
    return Page.load(folders)


@contextmanager
def serve(*options, files=None):
    """Starts a process of the command, which may open so many files; gives the page's address."""
    pytest.importorskip("gradio_client", reason="Gradio is not installed")
    command = [sys.executable, "-m", "vanilla_transformer_tools.commands", "demo", *options]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        patch.setenv("NO_PROXY", "127.0.0.1")
        address = process.stdout.readline().removeprefix("The page is at ").strip()
        if files:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
        yield address
        process.terminate()


@pytest.fixture(scope="module")
def address(folders, tmp_path_factory):
    """Where the page of both models is."""
    examples = tmp_path_factory.mktemp("examples") / "lines.txt"
    examples.write_text("ja\nnein\n")
    with serve("--model", *folders, "--examples", examples) as address:
        yield address


# Programs


@pytest.fixture(scope="module")
def client(address, tmp_path_factory):
    from gradio_client import Client

    return Client(address, verbose=False, download_files=tmp_path_factory.mktemp("downloads"))


def test_program_gets_what_the_page_shows(client, page):
    named = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert named.keys() == {"/translate", "/attention", "/models", "/translate_file"}
    assert client.predict(api_name="/models") == ["one", "two"]
    settings = {"num_beams": 3, "num_hypotheses": 2}

    answer = client.predict(TEXT, "two", settings, api_name="/translate")

    assert answer == page.translate(TEXT, "two", settings)
    assert client.predict(TEXT, api_name="/translate") == page.translate(TEXT)
    shown = client.predict(TEXT, "one", 3, {}, api_name="/attention")
    assert shown == page.attention(TEXT, "one", 3, {})


def test_program_translates_a_file(client, page, tmp_path):
    from gradio_client import handle_file

    path = tmp_path / "in.txt"
    path.write_text(TEXT + "\n")

    made = client.predict(handle_file(path), "two", {"num_beams": 1}, api_name="/translate_file")

    expected = page.translate(TEXT, "two", {"num_beams": 1})["text"]
    assert Path(made).read_text() == expected + "\n"


def test_files_of_the_server_are_not_for_programs(address, tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("secret\n")
    on_the_server = {"path": str(path), "meta": {"_type": "gradio.FileData"}}
    endpoint = f"{address}gradio_api/call/translate_file"

    asked = httpx.post(endpoint, json={"data": [on_the_server, "", {}]})
    answer = httpx.get(f"{endpoint}/{asked.json()['event_id']}").text

    assert answer.startswith("event: error")


EVIL_HOST, EVIL_ORIGIN = {"Host": "evil.com"}, {"Origin": "http://evil.com"}


@pytest.mark.parametrize(("headers", "status"), [(EVIL_HOST, 400), (EVIL_ORIGIN, 403)])
def test_foreign_hosts_and_origins_are_refused(address, headers, status):
    # To OPTIONS, Gradio's own middleware would answer for any host.
    for method in ("GET", "OPTIONS"):
        asked = {**headers, "Access-Control-Request-Method": "POST"}
        answer = httpx.request(method, f"{address}config", headers=asked)

        assert answer.status_code == status
        assert not [name for name in answer.headers if name.startswith("access-control")]
        policy = answer.headers["content-security-policy"]
        assert policy.endswith("form-action 'self'; frame-ancestors 'self'")


def test_claimed_address_is_not_used(address):
    claimed = {"X-Forwarded-Host": "evil.com", "X-Gradio-Server": "http://evil.com"}

    answer = httpx.get(f"{address}config", headers={**claimed, "Origin": address.rstrip("/")})

    assert answer.json()["root"] == address.rstrip("/")
    assert "evil" not in answer.text


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """A model of two target languages, and the page of it, which may open few files."""
    tokenizer = VanillaTransformerTokenizer.train(
        ["abcdefghijklmnopqrstuvwxyz"], vocab_size=40, kind="char", target_languages=["de", "fr"]
    )
    folder = save_small_model(tmp_path_factory.mktemp("tagged"), tokenizer)
    with serve("--model", folder, "--target_language", "fr", files=256) as address:
        yield folder, address


def test_idle_connections_do_not_stop_the_page(tagged):
    _, address = tagged
    url = httpx.URL(address)
    with ExitStack() as stack:
        for _ in range(400):
            client = stack.enter_context(socket.create_connection((url.host, url.port)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: loc")

        assert httpx.get(f"{address}config", timeout=30).status_code == 200


# Readers


class Reader:
    """What a reader does on the page, and sees there."""

    def __init__(self, browser, address):
        self.browser = browser
        browser.get(address)
        self.text = self.one("textarea")

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        return self.until(lambda: self.all(selector))[0]

    def until(self, found, seconds=10):
        """What a function finds at last."""
        from selenium.common.exceptions import WebDriverException

        end = time.monotonic() + seconds
        while True:
            try:
                if result := found():
                    return result
            except WebDriverException:
                # Gradio may be drawing.
                pass
            assert time.monotonic() < end, self.browser.get_log("browser")
            time.sleep(0.05)

    def type(self, text):
        """Replaces the text by one that may have any characters, as a paste does."""
        self.browser.execute_script("arguments[0].focus(); arguments[0].select()", self.text)
        if text:
            self.browser.execute_cdp_cmd("Input.insertText", {"text": text})
        else:
            self.text.send_keys("\ue017")

    def written(self):
        return self.all("textarea")[1].get_attribute("value")

    def click(self, name):
        """Clicks a button or a tab, and the invisible copies by which Gradio measures tabs."""
        buttons = self.until(
            lambda: [
                button
                for button in self.all("button")
                if button.get_attribute("textContent").strip() == name
            ]
        )
        self.browser.execute_script("for (const one of arguments[0]) one.click()", buttons)
        return self

    def choose(self, label, option):
        """Takes an option of a dropdown."""
        self.one(f"input[aria-label='{label}']").click()
        self.until(lambda: [one for one in self.all("[role=option]") if one.text == option])[
            0
        ].click()

    def says(self, part):
        return self.one(f"#vt-{part}").get_attribute("textContent")


@pytest.fixture
def reader(browser, address):
    return Reader(browser, address)


def test_reader_types_and_sees_everything(reader, page):
    expected = page.translate("ein hund", "one", {})

    reader.text.send_keys("ein hund")

    reader.until(lambda: reader.written() == expected["text"])
    reader.until(lambda: "beam" in reader.says("status") or "greedy" in reader.says("status"))
    assert f"{expected['lines'][0]['translations'][0]['score']:.3f}" in reader.says("hypotheses")
    reader.click("Probabilities")
    tokens = reader.until(lambda: reader.all("#vt-tokens .text"))
    assert [token.text for token in tokens] == expected["lines"][0]["tokens"]
    labels = [label.text for label in reader.all("#vt-tokens .label")]
    assert labels == [f"{rate:.0%}" for rate in expected["lines"][0]["probabilities"]]
    reader.click("Word links")
    links = reader.until(lambda: reader.all("#vt-links .label"))
    assert {link.text for link in links} <= {"ein", "hund"}
    assert reader.one("#vt-status").get_attribute("role") == "status"


def test_nothing_is_translated_before_the_button_if_so_wished(reader, page):
    reader.one("input[type=checkbox]").click()
    reader.text.send_keys("ja")
    time.sleep(0.3)
    assert reader.written() == ""

    reader.click("Translate")

    reader.until(lambda: reader.written() == page.translate("ja", "", {})["text"])


def test_reader_opens_attention(reader, page):
    reader.type("ja\nein hund")
    reader.until(reader.written)
    reader.click("Attention")
    reader.one("#vt-attention iframe")

    reader.browser.switch_to.frame(reader.one("#vt-attention iframe"))

    assert reader.one("h1 #source").text == "ja"
    assert len(reader.all("#heads button")) > 1
    reader.all("#kinds button")[0].click()
    assert "encoder" in reader.one("#title").text
    reader.browser.switch_to.default_content()


def test_reader_compares_two_models(reader, page):
    reader.type("ein hund")
    reader.until(reader.written)

    reader.click("Compare").click("Compare models")

    reader.until(lambda: reader.all(".vt-compared .text"))
    answers = [page.translate("ein hund", name, {}) for name in ("one", "two")]
    for column, answer in zip(reader.all(".vt-compared"), answers, strict=True):
        text = column.find_element("css selector", ".textfield").get_attribute("textContent")
        assert text.split() == answer["text"].split()
        score = answer["lines"][0]["translations"][0]["score"]
        assert f"score {score:.3f}, greedy" in column.text


def test_reader_translates_a_file(reader, page, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("ja\n\nein hund\n" * 30)
    reader.click("File")

    reader.until(lambda: reader.all("#vt-file input[type=file]"))[0].send_keys(str(path))
    reader.until(lambda: "lines" in reader.one("#vt-file .file-preview").text)
    reader.click("Translate file")

    link = reader.until(lambda: reader.all("a[href*='translated.txt']"))[0]
    text = reader.browser.execute_async_script(
        "const done = arguments[1]; fetch(arguments[0]).then(r => r.text()).then(done)",
        link.get_attribute("href"),
    )
    served = page.model("one")
    expected = served.translate(path.read_text().splitlines(), Choices.of({}))
    assert text.splitlines() == [one.text for one in expected]


@pytest.mark.parametrize("text", ["x" * 100_000, EVIL])
def test_any_text_ends_in_a_result_or_a_message(reader, text):
    reader.type("ja")
    reader.until(reader.written)

    reader.type(text)

    if len(text) > 5000:
        reader.until(lambda: reader.written() == "")
        assert reader.until(lambda: reader.all("#vt-status .vt-message"))
    else:
        reader.click("Compare").click("Compare models")
        reader.until(lambda: reader.all(".vt-compared .text"))
        reader.until(lambda: reader.says("hypotheses"))
    assert reader.all("#vt-status script, .tabitem script, .tabitem img") == []
    assert reader.browser.title == "one · two"


def test_example_is_translated_and_another_model_chosen(reader, page):
    reader.until(lambda: [one for one in reader.all("button") if one.text == "nein"])[0].click()
    reader.until(lambda: reader.written() == page.translate("nein", "", {})["text"])
    assert reader.text.get_attribute("value") == "nein"

    reader.choose("Model", "two")

    reader.until(lambda: reader.written() == page.translate("nein", "two", {})["text"])
    assert [one.text for one in reader.all("button") if one.text == "nein"] == ["nein"]


def test_language_is_chosen(browser, tagged):
    folder, address = tagged
    page = Page.load([str(folder)])
    reader = Reader(browser, address)
    reader.type("ja")
    seen = [reader.until(lambda: (text := reader.written()) and text)]

    reader.choose("Target language", "de")

    seen.append(reader.until(lambda: (text := reader.written()) != seen[0] and text))
    answers = [page.translate("ja", "", {"target_language": name}) for name in ("fr", "de")]
    assert seen == [answer["text"] for answer in answers]
    assert not reader.all("input[aria-label='Source language']")


def test_search_is_chosen(reader):
    reader.type("ja")
    reader.until(reader.written)
    reader.one("button.label-wrap").click()
    number = reader.until(
        lambda: [
            one
            for one in reader.all("input[type=number]")
            if "translations" in (one.get_attribute("aria-label") or "")
        ]
    )[0]

    reader.browser.execute_script(
        "arguments[0].value = 3; arguments[0].dispatchEvent(new Event('input', {bubbles: true}));"
        "arguments[0].dispatchEvent(new Event('change', {bubbles: true}));",
        number,
    )

    reader.until(lambda: len(reader.all("#vt-hypotheses [role=gridcell]")) == 3 * 4)


def test_browser_asks_no_other_host(browser, address):
    browser.get_log("performance")
    reader = Reader(browser, address)
    reader.type("ein hund")
    reader.until(reader.written)
    reader.click("Attention")
    reader.one("#vt-attention iframe")

    logged = json.dumps(browser.get_log("performance"))
    asked = set(re.findall(r'\\?"url\\?":\\?"((?:https?|wss?|ftp)://[^"\\]*)', logged))
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(address)] == []
