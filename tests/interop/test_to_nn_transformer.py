"""Our models as torch.nn.Transformer: logits in float64, the file that loads them, the way back."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.interop import nn_transformer
from vanilla_transformer.interop import to_nn_transformer as module
from vanilla_transformer.interop.importing import import_model
from vanilla_transformer.interop.to_nn_transformer import save_nn_transformer
from vanilla_transformer.model_folder import load_model
from vanilla_transformer.translation import Translator
from vanilla_transformer_cli import main

from ..conftest import LEARNED, TWO_TABLES, UNTIED, build_variant
from ..support.documents import code_blocks
from .test_importing import BUILD

# torch.nn.Transformer has as many heads, and as wide a network, in both stacks.
EVEN = {"decoder_attention_heads": 2, "decoder_ffn_dim": 28, "max_position_embeddings": 12}
FITTING = [
    {},
    {"pre_norm": False},
    {"add_final_layer_norm": False},
    {"pre_norm": False, "add_final_layer_norm": True},
    {"activation_function": "gelu", "scale_embedding": False, "layer_norm_eps": 0.01},
    {"position_base": 100, "position_offset": 3, "attention_bias": False},
    {**LEARNED, "max_position_embeddings": 12, "position_offset": 2, "lm_head_bias": True},
    {"decoder_vocab_size": 41, "d_k": 12, **TWO_TABLES},
    UNTIED,
]
BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "decoder_input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 10]]),
}


@pytest.mark.parametrize("fields", FITTING)
def test_logits_are_those_of_the_model_there_and_back(fields, tmp_path):
    model = build_variant(**EVEN | fields).double()
    expected = model(**BATCH).logits

    save_nn_transformer(model, tmp_path / "out")

    torch.testing.assert_close(
        nn_transformer.load(tmp_path / "out")(**BATCH), expected, rtol=0, atol=1e-9
    )
    import_model(
        str(tmp_path / "out"), tmp_path / "back", mapping=tmp_path / "out" / "mapping.yaml"
    )
    back = load_model(str(tmp_path / "back")).eval()
    torch.testing.assert_close(back(**BATCH).logits, expected, rtol=0, atol=1e-9)


def test_all_reasons_are_named():
    fields = {"talking_heads": "both", "embedding_layer_norm": True, "d_v": 7}

    with pytest.raises(ValueError, match="format nn_transformer cannot hold") as error:
        save_nn_transformer(build_variant(activation_function="silu", **fields), None)

    assert str(error.value).splitlines()[1:] == [
        "`decoder_attention_heads` must be `encoder_attention_heads`, got 4 and 2.",
        "`decoder_ffn_dim` must be `encoder_ffn_dim`, got 36 and 28.",
        "`d_v` must be None, got 7.",
        "`talking_heads` must be None, got 'both'.",
        "`embedding_layer_norm` must be False, got True.",
        "`activation_function` must be one of relu, gelu, got 'silu'.",
    ]


def test_model_of_another_class_is_refused(tmp_path):
    with pytest.raises(ValueError, match="format nn_transformer is made of models of this package"):
        save_nn_transformer(BUILD["marian"](), tmp_path / "out")


@pytest.fixture
def ours(tmp_path):
    """A saved model."""
    tokenizer = VanillaTransformerTokenizer.train(
        ["abcdefghijklmnopqrstuvwxyz .,!?-'"], vocab_size=37, kind="char"
    )
    build_variant(**EVEN).save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


def test_folder_loads_by_the_file_in_it(ours, tmp_path, capsys):
    main(["export", "--format", "nn_transformer", str(ours), str(tmp_path / "out")])

    assert re.search(r"out: logits of up to \S+ differ by at most", capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "mapping.yaml",
        "model.safetensors",
        "nn_transformer.py",
        "run.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    file = tmp_path / "out" / "nn_transformer.py"
    assert "import" in file.read_text()
    assert not re.search("^(from|import) (vanilla|transformers)", file.read_text(), re.MULTILINE)
    (block,) = (one for one in code_blocks("docs/pretrained.md", "python") if file.name in one)
    values = dict(BATCH)
    exec(block.replace("runs/de-en-torch", str(file.parent)), values)
    expected = load_model(str(ours)).eval()(**BATCH).logits
    torch.testing.assert_close(values["logits"], expected, rtol=0, atol=1e-5)
    too_long = torch.ones(1, 1 + len(values["model"].src_positions.weight), dtype=torch.long)
    with pytest.raises(ValueError, match=r"at most (\d+) tokens, got \d+"):
        values["model"](too_long, torch.ones_like(too_long), too_long[:, :3])
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert "transformer.decoder.layers.2.multihead_attn.in_proj_weight" in names
    tokenizers = [AutoTokenizer.from_pretrained(one) for one in (ours, tmp_path / "out")]
    assert tokenizers[0]("abc")["input_ids"] == tokenizers[1]("abc")["input_ids"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["pad_token_id"], config["decoder_start_token_id"]) == (0, 1)


def test_export_that_computes_something_else_is_not_kept(ours, tmp_path, monkeypatch):
    settings = module._settings
    monkeypatch.setattr(module, "_settings", lambda model: settings(model) | {"embedding_scale": 1})

    with pytest.raises(SystemExit):
        main(["export", "--format", "nn_transformer", str(ours), str(tmp_path / "out")])

    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_flipped_bit_of_a_folder_with_a_mapping_is_noticed(ours, tmp_path, capsys):
    main(["export", "--format", "nn_transformer", str(ours), str(tmp_path / "out")])
    file = tmp_path / "out" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    mapping = str(tmp_path / "out" / "mapping.yaml")
    with pytest.raises(SystemExit):
        main(["import", "--mapping", mapping, str(tmp_path / "out"), str(tmp_path / "back")])

    assert "model.safetensors of " in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_folder_comes_back_with_its_tokenizer_and_settings(ours, tmp_path, capsys):
    settings = GenerationConfig.from_pretrained(ours)
    settings.num_beams = 3
    settings.save_pretrained(ours)
    main(["export", "--format", "nn_transformer", str(ours), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "out"), str(tmp_path / "back")])
    mapping = tmp_path / "out" / "mapping.yaml"
    assert f"Give --mapping {mapping}, which brings" in capsys.readouterr().err

    main(["import", "--mapping", str(mapping), str(tmp_path / "out"), str(tmp_path / "back")])

    before, after = (Translator.from_pretrained(str(tmp_path / name)) for name in ("ours", "back"))
    assert after.search == before.search
    assert after.search.num_beams == 3
    assert after.tokenizers.contents == before.tokenizers.contents
    assert "not in the mapping" not in capsys.readouterr().out
