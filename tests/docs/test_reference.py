"""The reference: its headings are messages of the source, and the site builds."""

import ast
import importlib.util
import re
import subprocess
import sys

import pytest

from ..support.documents import ROOT, read


def messages() -> list[str]:
    """Strings of the source; what is filled in is left as an ellipsis."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        part.value if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_headings_of_troubleshooting_are_messages_of_the_source():
    page = read("docs/reference/troubleshooting.md").partition("\n## Without a message")[0]
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    known = messages()

    assert len(headings) > 15
    assert [text for text in headings if not any(text in message for message in known)] == []


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("sphinx"), reason="needs the extra docs: pip install -e '.[docs]'"
)
def test_site_builds_without_a_warning(tmp_path):
    words = ["sphinx", "-q", "-W", "--keep-going", "-E", "-d", tmp_path / "doctrees"]
    words += ["-c", "docs", "-b", "html", ".", tmp_path / "site"]

    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/docs/architecture.html").read_text(encoding="utf-8")
    assert 'class="mermaid"' in page
    assert "math" in (tmp_path / "site/docs/common_mistakes.html").read_text(encoding="utf-8")
    assert (tmp_path / "site/examples/from_text_to_model.html").is_file()
    assert "/blob/main/tests/" in (tmp_path / "site/docs/guarantees.html").read_text(
        encoding="utf-8"
    )
