"""A Hub on loopback: the endpoints that huggingface_hub needs to share a model, held in memory."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard

USER = "me"
TOKEN = "hf_madeUpForTests"

# Content by path.
Files = dict[str, bytes]


@dataclass
class Repository:
    """Commits, each the whole tree of files, and the branches that name some of them."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, message: str, files: Files) -> str:
        name = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        self.messages.append(message)
        return name

    def files(self, branch: str = "main") -> Files:
        return self.commits[self.branches[branch]]


@dataclass
class Hub:
    """What the server holds, and the path of each request that it answered."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


class HubError(Exception):
    """Ends a request with a status, and with the code from which the client makes its error."""

    def __init__(self, status: int, code: str = "", **body: Any) -> None:
        super().__init__(code)
        self.status, self.code, self.body = status, code, body


class HubRequest(BaseHTTPRequestHandler):
    """One request; each method named in `ROUTES` answers one endpoint."""

    hub: Hub
    body: bytes

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.hub.requests.append(unquote(path))
        try:
            for commands, pattern, handler in ROUTES:
                if self.command in commands and (match := re.fullmatch(pattern, path)):
                    handler(self, *map(unquote, match.groups()))
                    return
            raise HubError(404, "EntryNotFound")
        except HubError as error:
            self.reply(error.body, error.status, {"X-Error-Code": error.code})

    do_GET = do_HEAD = do_POST = answer  # noqa: N815  (http.server's own names)

    def log_message(self, *args: object) -> None:
        """Keeps the output of the tests clean."""

    def reply(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Bytes go out as they are, anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def create_repo(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            raise HubError(401, error="Invalid username or password.")
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        kind = wanted.get("type", "model")
        place = f"spaces/{name}" if kind == "space" else name
        address = {"url": f"{self.hub.url}/{place}", "name": name}
        if name in self.hub.repositories:
            raise HubError(409, **address)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repository = self.hub.repositories[name] = Repository(private)
        repository.commit("main", "initial commit", {".gitattributes": b""})
        self.reply(address)

    def create_branch(self, repo: str, branch: str) -> None:
        branches = self.hub.repositories[repo].branches
        branches.setdefault(branch, branches["main"])
        self.reply({})

    def validate_card(self) -> None:
        if faults := card_faults(json.loads(self.body)["content"]):
            raise HubError(400, errors=[{"message": fault} for fault in faults])
        self.reply({"errors": [], "warnings": []})

    def preupload(self, *_: str) -> None:
        """The real Hub sends large files to a storage of their own."""
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        regular = {"uploadMode": "regular", "shouldIgnore": False}
        self.reply({"files": [{"path": path, **regular} for path in paths]})

    def commit(self, repo: str, branch: str) -> None:
        repository = self.hub.repositories[repo]
        header, *operations = map(json.loads, self.body.splitlines())
        files = dict(repository.files(branch))
        for operation in operations:
            path = operation["value"]["path"]
            if operation["key"] == "deletedFile":
                del files[path]
            else:
                files[path] = base64.b64decode(operation["value"]["content"])
        message = header["value"]["summary"]
        name = repository.commit(branch, message, files)
        self.reply({"commitUrl": f"{self.hub.url}/{repo}/commit/{name}", "commitOid": name})

    def list_files(self, repo: str, branch: str) -> None:
        files = self.hub.repositories[repo].files(branch)
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in files.items()
        ]
        self.reply(entries)

    def resolve(self, repo: str, revision: str, path: str) -> None:
        repository = self.hub.repositories[repo]
        name = repository.branches.get(revision, revision)
        if path not in repository.commits[name]:
            raise HubError(404, "EntryNotFound")
        data = repository.commits[name][path]
        tag = hashlib.sha1(data).hexdigest()
        self.reply(data, headers={"X-Repo-Commit": name, "ETag": f'"{tag}"'})


_MODEL = "/api/(?:models|spaces)/([^/]+/[^/]+)"
ROUTES = [
    (("POST",), "/api/repos/create", HubRequest.create_repo),
    (("POST",), "/api/validate-yaml", HubRequest.validate_card),
    (("POST",), f"{_MODEL}/branch/([^/]+)", HubRequest.create_branch),
    (("POST",), f"{_MODEL}/preupload/([^/]+)", HubRequest.preupload),
    (("POST",), f"{_MODEL}/commit/([^/]+)", HubRequest.commit),
    (("GET",), f"{_MODEL}/tree/([^/]+)", HubRequest.list_files),
    (("GET", "HEAD"), "/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", HubRequest.resolve),
]


def card_faults(card: str) -> list[str]:
    """Rules of the Hub that metadata of ours could break; it also looks up ids and languages."""
    data = ModelCard(card).data
    results = data.eval_results or []
    dataset = r"([\w-]+/)?[\w.-]+"
    rules = [
        ("language", data.language, r"[a-z]{2,3}|code|multilingual"),
        ("license", data.license, r"[a-z0-9][a-z0-9.-]*"),
        ("datasets", data.datasets, dataset),
        ("metrics", data.metrics, r"[\w.-]+"),
        ("model-index dataset.type", [result.dataset_type for result in results], dataset),
    ]
    return [
        f'"{key}" with value {value!r} is not valid'
        for key, values, pattern in rules
        for value in (values if isinstance(values, list) else [values])
        if value is not None and not re.fullmatch(pattern, str(value), re.ASCII)
    ]


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serves an empty Hub on a free port."""
    hub = Hub()
    handler = type("Handler", (HubRequest,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
