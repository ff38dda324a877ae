"""`examples/serve.py`: answers, shared batches, and nginx in front of it as the page shows."""

import contextlib
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import httpx
import pytest
import uvicorn
from libretranslatepy import LibreTranslateAPI

from vanilla_transformer_tools.translation import Search, Translation

from ..support.documents import ROOT, code_blocks
from ..support.launching import free_port
from .test_scripts import names_of

SCRIPT = ROOT / "examples" / "serve.py"


class Shouting:
    """A translator that writes capitals, keeps the batches, and fails at "bad"."""

    def __init__(self):
        self.search, self.batches = Search(num_beams=2), []
        self.free = threading.Event()
        self.free.set()

    def changed(self, search):
        self.count = search.num_hypotheses
        assert search.num_beams == max(2, self.count)
        return self

    def translate(self, lines):
        self.batches.append(list(lines))
        assert self.free.wait(60)
        if "bad" in lines:
            raise ValueError("a text that fails")
        for line in lines:
            others = [Translation(f"{line.upper()}{place}") for place in range(1, self.count)]
            yield Translation(line.upper(), alternatives=tuple(others))


def wait_for(address):
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError, ValueError):
            if httpx.get(f"{address}/health").json() == {"status": "ok"}:
                return
        time.sleep(0.1)
    pytest.fail("The service does not answer.")


@pytest.fixture
def service():
    """Its translator, its address, and how many requests it holds."""
    translator, port = Shouting(), free_port()
    app = names_of("serve.py")["build_app"](translator, "de", "en")
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(f"http://127.0.0.1:{port}")
    yield translator, f"http://127.0.0.1:{port}", lambda: len(server.server_state.tasks)
    server.should_exit = True
    thread.join()


def test_answers_are_those_of_libretranslate(service):
    _, address, _ = service
    client = LibreTranslateAPI(address)

    assert client.translate("ein hund\nja", "de", "en") == "EIN HUND\nJA"
    assert client.languages() == [{"code": "de", "name": "de", "targets": ["en"]}]
    with pytest.raises(HTTPError, match="400"):
        client.translate("ja", "fr", "en")

    def ask(**fields):
        return httpx.post(f"{address}/translate", json={"source": "auto", "target": "en", **fields})

    assert ask(q="a\nb", alternatives=2).json() == {
        "translatedText": "A\nB",
        "alternatives": ["A1\nB1", "A2\nB2"],
    }
    assert ask(q=["a", ""], alternatives=1).json() == {
        "translatedText": ["A", ""],
        "alternatives": [["A1"], ["1"]],
    }
    for fields, status in (
        ({}, 400),
        ({"q": []}, 400),
        ({"q": "a", "alternatives": 11}, 400),
        ({"q": "a", "target": "fr"}, 400),
        ({"q": "a" * 200_000}, 413),
    ):
        assert ask(**fields).status_code == status
    assert httpx.post(f"{address}/translate", content=b"\xff").status_code == 400


def test_waiting_requests_share_a_batch_and_a_failing_one_fails_alone(service):
    translator, address, held = service
    translator.free.clear()

    def ask(text):
        form = {"q": text, "source": "de", "target": "en"}
        answer = httpx.post(f"{address}/translate", data=form, timeout=60)
        return answer.json()["translatedText"] if answer.is_success else answer.status_code

    texts = ["first", "bad", "ja", "ja", "nein"]
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = [pool.submit(ask, texts[0])]
        while not translator.batches:
            time.sleep(0.01)
        answers += [pool.submit(ask, text) for text in texts[1:]]
        while held() < len(texts):
            time.sleep(0.01)
        # From the start of a request to its place among those that wait.
        time.sleep(0.5)
        translator.free.set()
        found = [answer.result() for answer in answers]

    assert found == ["FIRST", 500, "JA", "JA", "NEIN"]
    assert translator.batches[0] == ["first"]
    assert sorted(translator.batches[1]) == sorted(texts[1:])


@pytest.mark.slow
def test_nginx_keeps_slow_and_ill_formed_connections_from_the_service(place, tmp_path):
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    if nginx is None:
        pytest.skip("nginx is missing: apt-get install nginx")
    inner, outer = free_port(), free_port()
    (site,) = code_blocks("docs/serve.md", "nginx")
    for old, new in (
        ("listen 80;", f"listen 127.0.0.1:{outer};"),
        ("127.0.0.1:5000", f"127.0.0.1:{inner}"),
        ("_timeout 10s", "_timeout 2s"),
    ):
        assert old in site
        site = site.replace(old, new)
    temporary = " ".join(
        f"{kind}_temp_path {tmp_path}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = f"pid {tmp_path}/pid; daemon off; error_log {tmp_path}/error.log; events {{}}"
    (tmp_path / "conf").write_text(f"{config} http {{ access_log off; {temporary} {site} }}")
    command = [sys.executable, SCRIPT, "--model", place / "model", "--languages", "de", "en"]
    running = [
        subprocess.Popen([*command, "--port", str(inner)], stderr=subprocess.DEVNULL),
        subprocess.Popen([nginx, "-c", tmp_path / "conf", "-e", tmp_path / "error.log"]),
    ]
    try:
        address = f"http://127.0.0.1:{outer}"
        wait_for(address)
        body = b"q=ja&source=de&target=en"
        start = b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(body)
        slow = []
        for part in (b"POST /tr", start, start + b"\r\nq=j"):
            slow.append(socket.create_connection(("127.0.0.1", outer), timeout=30))
            slow[-1].sendall(part)
        for wrong in (
            b"\x16\x03\x01\r\n\r\n",
            start + b"Content-Length: 3\r\n\r\n",
            b"a b c\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", outer), timeout=30) as connection:
                connection.sendall(wrong)
                assert re.match(rb"HTTP/1.1 400|<html>\r\n<head><title>400", connection.recv(999))

        answer = LibreTranslateAPI(address).translate("ja", "de", "en")

        assert answer == LibreTranslateAPI(f"http://127.0.0.1:{inner}").translate("ja", "de", "en")
        too_long = httpx.post(f"{address}/translate", data={"q": "a" * 300_000})
        assert too_long.status_code == 413
        for connection in slow:
            # Nothing, or status 408, and the end.
            assert not connection.recv(999) or not connection.recv(999)
            connection.close()
    finally:
        for process in running:
            process.terminate()
            process.wait()
