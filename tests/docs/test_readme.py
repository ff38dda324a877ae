import functools
import re
import subprocess
import sys

import pytest

from vanilla_transformer import VanillaTransformerTokenizer

from ..support.documents import ROOT, code_blocks, read

DOCUMENTS = [
    "README.md",
    "docs/my_own_data.md",
    "docs/translating.md",
    "docs/evaluation.md",
    "docs/speed.md",
    "docs/results.md",
    "docs/from_paper_to_code.md",
    "docs/attention.md",
    "docs/variants.md",
]
# Where the commands are that are not part of the package.
FOLDERS = ("scripts", "benchmarks", "checks")


def test_readme_is_read_in_five_minutes():
    assert len(read("README.md").split()) <= 900


@pytest.mark.parametrize(
    "block", [*code_blocks("README.md", "python"), *code_blocks("docs/translating.md", "python")]
)
def test_python_of_a_page_translates_with_a_saved_folder(tiny_model, tmp_path, capsys, block):
    tokenizer = VanillaTransformerTokenizer.train(["zweihundert fünf"], vocab_size=300)
    tiny_model.resize_token_embeddings(len(tokenizer))
    tiny_model.generation_config.max_length = 8
    tiny_model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    exec(block.replace("runs/demo", str(tmp_path)), {})

    assert capsys.readouterr().out.strip()


@functools.cache
def help_of(*command):
    # `--help` of `train` names the common options only.
    option = "--help-all" if command[-1] == "train" else "--help"
    return subprocess.run(
        [sys.executable, *command, option], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_in_documents_exist(document):
    used = set(re.findall(r"--[a-z][a-z_]+", read(document))) - {"--help"}
    scripts = {path.name: str(path) for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    named = set(re.findall(r"\w+\.py", read(document))) & scripts.keys()
    commands = ["train", "translate", "evaluate", "push", "export", "attention"]
    help_text = "".join(
        help_of(*command)
        for command in [
            *(("-m", "vanilla_transformer_cli", command) for command in commands),
            *((scripts[name],) for name in named),
        ]
    )

    assert used
    assert not {option for option in used if option not in help_text}


def test_architecture_names_files_that_exist():
    names = re.findall(r"`([\w./-]+(?:\.(?:py|html|md|toml|txt)|/))`", read("docs/architecture.md"))
    package = ROOT / "src" / "vanilla_transformer"

    assert len(names) > 80
    assert [
        name for name in names if not ((ROOT / name).exists() or (package / name).exists())
    ] == []
