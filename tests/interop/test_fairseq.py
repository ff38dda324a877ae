"""Checkpoints of fairseq, brought in: the logits, gradients and outputs that fairseq computes.

fairseq cannot be installed beside current packages. Classes of Transformers, which hold models of
fairseq, compute what it does; `checkpoint` writes their weights in the format and with the names of
fairseq 0.12 (checkpoint_utils, models/transformer, data/dictionary).
"""

import argparse
import math
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
)
from transformers.models.m2m_100.modeling_m2m_100 import M2M100ScaledWordEmbedding

from vanilla_transformer_tools.interop.declarations import Declaration
from vanilla_transformer_tools.interop.fairseq import (
    find_fairseq_file,
    read_checkpoint,
    read_dictionary,
)
from vanilla_transformer_tools.interop.importing import import_model, load_source
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..models import TINY
from .test_importing import SIZES, assert_alike, refill

PAD, END = 1, 2
SOURCE_WORDS, TARGET_WORDS = 34, 37
SETTINGS = {
    "arch": "transformer_iwslt_de_en",
    "task": "translation",
    "source_lang": "de",
    "target_lang": "en",
    "encoder_embed_dim": TINY["d_model"],
    "decoder_embed_dim": TINY["d_model"],
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": TINY["encoder_attention_heads"],
    "decoder_attention_heads": TINY["decoder_attention_heads"],
    "encoder_ffn_embed_dim": TINY["encoder_ffn_dim"],
    "decoder_ffn_embed_dim": TINY["decoder_ffn_dim"],
    "dropout": 0.0,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "share_all_embeddings": False,
    "share_decoder_input_output_embed": False,
    "adaptive_softmax_cutoff": None,
    "encoder_layerdrop": 0.1,
    "max_source_positions": SIZES["max_position_embeddings"],
    "max_target_positions": SIZES["max_position_embeddings"],
}


def post_norm():
    sizes = {"src_vocab_size": SOURCE_WORDS, "tgt_vocab_size": TARGET_WORDS}
    return FSMTForConditionalGeneration(FSMTConfig(**sizes, **SIZES))


def pre_norm():
    config = M2M100Config(vocab_size=TARGET_WORDS, activation_function="gelu", **SIZES)
    model = M2M100ForConditionalGeneration(config)
    scale = math.sqrt(config.d_model)
    model.model.encoder.embed_tokens = M2M100ScaledWordEmbedding(
        SOURCE_WORDS, config.d_model, PAD, scale
    )
    model.double()
    refill(model)
    return model


def learned():
    config = BartConfig(vocab_size=TARGET_WORDS, activation_function="gelu_new", **SIZES)
    config.decoder_start_token_id = END
    return BartForConditionalGeneration(config).double()


# By name: a model of Transformers, and what is particular in its settings.
VARIANTS = {
    "separate": (post_norm, {}),
    "tied_decoder": (
        pre_norm,
        {
            "share_decoder_input_output_embed": True,
            "encoder_normalize_before": True,
            "decoder_normalize_before": True,
            "activation_fn": "gelu",
        },
    ),
    "shared": (
        learned,
        {
            "share_all_embeddings": True,
            # fairseq's own build_model sets it.
            "share_decoder_input_output_embed": True,
            "encoder_learned_pos": True,
            "decoder_learned_pos": True,
            "layernorm_embedding": True,
            "no_scale_embedding": True,
            "activation_fn": "gelu_accurate",
        },
    ),
}


def tensors_of(model):
    """Its weights by fairseq's names; tied ones have several."""
    names = {"lm_head.weight": "decoder.output_projection.weight"}
    learns = isinstance(model, BartForConditionalGeneration)
    return {
        names.get(name, name.removeprefix("model.")): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name != "model.shared.weight" and (learns or "embed_positions" not in name)
    }


def as_arguments(settings):
    return {"args": argparse.Namespace(**settings), "cfg": None}


def as_config(settings):
    return {"args": None, "cfg": {"model": argparse.Namespace(**settings), "task": {}}}


def as_nested_config(settings):
    """As models with a dataclass are saved."""
    task = {name: settings[name] for name in ("source_lang", "target_lang")}
    model = {"_name": "transformer", "quant_noise": {"pq": 0}}
    for name, value in settings.items():
        stack, _, inner = name.partition("_")
        if stack in ("encoder", "decoder"):
            model.setdefault(stack, {})[inner] = value
        elif name not in (*task, "arch", "task"):
            model[name] = value
    return {"args": None, "cfg": {"model": model, "task": task}}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "fairseq"
    made.mkdir()
    return made


def write_dictionary(file, words):
    lines = [f"{file.stem}{number} {90 - number}\n" for number in range(words - 6)]
    # What fairseq adds so that sizes are multiples of 8.
    lines += ["madeupword0000 0\n", "madeupword0001 0\n"]
    file.write_text("".join(lines), encoding="utf-8")


def checkpoint(folder, name="separate", form=as_arguments, damage=None, **changes):
    """Writes a folder as fairseq leaves one: a checkpoint with dictionaries beside it."""
    torch.manual_seed(3)
    build, particular = VARIANTS[name]
    model = build().eval()
    settings = SETTINGS | particular | changes
    with torch.no_grad():
        for parameter in dict.fromkeys(tensors_of(model).values()):
            parameter.copy_(0.3 * torch.randn_like(parameter))
    for language, words in (("de", SOURCE_WORDS), ("en", TARGET_WORDS)):
        write_dictionary(folder / f"dict.{language}.txt", words)
    if settings["share_all_embeddings"]:
        (folder / "dict.de.txt").write_bytes((folder / "dict.en.txt").read_bytes())
    state = {place: tensor.detach() for place, tensor in tensors_of(model).items()}
    state["encoder.version"] = state["decoder.version"] = torch.tensor([3.0])
    for stack in ("encoder", "decoder"):
        if not settings[f"{stack}_learned_pos"]:
            state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    if damage:
        damage(state)
    content = {
        **form(settings),
        "model": state,
        "optimizer_history": [{"num_updates": 7, "optimizer_name": "FairseqAdam"}],
        "extra_state": {"epoch": 1, "val_loss": 4.5, "train_iterator": {"epoch": 1}},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(3)}}},
    }
    torch.save(content, folder / "checkpoint_best.pt")
    return model


@pytest.mark.parametrize(
    ("name", "form"),
    [("separate", as_arguments), ("tied_decoder", as_config), ("shared", as_nested_config)],
)
def test_logits_and_gradients_are_those_of_fairseq(folder, tmp_path, name, form):
    original = checkpoint(folder, name, form)

    assert import_model(str(folder), tmp_path / "ours") is None

    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    assert model.dtype == original.dtype
    assert_alike(original, model, tensors_of(original), Declaration.of("fairseq").weights)
    pair = TokenizerPair.from_pretrained(str(tmp_path / "ours"))
    assert pair.is_joint == (name == "shared")


NUMBERS_OF_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


def as_in_2018(state):
    """The names that fairseq's own `upgrade_state_dict_named` still reads."""
    state["decoder.embed_out"] = state.pop("decoder.output_projection.weight")
    for name in list(state):
        if found := re.fullmatch(r"(.*attn)\.q_proj\.(weight|bias)", name):
            parts = [state.pop(f"{found[1]}.{part}_proj.{found[2]}") for part in "qkv"]
            state[f"{found[1]}.in_proj_{found[2]}"] = torch.cat(parts)
        stack = name.partition(".")[0]
        for number, norm in enumerate(NUMBERS_OF_NORMS[stack]):
            if f".{norm}." in name:
                state[name.replace(norm, f"layer_norms.{number}")] = state.pop(name)


def test_logits_of_an_older_checkpoint_are_those_of_fairseq(folder, tmp_path):
    original = checkpoint(folder, damage=as_in_2018)

    import_model(str(folder), tmp_path / "ours")

    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    assert_alike(original, model, tensors_of(original), Declaration.of("fairseq").weights)


def test_dictionary_is_read_as_fairseq_does(tmp_path):
    (tmp_path / "dict.de.txt").write_text(
        "ein@@ 9\n\u2581Hund 8\n, 7\n\u00e9 2\nmadeupword0000 0\n"
    )

    tokenizer = read_dictionary(tmp_path / "dict.de.txt")

    text = "\tein@@  , \u2581Hund\u3000e\u0301 \u00e9\x1cHund </s> "
    assert tokenizer.get_vocab() == {
        word: number
        for number, word in enumerate(
            ["<s>", "<pad>", "</s>", "<unk>", "ein@@", "▁Hund", ",", "é", "madeupword0000"]
        )
    }
    assert tokenizer(text)["input_ids"] == [4, 6, 5, 3, 7, 3, END, END]
    assert tokenizer.decode([4, 6, END], skip_special_tokens=True) == "ein@@ ,"


def test_dictionary_may_overwrite_and_count_below_zero(tmp_path):
    (tmp_path / "dict.de.txt").write_text(
        "ein -1\nzwei 3\nein 9 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\ndrei +2\n"
    )

    tokenizer = read_dictionary(tmp_path / "dict.de.txt")

    # As in fairseq, each line has a row, and a token its last one; ours keeps special ids.
    assert len(tokenizer) == 9
    assert tokenizer("ein zwei drei vier")["input_ids"] == [6, 5, 8, 3, END]
    assert tokenizer.unk_token_id == 3


@pytest.mark.parametrize("text", ["ein", "ein x", "zwei 9\nzwei 8", "<unk> 9"])
def test_dictionary_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "dict.de.txt").write_text(f"eins 9\n{text}\n")
    line = 2 + text.count("\n")

    with pytest.raises(ValueError, match=rf"dict.de.txt, line {line}, must be a new token and its"):
        read_dictionary(tmp_path / "dict.de.txt")


def test_settings_without_counterpart_are_named_at_once(folder):
    changes = {
        "arch": "lightconv",
        "adaptive_softmax_cutoff": [10, 20],
        "no_token_positional_embeddings": True,
        "cross_self_attention": True,
        "decoder_embed_dim": 26,
        "decoder_normalize_before": True,
        "decoder_learned_pos": True,
    }
    checkpoint(folder, **changes)

    faults = "\n".join(load_source(str(folder)).plan()[1].faults)

    assert "`arch` must be 'transformer*', got 'lightconv'" in faults
    assert "`adaptive_softmax_cutoff` must be None, got [10, 20]" in faults
    assert "`decoder_embed_dim` must be `encoder_embed_dim`, got 26 and 24" in faults
    assert all(f"`{name}` must be" in faults for name in changes)


def test_command_names_all_tensors_that_contradict_the_settings(folder, tmp_path, refused):
    name = "decoder.output_projection.weight"

    def damage(state):
        state[name] = torch.ones(9, 24)
        state["decoder.layers.0.attn_ln.weight"] = torch.ones(24)
        del state["decoder.layers.1.fc1.bias"]

    checkpoint(folder, "tied_decoder", damage=damage)

    told = refused("import", folder / "checkpoint_best.pt", tmp_path / "ours")

    assert "the source has no decoder.layers.1.fc1.bias" in told
    assert "decoder.layers.0.attn_ln.weight [24] is used by no rule" in told
    assert f"lm_head.weight must be [37, 24], got {name} [9, 24]" in told
    assert [path.name for path in tmp_path.iterdir()] == ["fairseq"]


def test_tied_tensor_that_differs_is_refused_and_may_be_missing(folder, tmp_path):
    name = "decoder.output_projection.weight"
    checkpoint(folder, "tied_decoder", damage=lambda state: state.update({name: state[name] + 1}))

    with pytest.raises(ValueError, match=f"{name} must equal decoder.embed_tokens.weight"):
        import_model(str(folder), tmp_path / "ours")

    checkpoint(folder, "tied_decoder", damage=lambda state: state.pop(name))
    import_model(str(folder), tmp_path / "ours")


def test_dropout_of_relu_has_an_older_name(folder):
    checkpoint(folder, activation_dropout=0.0, relu_dropout=0.2)

    assert read_checkpoint(folder / "checkpoint_best.pt").fields["activation_dropout"] == 0.2


def test_dictionaries_must_be_there_and_equal_for_one_table(folder):
    checkpoint(folder, "shared")
    write_dictionary(folder / "dict.de.txt", SOURCE_WORDS)

    with pytest.raises(ValueError, match=r"must be equal, .* got 34 and 37 entries"):
        read_checkpoint(folder / "checkpoint_best.pt")
    (folder / "dict.en.txt").unlink()
    with pytest.raises(ValueError, match=r"de.txt and dict.en.txt, got dict.de.txt. Copy dict.en"):
        read_checkpoint(folder / "checkpoint_best.pt")


def test_weights_alone_are_no_checkpoint_of_fairseq(tmp_path):
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "weights.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")

    for name, message in (
        ("weights.pt", "'args' or 'cfg', got 'a.weight'. Give --mapping"),
        ("list.pt", "'args' or 'cfg', got list. Give --mapping"),
        ("weights.safetensors", r"weights without a config\. Name the folder .*--mapping"),
    ):
        with pytest.raises(ValueError, match=message):
            import_model(str(tmp_path / name), tmp_path / "ours")


def test_best_checkpoint_of_a_folder_is_found_and_others_must_be_told_apart(folder):
    for name in ("average1.pt", "average2.pt"):
        (folder / name).touch()
    with pytest.raises(ValueError, match=r"one checkpoint, got average1.pt, average2.pt. Name t"):
        find_fairseq_file(folder)

    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (folder / name).touch()
    assert find_fairseq_file(folder).name == "checkpoint_best.pt"

    # One of Transformers.
    (folder / "config.json").touch()
    assert find_fairseq_file(folder) is None
