"""`docs/finetune.md`: both ways of fine-tuning run as they are written."""

import shlex

import pytest
from transformers import AutoModelForSeq2SeqLM, M2M100Config, M2M100ForConditionalGeneration

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.translation import Translator

from ..support.documents import code_blocks
from ..support.pretrained import save_pretrained_model

PAGE = "docs/finetune.md"
PAIRS = [("ein hund rennt .", "a dog runs ."), ("die katze schläft .", "the cat sleeps .")] * 4

pytestmark = [
    # PEFT's wrapper asks Transformers by a name of which newer releases warn.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # Trainer's default for GPUs, on machines without one.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the pairs and, at the names that the page gives, minute models."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "valid", "test"):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in PAIRS)
            (tmp_path / f"{split}.{language}").write_text(text, encoding="utf-8")
    texts = [text for pair in PAIRS for text in pair]
    tokenizer = VanillaTransformerTokenizer.train(texts, vocab_size=280)
    config = M2M100Config(
        vocab_size=len(tokenizer),
        d_model=16,
        max_position_embeddings=64,
        **{
            f"{stack}_{name}": value
            for stack in ("encoder", "decoder")
            for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()
        },
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
    )
    folder = tmp_path / "Helsinki-NLP" / "opus-mt-de-en"
    M2M100ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    nllb = save_pretrained_model("nllb", tmp_path / "pretrained")
    (tmp_path / "facebook").mkdir()
    nllb.rename(tmp_path / "facebook" / "nllb-200-distilled-600M")
    return tmp_path


def commands() -> list[list[str]]:
    lines = "\n".join(code_blocks(PAGE, "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line]


@pytest.mark.slow
def test_commands_and_script_of_the_page_fine_tune_a_model(place, capsys):
    for command in commands():
        main(command)
    namespace: dict[str, object] = {}
    for block in code_blocks(PAGE, "python"):
        exec(compile(block, PAGE, "exec"), namespace)

    assert [command[0] for command in commands()][:3] == ["import", "train", "evaluate"]
    assert (place / "runs" / "lora" / "adapter" / "adapter_config.json").exists()
    assert "trainable params" in capsys.readouterr().out
    before = AutoModelForSeq2SeqLM.from_pretrained("runs/opus").state_dict()
    for name in ("mine", "lora", "script"):
        assert list(Translator.from_pretrained(f"runs/{name}").translate(["ein hund ."]))
        after = AutoModelForSeq2SeqLM.from_pretrained(f"runs/{name}").state_dict()
        weight = "model.decoder.layers.0.fc1.weight"
        assert not after[weight].equal(before[weight])
