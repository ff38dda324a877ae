"""Checkpoints of fairseq, brought in: the logits, gradients and outputs that fairseq computes.

fairseq cannot be installed beside current packages. `checkpoint` writes its file format, and
`Fairseq` computes what its `transformer` does, both after its documentation and the names in its
source (fairseq 0.12: models/transformer, checkpoint_utils, data/dictionary).
"""

import argparse
import math
import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer_tools.interop.fairseq import (
    find_fairseq_file,
    read_checkpoint,
    read_dictionary,
)
from vanilla_transformer_tools.interop.importing import import_model, plan_import
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..conftest import TINY

PAD, END = 1, 2
SOURCE_WORDS, TARGET_WORDS = 33, 37
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
    "max_source_positions": 20,
    "max_target_positions": 20,
}
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
VARIANTS = {
    "separate": {},
    "tied_decoder": {"share_decoder_input_output_embed": True, **PRE_NORM, "activation_fn": "gelu"},
    "shared": {
        "share_all_embeddings": True,
        **LEARNED,
        "layernorm_embedding": True,
        "no_scale_embedding": True,
        "activation_fn": "gelu_accurate",
    },
}


@dataclass
class Fairseq:
    """fairseq's `transformer` in evaluation mode, from its tensors alone."""

    settings: dict
    tensors: dict[str, torch.Tensor]

    def __call__(self, sources, targets):
        encoded = self.run("encoder", sources, sources == PAD)
        decoded = self.run("decoder", targets, sources == PAD, encoded)
        return decoded @ self.tensors["decoder.output_projection.weight"].T

    def run(self, stack, tokens, is_padding, encoded=None):
        x = self.embed(stack, tokens)
        heads = self.settings[f"{stack}_attention_heads"]
        length = tokens.shape[1]
        hidden = is_padding[:, None, None]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        for number in range(self.settings[f"{stack}_layers"]):
            layer = f"{stack}.layers.{number}"
            if encoded is None:
                x = self.residual(stack, f"{layer}.self_attn", x, heads, None, hidden)
            else:
                x = self.residual(stack, f"{layer}.self_attn", x, heads, None, causal)
                x = self.residual(stack, f"{layer}.encoder_attn", x, heads, encoded, hidden)
            x = self.feed_forward(stack, layer, x)
        return self.norm(f"{stack}.layer_norm", x) if self.is_pre_norm(stack) else x

    def is_pre_norm(self, stack):
        return self.settings[f"{stack}_normalize_before"]

    def embed(self, stack, tokens):
        x = self.tensors[f"{stack}.embed_tokens.weight"][tokens]
        if not self.settings.get("no_scale_embedding"):
            x = x * math.sqrt(x.shape[-1])
        is_real = (tokens != PAD).long()
        positions = is_real.cumsum(1) * is_real + PAD
        if self.settings[f"{stack}_learned_pos"]:
            x = x + self.tensors[f"{stack}.embed_positions.weight"][positions]
        else:
            half = x.shape[-1] // 2
            step = math.log(10_000) / (half - 1)
            angles = positions[..., None] * torch.exp(-step * torch.arange(half).double())
            x = x + torch.cat([angles.sin(), angles.cos()], dim=-1)
        if self.settings.get("layernorm_embedding"):
            x = self.norm(f"{stack}.layernorm_embedding", x)
        return x

    def residual(self, stack, name, x, heads, encoded, is_hidden):
        inner = self.norm(f"{name}_layer_norm", x) if self.is_pre_norm(stack) else x
        q = self.linear(f"{name}.q_proj", inner).unflatten(-1, (heads, -1)).transpose(1, 2)
        memory = inner if encoded is None else encoded
        k, v = (
            self.linear(f"{name}.{part}_proj", memory).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in "kv"
        )
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(is_hidden, -math.inf).softmax(-1)
        x = x + self.linear(f"{name}.out_proj", (weights @ v).transpose(1, 2).flatten(-2))
        return x if self.is_pre_norm(stack) else self.norm(f"{name}_layer_norm", x)

    def feed_forward(self, stack, layer, x):
        activation = {
            None: F.relu,
            "gelu": F.gelu,
            "gelu_accurate": lambda y: F.gelu(y, approximate="tanh"),
        }[self.settings.get("activation_fn")]
        name = f"{layer}.final_layer_norm"
        inner = self.norm(name, x) if self.is_pre_norm(stack) else x
        x = x + self.linear(f"{layer}.fc2", activation(self.linear(f"{layer}.fc1", inner)))
        return x if self.is_pre_norm(stack) else self.norm(name, x)

    def linear(self, name, x):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def norm(self, name, x):
        weight, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias)


def tensors_of(settings):
    """Random weights by fairseq's names; tied ones are one tensor, as in its checkpoints."""
    generator = torch.Generator().manual_seed(3)
    width = settings["encoder_embed_dim"]
    tensors = {}

    def add(name, *shape):
        drawn = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = drawn.requires_grad_()

    def add_pair(name, rows, columns=None):
        add(f"{name}.weight", *((rows,) if columns is None else (rows, columns)))
        add(f"{name}.bias", rows)

    for stack, words in (("encoder", SOURCE_WORDS), ("decoder", TARGET_WORDS)):
        add(f"{stack}.embed_tokens.weight", words, width)
        if settings[f"{stack}_learned_pos"]:
            add(f"{stack}.embed_positions.weight", settings["max_source_positions"] + 2, width)
        if settings.get("layernorm_embedding"):
            add_pair(f"{stack}.layernorm_embedding", width)
        for number in range(settings[f"{stack}_layers"]):
            layer = f"{stack}.layers.{number}"
            for attention in ("self_attn", "encoder_attn")[: 1 if stack == "encoder" else 2]:
                for part in "qkv":
                    add_pair(f"{layer}.{attention}.{part}_proj", width, width)
                add_pair(f"{layer}.{attention}.out_proj", width, width)
                add_pair(f"{layer}.{attention}_layer_norm", width)
            inner = settings[f"{stack}_ffn_embed_dim"]
            add_pair(f"{layer}.fc1", inner, width)
            add_pair(f"{layer}.fc2", width, inner)
            add_pair(f"{layer}.final_layer_norm", width)
        if settings[f"{stack}_normalize_before"]:
            add_pair(f"{stack}.layer_norm", width)
    add("decoder.output_projection.weight", TARGET_WORDS, width)
    if settings["share_all_embeddings"]:
        tensors["encoder.embed_tokens.weight"] = tensors["decoder.embed_tokens.weight"]
    if settings["share_all_embeddings"] or settings["share_decoder_input_output_embed"]:
        tensors["decoder.output_projection.weight"] = tensors["decoder.embed_tokens.weight"]
    return tensors


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


def checkpoint(folder, form=as_arguments, damage=None, **changes):
    """Writes a folder as fairseq leaves one: a checkpoint with dictionaries beside it."""
    settings = SETTINGS | changes
    if settings["share_all_embeddings"]:
        # fairseq's own build_model sets it.
        settings["share_decoder_input_output_embed"] = True
    tensors = tensors_of(settings)
    is_joint = settings["share_all_embeddings"]
    for language, words in (("de", SOURCE_WORDS), ("en", TARGET_WORDS)):
        write_dictionary(folder / f"dict.{language}.txt", words)
    if is_joint:
        (folder / "dict.de.txt").write_bytes((folder / "dict.en.txt").read_bytes())
    state = {name: tensor.detach() for name, tensor in tensors.items()}
    # Copies of one tensor are saved once.
    for name, tensor in tensors.items():
        state[name] = state[next(other for other in tensors if tensors[other] is tensor)]
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
    return Fairseq(settings, tensors)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(9)
    sources = torch.randint(4, SOURCE_WORDS, (3, 7), generator=generator)
    for row, length in enumerate((7, 5, 3)):
        sources[row, length - 1], sources[row, length:] = END, PAD
    targets = torch.randint(4, TARGET_WORDS, (3, 5), generator=generator)
    targets[:, 0] = END
    return sources, targets


def logits_of(model, sources, targets):
    return model(
        input_ids=sources,
        attention_mask=(sources != PAD).long(),
        decoder_input_ids=targets,
        use_cache=False,
    ).logits


@pytest.mark.parametrize(
    ("name", "form"),
    [("separate", as_arguments), ("tied_decoder", as_config), ("shared", as_nested_config)],
)
def test_logits_and_gradients_are_those_of_fairseq(folder, tmp_path, batch, name, form):
    fairseq = checkpoint(folder, form, **VARIANTS[name])

    assert import_model(str(folder), tmp_path / "ours") is None

    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto").train()
    assert model.dtype == torch.float64
    expected, actual = fairseq(*batch), logits_of(model, *batch)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    for logits in (expected, actual):
        logits.log_softmax(-1)[..., 5].sum().backward()
    gradients = {name: tensor.grad for name, tensor in fairseq.tensors.items()}
    _, plan = read_checkpoint(folder / "checkpoint_best.pt").plan()
    for place, gradient in plan.carry_out(gradients).items():
        torch.testing.assert_close(model.get_parameter(place).grad, gradient, rtol=0, atol=1e-9)
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


@pytest.mark.parametrize("name", ["separate", "shared"])
def test_logits_of_an_older_checkpoint_are_those_of_fairseq(folder, tmp_path, batch, name):
    expected = checkpoint(folder, damage=as_in_2018, **VARIANTS[name])(*batch)

    import_model(str(folder), tmp_path / "ours")

    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    torch.testing.assert_close(logits_of(model, *batch), expected, rtol=0, atol=1e-9)


def test_greedy_search_finds_the_tokens_of_fairseq(folder, tmp_path, batch):
    fairseq, sources = checkpoint(folder), batch[0][:1]
    import_model(str(folder), tmp_path / "ours")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto")

    found = torch.tensor([[END]])
    with torch.no_grad():
        while found.shape[1] < 9 and (found.shape[1] == 1 or found[0, -1] != END):
            logits = fairseq(sources, found)[:, -1]
            logits[:, : PAD + 1] = -math.inf
            found = torch.cat([found, logits.argmax(-1, keepdim=True)], dim=1)

    assert model.generate(sources, max_length=9).tolist() == found.tolist()


def test_folder_has_a_tokenizer_for_each_side(folder, tmp_path):
    checkpoint(folder)

    import_model(str(folder), tmp_path / "ours")

    pair = TokenizerPair.from_pretrained(str(tmp_path / "ours"))
    assert [len(pair.source), len(pair.target)] == [SOURCE_WORDS, TARGET_WORDS]
    assert pair.source("dict.de0 dict.en0")["input_ids"] == [4, 3, END]
    assert pair.target("dict.de0 dict.en0")["input_ids"] == [3, 4, END]


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

    faults = "\n".join(plan_import(str(folder)).tensors.faults)

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

    checkpoint(folder, damage=damage, share_decoder_input_output_embed=True)

    told = refused("import", folder / "checkpoint_best.pt", tmp_path / "ours")

    assert "the source has no decoder.layers.1.fc1.bias" in told
    assert "decoder.layers.0.attn_ln.weight [24] is used by no rule" in told
    assert f"lm_head.weight must be [37, 24], got {name} [9, 24]" in told
    assert [path.name for path in tmp_path.iterdir()] == ["fairseq"]


def test_tied_tensor_that_differs_is_refused_and_may_be_missing(folder, tmp_path):
    name, tied = "decoder.output_projection.weight", {"share_decoder_input_output_embed": True}
    checkpoint(folder, damage=lambda state: state.update({name: state[name] + 1}), **tied)

    with pytest.raises(ValueError, match=f"{name} must equal decoder.embed_tokens.weight"):
        import_model(str(folder), tmp_path / "ours")

    checkpoint(folder, damage=lambda state: state.pop(name), **tied)
    import_model(str(folder), tmp_path / "ours")


def test_dropout_of_relu_has_an_older_name(folder):
    checkpoint(folder, activation_dropout=0.0, relu_dropout=0.2)

    assert read_checkpoint(folder / "checkpoint_best.pt").fields["activation_dropout"] == 0.2


def test_dictionaries_must_be_there_and_equal_for_one_table(folder):
    checkpoint(folder, share_all_embeddings=True)
    write_dictionary(folder / "dict.de.txt", SOURCE_WORDS)

    with pytest.raises(ValueError, match=r"must be equal, .* got 33 and 37 entries"):
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
    for name in ("model1.pt", "model2.pt"):
        (folder / name).touch()
    with pytest.raises(ValueError, match=r"one checkpoint, got model1.pt, model2.pt. Name the fil"):
        find_fairseq_file(folder)

    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (folder / name).touch()
    assert find_fairseq_file(folder).name == "checkpoint_best.pt"

    # One of Transformers.
    (folder / "config.json").touch()
    assert find_fairseq_file(folder) is None
