"""Pages on models of other classes: commands and code run as they are written, on small models."""

import shlex

import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.commands import main

from ..interop.test_declarations import MAPPING, Translator
from ..interop.test_importing import SIZES
from ..support.documents import code_blocks
from ..support.pretrained import save_pretrained_model

PAGE = "docs/import_export.md"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with minute models at the names that the page gives."""
    monkeypatch.chdir(tmp_path)
    tokenizer = VanillaTransformerTokenizer.train(["ein hund rennt"] * 3, vocab_size=280)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "decoder_start_token_id": 0}
    marian = MarianMTModel(MarianConfig(**sizes, pad_token_id=0, eos_token_id=2))
    for one in (marian, tokenizer):
        one.save_pretrained("Helsinki-NLP/opus-mt-de-en")
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        torch.save(Translator().state_dict(), "weights.pt")
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(MAPPING))
    return tmp_path


def test_commands_import_what_they_name(place):
    blocks = code_blocks(PAGE, "bash")
    # Those for models of several languages are run where these are tested.
    commands = [
        shlex.split(line)
        for block in blocks
        for line in block.splitlines()
        if " import " in line and "nllb" not in line
    ]

    for program, *arguments in commands:
        assert program == "vanilla-transformer"
        main(arguments)

    assert len(commands) == 3
    made = [path.name for path in sorted((place / "runs").iterdir())]
    assert made == ["opus-de-en", "ours"]
    for name in made:
        AutoModelForSeq2SeqLM.from_pretrained(place / "runs" / name)


def test_page_for_users_of_the_former_pipeline_translates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = "docs/translation_pipeline.md"
    for kind, name in (
        ("marian", "Helsinki-NLP/opus-mt-de-en"),
        ("nllb", "facebook/nllb-200-distilled-600M"),
    ):
        save_pretrained_model(kind, tmp_path / name)

    for block in code_blocks(page, "python"):
        exec(compile(block, page, "exec"), {})

    assert len(capsys.readouterr().out.splitlines()) == 3
