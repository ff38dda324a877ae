"""Weights of other programs through a user's mapping: parity with torch.nn.Transformer, faults."""

import math
import re
import warnings

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.interop.declarations import Declaration
from vanilla_transformer_tools.interop.importing import import_model, load_source
from vanilla_transformer_tools.interop.weight_maps import shapes_of
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair

from ..support.documents import code_blocks

WIDTH, HEADS, INNER, SOURCE_WORDS, TARGET_WORDS = 24, 4, 28, 33, 37
_EXTENDING, *_ = code_blocks("docs/import_export.md", "yaml")
# The page's, but for sizes and rates, and with another activation than the default.
MAPPING = yaml.safe_load(_EXTENDING)
MAPPING["constants"] |= {
    "vocab_size": SOURCE_WORDS,
    "decoder_vocab_size": TARGET_WORDS,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "activation_function": "gelu",
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}


class Table(nn.Module):
    """A table whose rows are scaled."""

    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)

    def forward(self, tokens):
        return self.embedding(tokens) * math.sqrt(WIDTH)


class Positions(nn.Module):
    """Sines and cosines in turn."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(20)[:, None] * 10_000 ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("pos_embedding", table)

    def forward(self, embedded):
        return embedded + self.pos_embedding[: embedded.shape[1]]


class Translator(nn.Module):
    """torch.nn.Transformer with tables around it, in the names of PyTorch's tutorial."""

    def __init__(self, norm_first=True):
        super().__init__()
        self.transformer = nn.Transformer(
            WIDTH, HEADS, 2, 3, INNER, 0.0, "gelu", batch_first=True, norm_first=norm_first
        )
        self.src_tok_emb = Table(SOURCE_WORDS)
        self.tgt_tok_emb = Table(TARGET_WORDS)
        self.positional_encoding = Positions()
        self.generator = nn.Linear(WIDTH, TARGET_WORDS)

    def forward(self, sources, is_padding, targets):
        tables = ((self.src_tok_emb, sources), (self.tgt_tok_emb, targets))
        length = targets.shape[1]
        return self.generator(
            self.transformer(
                *(self.positional_encoding(table(tokens)) for table, tokens in tables),
                tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
                src_key_padding_mask=is_padding,
                memory_key_padding_mask=is_padding,
            )
        )


@pytest.fixture(params=["pre_norm"])
def translator(request):
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        model = Translator(request.param == "pre_norm").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def weights(translator, tmp_path):
    """A file of the weights."""
    torch.save(translator.state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


@pytest.fixture
def mapping(tmp_path):
    """Writes a mapping with some sections changed."""

    def write(**sections):
        file = tmp_path / "map.yaml"
        file.write_text(yaml.safe_dump({**MAPPING, **sections}))
        return file

    return write


def with_constants(**changes):
    return {"constants": MAPPING["constants"] | changes}


@pytest.mark.parametrize("translator", ["pre_norm", "post_norm"], indirect=True)
def test_logits_and_gradients_are_those_of_torch(translator, weights, mapping, tmp_path):
    is_pre_norm = translator.transformer.encoder.layers[0].norm_first
    file = mapping(**with_constants(pre_norm=is_pre_norm))
    assert import_model(str(weights), tmp_path / "ours", mapping=file) is None
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto").train()
    sources, targets = torch.randint(4, 33, (3, 7)), torch.randint(4, 33, (3, 5))
    attention_mask = (torch.arange(7) < torch.tensor([[7], [5], [3]])).long()

    expected = translator(sources, attention_mask == 0, targets)
    actual = model(
        input_ids=sources, attention_mask=attention_mask, decoder_input_ids=targets, use_cache=False
    ).logits
    for logits in (expected, actual):
        logits.log_softmax(-1)[..., 5].sum().backward()

    assert expected.abs().max() > 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)
    gradients = {name: one.grad for name, one in translator.named_parameters()}
    targets = shapes_of(dict(model.named_parameters()))
    plan = Declaration.of_mapping(mapping()).weights.plan(targets, shapes_of(gradients))
    for name, gradient in plan.carry_out(gradients).items():
        torch.testing.assert_close(
            model.get_parameter(name).grad, gradient, rtol=0, atol=1e-9, msg=name
        )


def test_several_types_of_weights_become_the_widest(translator, mapping, tmp_path):
    state = {name: tensor.half() for name, tensor in translator.state_dict().items()}
    state["transformer.encoder.norm.bias"] = torch.ones(WIDTH)
    torch.save(state, tmp_path / "w.pt")

    import_model(str(tmp_path / "w.pt"), tmp_path / "ours", mapping=mapping())

    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_command_names_what_does_not_fit_at_once(weights, mapping, tmp_path, capsys):
    constants = with_constants(encoder_ffn_dim=30, lm_head_bias=False)
    file = str(mapping(**constants, ignored=[]))

    with pytest.raises(SystemExit) as ended:
        main(["import", "--dry_run", "--mapping", file, str(weights), str(tmp_path / "ours")])

    printed = capsys.readouterr()
    assert ended.value.code == 2
    query = "model.decoder.layers.0.encoder_attn.q_proj.bias <- "
    assert f"{query}transformer.decoder.layers.0.multihead_attn.in_proj_bias[0/3]" in printed.out
    for fault in (
        "model.encoder.layers.1.fc1.bias must be [30], got transformer.encoder.layers.1.linear1",
        "generator.bias [37] is used by no rule",
        "positional_encoding.pos_embedding [20, 24] is used by no rule",
    ):
        assert fault in printed.err


def test_command_names_what_neither_mapping_nor_tensors_say(weights, mapping, tmp_path, capsys):
    constants = {**MAPPING["constants"]}
    del constants["encoder_attention_heads"]
    argv = ["import", "--mapping", str(mapping(constants=constants)), str(weights)]

    for options in (["--dry_run"], []):
        main([*argv, str(tmp_path / "ours"), *options])

        assert (
            "not in the mapping, so as in the paper: encoder_attention_heads 8, "
            "scale_embedding True, position_embedding_type sinusoidal\n"
        ) in (told := capsys.readouterr().out)
    assert "ours: every tensor is used; no logits were compared" in told


def words(count):
    """A tokenizer with as many entries, in the order of PyTorch's tutorial."""
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<bos>"}
    special["eos_token"] = "<eos>"
    entries = [*special.values(), *(f"w{number}" for number in range(count - 4))]
    backend = Tokenizer(WordLevel({entry: place for place, entry in enumerate(entries)}, "<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_tokenizers_of_both_sides_come_along_if_they_fit(weights, mapping, tmp_path):
    TokenizerPair(words(SOURCE_WORDS), words(TARGET_WORDS)).save_pretrained(tmp_path / "words")
    options = {"mapping": mapping(), "tokenizer": str(tmp_path / "words")}

    import_model(str(weights), tmp_path / "ours", **options)

    pair = TokenizerPair.from_pretrained(str(tmp_path / "ours"))
    assert (len(pair.source), len(pair.target)) == (SOURCE_WORDS, TARGET_WORDS)
    words(SOURCE_WORDS + 1).save_pretrained(tmp_path / "words")
    with pytest.raises(ValueError, match="34 entries of the source for a table of 33"):
        import_model(str(weights), tmp_path / "other", **options)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"constants": []}, "`constants` must be a dict, got []"),
        ({"extends": "marian"}, "`extends` must be fairseq or nn_transformer, got 'marian'"),
        ({"constants": {"d_modle": 3}}, "`d_modle` is no field of VanillaTransformerConfig; did"),
        ({"tensors": {"a.{i": "b"}}, "'a.{i' must be the name of a tensor, with pairs of braces"),
        ({"extends": None}, "`extends` must be a str, got None"),
    ],
)
def test_mapping_that_is_none_is_refused(mapping, sections, message):
    file = mapping(**sections)

    with pytest.raises(ValueError, match=rf"^{file} must .*, got:\n{re.escape(message)}"):
        Declaration.of_mapping(file)


def test_faults_of_a_mapping_are_named_at_once(tmp_path):
    (tmp_path / "map.yaml").write_text("{prefix: a., constans: {}, ignored: 5, constants: {d: 3}}")

    faults = ("`constans`: no such section", "`ignored` must be a list", "`prefix` must", "`d` is")
    with pytest.raises(ValueError, match="(?s)" + ".*".join(faults)):
        Declaration.of_mapping(tmp_path / "map.yaml")


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.full((TARGET_WORDS,), math.nan), "must be finite, got others in lm_head.bias"),
        (torch.ones(TARGET_WORDS).char(), "got torch.int8 for lm_head.bias. Undo the quantisation"),
    ],
)
def test_weights_that_are_no_finite_numbers_are_refused(
    translator, mapping, tmp_path, bias, message
):
    torch.save({**translator.state_dict(), "generator.bias": bias}, tmp_path / "w.pt")

    with pytest.raises(ValueError, match=message):
        import_model(str(tmp_path / "w.pt"), tmp_path / "ours", mapping=mapping())


def test_value_of_another_type_is_refused(weights, mapping):
    with pytest.raises(ValueError, match=r"d_model.* expected int"):
        load_source(str(weights), mapping(**with_constants(d_model="large"))).plan()
