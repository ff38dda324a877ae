"""No command runs code of a folder, or asks whether to, unless a flag allows it."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from vanilla_transformer_tools.saved_folder import load_tokenizer

from .commands.conftest import folder, run, signals, tokenizer  # noqa: F401

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
# Functions of Transformers, PEFT, `datasets` and `evaluate` that load what may bring its own code.
LOADING = {"from_pretrained", "load_adapter", "pipeline", "get_class_from_dynamic_module"}
# Classes that read values only, and ours, whose own calls are in the list.
WITHOUT_CODE = {
    "GenerationConfig",
    "VanillaTransformerConfig",
    "TokenizerPair",
    "Translator",
    "cls",
}


def calls_that_load():
    """File, line, class and source of the arguments of each call."""
    for file in sorted(SOURCE.glob("**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in LOADING and owner not in WITHOUT_CODE:
                    yield f"{file.name}:{node.lineno}", owner, node


def test_every_call_that_loads_decides_on_code_itself():
    """Left open, Transformers asks on standard input."""
    calls = list(calls_that_load())

    assert {owner for _, owner, _ in calls} == {
        "AutoConfig",
        "AutoModelForSeq2SeqLM",
        "AutoTokenizer",
    }
    undecided = [
        place
        for place, _, call in calls
        if "trust_remote_code" not in ast.unparse(call)
        # load_model writes its defaults on a line of their own.
        and "**loading" not in ast.unparse(call)
    ]
    assert undecided == []
    model_folder = (SOURCE / "vanilla_transformer_tools/saved_folder.py").read_text(
        encoding="utf-8"
    )
    assert '"trust_remote_code": False, **loading}' in model_folder


def test_no_action_of_a_workflow_changes_under_its_name():
    workflows = [file.read_text(encoding="utf-8") for file in (ROOT / ".github").glob("*/*.yml")]
    actions = re.findall(r"uses: (\S+)", "".join(workflows))

    assert actions
    assert [name for name in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []


MARK = "ran.txt"


@pytest.fixture
def evil(folder, tmp_path):  # noqa: F811
    """A model whose config and tokenizer name classes of its own folder."""
    evil = shutil.copytree(folder, tmp_path / "evil")
    code = f"open({str(tmp_path / MARK)!r}, 'w').close()\nclass Evil: pass\n"
    (evil / "evil.py").write_text(code)
    changes = {
        "config.json": {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}},
        "tokenizer_config.json": {
            "tokenizer_class": "Evil",
            "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        },
    }
    for name, values in changes.items():
        file = evil / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return evil


@pytest.fixture
def corpus(tmp_path):
    """Two files of some lines."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("".join(f"wort {number}\n" for number in range(30)))
    return [str(tmp_path / "a"), str(tmp_path / "b")]


COMMANDS = {
    "translate": "translate --model EVIL wort",
    "export": "export --format ctranslate2 EVIL OUT",
    "train --init_from": "train --init_from EVIL --train CORPUS --output_dir OUT --max_steps 1",
    "import": "import EVIL OUT",
    "import --mapping": "import --mapping MAPPING EVIL OUT",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_runs_code_of_a_folder_or_asks_for_it(run, evil, corpus, tmp_path, command):  # noqa: F811
    (tmp_path / "mapping.yaml").write_text("constants:\n  d_model: 24\n")
    words = {"MAPPING": [str(tmp_path / "mapping.yaml")], "OUT": [str(tmp_path / "out")]}
    words |= {"CORPUS": corpus}
    argv = [
        part
        for word in command.split()
        for part in words.get(word, [word.replace("EVIL", str(evil))])
    ]

    outcome = run(*argv, stdin=b"y\ny\ny\n")

    assert outcome.status == 2
    assert not (tmp_path / MARK).exists()
    assert "[y/N]" not in outcome.out + outcome.err
    # `import` refuses other classes before that.
    assert "wants to run code of its own" in outcome.err or command == COMMANDS["import"]


def test_code_of_a_folder_runs_when_it_is_allowed(evil, tmp_path):
    with pytest.raises(ValueError, match="Evil"):
        load_tokenizer(str(evil), trust_remote_code=True)

    assert (tmp_path / MARK).exists()
