"""Node with transformers.js of the release that pages have, in a folder that npm fills."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_INSTALL_SECONDS = 300


def install(folder: Path, package: str) -> Path:
    """The folder with the package in it; skips the test where npm or its registry is missing."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    (folder / "package.json").write_text("{}")
    try:
        done = subprocess.run(
            [npm, "install", "--silent", "--ignore-scripts", "--no-audit", package],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm needs more than {_INSTALL_SECONDS} seconds for {package}")
    if done.returncode:
        pytest.skip(f"npm cannot download {package}: {done.stderr[-200:]}")
    return folder


def run_in_node(folder: Path, code: str, *arguments: Any) -> Any:
    """What a module prints as JSON; `input` holds the arguments."""
    (folder / "input.json").write_text(json.dumps(arguments))
    (folder / "main.mjs").write_text(
        "import { readFileSync } from 'fs';\n"
        "import * as library from '@huggingface/transformers';\n"
        "library.env.allowRemoteModels = false; library.env.localModelPath = '/';\n"
        "const input = JSON.parse(readFileSync('input.json', 'utf8'));\n" + code
    )
    done = subprocess.run(
        ["node", "main.mjs"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
