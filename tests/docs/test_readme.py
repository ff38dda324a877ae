import contextlib
import functools
import io
import re
import sys

import pytest

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.commands import main

from ..support.documents import ROOT, code_blocks, read
from ..support.scripts import help_of_script

sys.path.insert(0, str(ROOT / "docs"))

import generate

DOCUMENTS = [
    "README.md",
    "docs/tutorial.md",
    "docs/data.md",
    "docs/train.md",
    "docs/finetune.md",
    "docs/import_export.md",
    "docs/share.md",
    "docs/translate.md",
    "docs/evaluate.md",
    "docs/speed.md",
    "docs/results.md",
    "docs/from_paper_to_code.md",
    "docs/attention.md",
    "docs/demo.md",
    "docs/distil.md",
    "docs/variants.md",
    "docs/serve.md",
]
# Where the commands are that are not part of the package.
FOLDERS = ("scripts", "benchmarks", "checks")


def test_readme_is_read_in_five_minutes():
    assert len(read("README.md").split()) <= 650


@pytest.mark.parametrize(
    "block", [*code_blocks("README.md", "python"), *code_blocks("docs/translate.md", "python")]
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
def help_of(command):
    # `--help` of `train` names the common options only.
    option = "--help-all" if command == "train" else "--help"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([command, option])
    return out.getvalue()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_in_documents_exist(document):
    used = set(re.findall(r"--[a-z][a-z_]+", read(document))) - {"--help"}
    scripts = {path.name: path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    named = set(re.findall(r"\w+\.py", read(document))) & scripts.keys()
    commands = ["train", "translate", "evaluate", "push", "export", "attention", "distil"]
    commands += ["demo", "serve", "import"]
    help_text = "".join(
        [*map(help_of, commands), *(help_of_script(scripts[name]) for name in named)]
    )

    assert used
    assert not {option for option in used if option not in help_text}


def test_architecture_names_files_that_exist():
    page = read("docs/architecture.md").partition(generate.BEGIN)
    prose = page[0] + page[2].partition(generate.END)[2]
    names = set(re.findall(r"`([\w./-]+(?:\.(?:py|html|md|toml|txt)|/))`", prose))
    packages = [
        ROOT / "src" / name for name in ("vanilla_transformer", "vanilla_transformer_tools")
    ]

    assert len(names) > 30
    assert not {
        name for name in names if not any((folder / name).exists() for folder in (ROOT, *packages))
    }


@pytest.mark.parametrize("page", [*generate.PARTS, *generate.ADDRESSED])
def test_generated_part_of_a_page_is_what_the_source_says(page):
    assert generate.rewritten(page) == read(page)
