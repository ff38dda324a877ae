"""Examples for models of other programs: fairseq's come in, and those of Marian go out again."""

import argparse

import numpy as np
import pytest
import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

from vanilla_transformer_tools.interop.importing import compare_logits, import_model
from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..interop.test_importing import SIZES
from ..support.marian import PRE_NORM, SHAPES, save_marian
from .test_scripts import EXAMPLES, names_of, run, run_script

WORDS = {"de": 29, "en": 33}
# fairseq's options; those of the sizes that have other names follow.
OPTIONS = {name: SIZES[name] for name in names_of("import_fairseq.py")["SAME"] if name in SIZES}
OPTIONS |= {"source_lang": "de", "target_lang": "en", "activation_fn": "relu", "dropout": 0.1}
for side in ("encoder", "decoder"):
    OPTIONS[f"{side}_embed_dim"] = SIZES["d_model"]
    OPTIONS[f"{side}_ffn_embed_dim"] = SIZES[f"{side}_ffn_dim"]


@pytest.fixture(params=[False, True], ids=["newer", "older"])
def checkpoint(request, tmp_path):
    """A model of fairseq with the names of a newer or an older release, and Transformers' of it."""
    torch.manual_seed(3)
    sizes = {"src_vocab_size": 4 + WORDS["de"], "tgt_vocab_size": 4 + WORDS["en"]}
    original = FSMTForConditionalGeneration(FSMTConfig(**sizes, **SIZES)).eval()
    state = {
        name.removeprefix("model."): one
        for name, one in original.state_dict().items()
        if "embed_positions" not in name
    }
    state["encoder.version"] = torch.tensor([3.0])
    content = {"cfg": {"model": OPTIONS}}
    if request.param:
        content = {"args": argparse.Namespace(**OPTIONS)}
        state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
        for name in [name for name in state if ".q_proj." in name]:
            attention, _, part = name.rpartition(".q_proj.")
            joined = [state.pop(f"{attention}.{one}_proj.{part}") for one in "qkv"]
            state[f"{attention}.in_proj_{part}"] = torch.cat(joined)
    torch.save({**content, "model": state}, tmp_path / "checkpoint_best.pt")
    for language, count in WORDS.items():
        lines = [f"{language}{number} {count - number}\n" for number in range(count)]
        (tmp_path / f"dict.{language}.txt").write_text("".join(lines))
    return tmp_path / "checkpoint_best.pt", original


def test_model_of_fairseq_comes_in_with_its_dictionaries(checkpoint, tmp_path):
    file, original = checkpoint

    assert "every tensor is used" in run("import_fairseq.py", file, tmp_path / "ours")

    ours = load_model(str(tmp_path / "ours")).eval()
    compare_logits(original, ours).check()
    assert ours.config.dropout == 0.1
    pair = TokenizerPair.from_pretrained(str(tmp_path / "ours"))
    assert pair.source("de1 </s> de28 x")["input_ids"] == [5, 2, 32, 3, 2]
    assert pair.target(text_target="en0")["input_ids"] == [4, 2]


def test_options_that_no_tensor_shows_are_refused():
    constants = names_of("import_fairseq.py")["constants"]

    for name in ("cross_self_attention", "no_token_positional_embeddings"):
        with pytest.raises(SystemExit, match=f"must have these options off: {name}"):
            constants({**OPTIONS, name: True}, [33, 37])
    shared = {"share_all_embeddings": True, "encoder_learned_pos": True, "no_scale_embedding": True}
    found = constants(OPTIONS | shared | {"activation_fn": "gelu_fast"}, [33, 33])
    assert found["tie_word_embeddings"]
    assert "decoder_vocab_size" not in found
    assert found["position_embedding_type"] == "learned"
    assert not found["scale_embedding"]
    assert found["activation_function"] == "gelu_new"


@pytest.mark.parametrize("name", ["post_norm", "separate", "untied"])
def test_model_of_marian_goes_out_as_it_came_in(name, tmp_path):
    folder = save_marian(tmp_path / "marian", SHAPES[name])
    import_model(str(folder), tmp_path / "ours")

    told = run("export_marian.py", tmp_path / "ours", tmp_path / "back")

    assert "differ by at most 0.0e+00" in told
    before, after = (np.load(place / "model.npz") for place in (folder, tmp_path / "back"))
    for array in {*before.files, *after.files} - {"special:model.yml"}:
        # Ours has a bias for `<pad>`, which is zero elsewhere.
        expected = before[array] if array in before.files else np.zeros_like(after[array])
        np.testing.assert_array_equal(after[array], expected)


OLD_GELU = {"version": "v1.12.0", "transformer-ffn-activation": "gelu"}


@pytest.mark.parametrize("options", [PRE_NORM, OLD_GELU], ids=["pre_norm", "old_gelu"])
def test_model_of_another_form_does_not_go_to_marian(tmp_path, options):
    import_model(str(save_marian(tmp_path / "marian", options)), tmp_path / "ours")

    done = run_script(EXAMPLES / "export_marian.py", tmp_path / "ours", tmp_path / "back")

    assert done.returncode
    assert "must be a post-norm model" in done.stderr
    assert not (tmp_path / "back").exists()
