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
from pathlib import PurePath
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub import ModelCard

USER = "me"
TOKEN = "hf_madeUpForTests"

# What the Hub's default .gitattributes sends to large file storage, as far as tests meet it.
LARGE_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".pkl"}

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
    """What the server holds, and each request that it answered, as method and path."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)


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
        self.hub.requests.append((self.command, unquote(path)))
        try:
            for commands, pattern, handler in ROUTES:
                if self.command in commands and (match := re.fullmatch(pattern, path)):
                    handler(
                        self, **{name: unquote(text) for name, text in match.groupdict().items()}
                    )
                    return
            raise HubError(404)
        except HubError as error:
            self.reply(error.body, error.status, {"X-Error-Code": error.code})

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815  (http.server's own names)

    def log_message(self, *args: object) -> None:
        """Keeps the output of the tests clean."""

    def reply(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Bytes and text go out as they are, anything else as JSON."""
        if isinstance(content, str):
            content = content.encode()
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def require_token(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            raise HubError(401, error="Invalid username or password.")

    def repository(self, repo: str) -> Repository:
        found = self.hub.repositories.get(repo)
        if found is None:
            raise HubError(404, "RepoNotFound")
        if found.private or self.command in ("POST", "PUT"):
            self.require_token()
        return found

    def commit_of(self, repo: str, revision: str | None) -> tuple[str, Files]:
        """Name and files of what a branch or commit stands for."""
        repository = self.repository(repo)
        revision = revision or "main"
        name = repository.branches.get(revision, revision)
        if name not in repository.commits:
            raise HubError(404, "RevisionNotFound")
        return name, repository.commits[name]

    # Repositories

    def create_repo(self) -> None:
        self.require_token()
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        address = {"url": f"{self.hub.url}/{name}", "name": name}
        if name in self.hub.repositories:
            raise HubError(409, **address)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repository = self.hub.repositories[name] = Repository(private)
        repository.commit("main", "initial commit", {".gitattributes": b""})
        self.reply(address)

    def create_branch(self, repo: str, revision: str) -> None:
        repository = self.repository(repo)
        if revision in repository.branches:
            raise HubError(409)
        repository.branches[revision] = repository.branches["main"]
        self.reply({})

    def validate_card(self) -> None:
        faults = card_faults(json.loads(self.body)["content"])
        if not faults:
            self.reply({"errors": [], "warnings": []})
        elif self.headers["Accept"] == "text/plain":
            self.reply("\n".join(faults), 400)
        else:
            raise HubError(400, errors=[{"message": fault} for fault in faults])

    # Upload

    def preupload(self, repo: str, revision: str) -> None:
        self.commit_of(repo, revision)
        self.reply(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if is_large(file["path"]) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(self.body)["files"]
                ]
            }
        )

    def large_file_batch(self, repo: str) -> None:
        self.repository(repo)
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            wanted["actions"] = {
                "upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"},
                "verify": {"href": f"{self.hub.url}/lfs-verify"},
            }
        self.reply({"transfer": "basic", "objects": objects})

    def large_file_put(self, oid: str) -> None:
        data = self.body
        if hashlib.sha256(data).hexdigest() != oid:
            raise HubError(422)
        self.hub.blobs[oid] = data
        self.reply({})

    def large_file_verify(self) -> None:
        wanted = json.loads(self.body)
        if len(self.hub.blobs.get(wanted["oid"], b"")) != wanted["size"]:
            raise HubError(404)
        self.reply({})

    def commit(self, repo: str, revision: str) -> None:
        _, files = self.commit_of(repo, revision)
        files, message = dict(files), ""
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "header":
                message = value["summary"]
            elif operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                raise HubError(400)
        name = self.hub.repositories[repo].commit(revision, message, files)
        self.reply({"commitUrl": f"{self.hub.url}/{repo}/commit/{name}", "commitOid": name})

    # Download

    def model_info(self, repo: str, revision: str | None = None) -> None:
        name, files = self.commit_of(repo, revision)
        siblings = [{"rfilename": path} for path in files]
        private = self.hub.repositories[repo].private
        self.reply({"id": repo, "sha": name, "private": private, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str, folder: str | None = None) -> None:
        _, files = self.commit_of(repo, revision)
        if folder is not None:
            # No repository of ours has folders.
            raise HubError(404, "EntryNotFound")
        self.reply(
            [
                {"type": "file", "path": path, "size": len(data), "oid": git_hash(data)}
                for path, data in files.items()
            ]
        )

    def resolve(self, repo: str, revision: str, path: str) -> None:
        name, files = self.commit_of(repo, revision)
        if path not in files:
            raise HubError(404, "EntryNotFound")
        data = files[path]
        headers = {"X-Repo-Commit": name, "ETag": f'"{git_hash(data)}"'}
        if is_large(path):
            headers["X-Linked-ETag"] = f'"{hashlib.sha256(data).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(data))
        self.reply(data, headers=headers)


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_MODEL = rf"/api/models/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    (["POST"], "/api/repos/create", HubRequest.create_repo),
    (["POST"], "/api/validate-yaml", HubRequest.validate_card),
    (["POST"], rf"{_MODEL}/branch/{_REVISION}", HubRequest.create_branch),
    (["POST"], rf"{_MODEL}/preupload/{_REVISION}", HubRequest.preupload),
    (["POST"], rf"/{_REPO}\.git/info/lfs/objects/batch", HubRequest.large_file_batch),
    (["PUT"], r"/lfs/(?P<oid>\w+)", HubRequest.large_file_put),
    (["POST"], "/lfs-verify", HubRequest.large_file_verify),
    (["POST"], rf"{_MODEL}/commit/{_REVISION}", HubRequest.commit),
    (["GET"], _MODEL, HubRequest.model_info),
    (["GET"], rf"{_MODEL}/revision/{_REVISION}", HubRequest.model_info),
    (["GET"], rf"{_MODEL}/tree/{_REVISION}", HubRequest.tree),
    (["GET"], rf"{_MODEL}/tree/{_REVISION}/(?P<folder>.+)", HubRequest.tree),
    (["GET", "HEAD"], rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", HubRequest.resolve),
]


def is_large(path: str) -> bool:
    return PurePath(path).suffix in LARGE_SUFFIXES


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def card_faults(content: str) -> list[str]:
    """Rules of the Hub that a card's metadata can break by type or form.

    The real ones also look identifiers up: languages, licences and pipelines in lists, datasets
    and base models on the Hub.
    """
    try:
        data = ModelCard(content).data
    except (ValueError, yaml.YAMLError) as error:
        return [str(error)]
    words = r"[a-z0-9][a-z0-9.-]*"
    dataset = r"(?:[\w-]+/)?[\w.-]+"
    texts = [
        ("language", data.language, r"[a-z]{2,3}|code|multilingual"),
        ("license", data.license, words),
        ("library_name", data.library_name, r"[\w.-]+"),
        ("pipeline_tag", data.pipeline_tag, words),
        ("tags", data.tags, r".+"),
        ("datasets", data.datasets, dataset),
        ("metrics", data.metrics, r"[\w.-]+"),
    ]
    faults = []
    for result in data.eval_results or []:
        texts += [
            ("model-index task.type", result.task_type, words),
            ("model-index dataset.type", result.dataset_type, dataset),
            ("model-index dataset.name", result.dataset_name, r".+"),
            ("model-index metric.type", result.metric_type, r"[\w.-]+"),
        ]
        if isinstance(result.metric_value, bool) or not isinstance(
            result.metric_value, float | int
        ):
            faults.append(f'"metric.value" must be a number, got {result.metric_value!r}')
    for key, value, pattern in texts:
        for text in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(text, str) or not re.fullmatch(pattern, text, re.ASCII):
                faults.append(f'"{key}" with value {text!r} is not valid')
    return faults


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
