"""Models of Transformers' own classes, brought in: the same logits, loss, gradients and outputs."""

import copy
import json
import re
from dataclasses import replace
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PLBartConfig,
    PLBartForConditionalGeneration,
)
from transformers.models.fsmt import modeling_fsmt

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.commands import main
from vanilla_transformer_tools.interop import declarations, importing
from vanilla_transformer_tools.interop.declarations import Declaration, known_sources
from vanilla_transformer_tools.interop.importing import (
    LogitGap,
    compare_logits,
    convert,
    import_model,
)
from vanilla_transformer_tools.interop.weight_maps import WeightMap, shapes_of
from vanilla_transformer_tools.saved_folder import load_model
from vanilla_transformer_tools.translation import Translator

from ..models import TINY, UNTIED
from .test_tensor_files import RunsCode

SIZES = {name: size for name, size in TINY.items() if name != "vocab_size"} | {
    "encoder_layers": 1,
    "attention_dropout": 0.0,
    "max_position_embeddings": 40,
}
# As on the Hub, where the class's own defaults are others.
LIKE_OPUS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 36, "decoder_start_token_id": 36}
LIKE_OPUS |= {"scale_embedding": True}
TWO_TABLES = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 41}
# Of the sinusoids of fairseq.
BASE = 10_000 ** (12 / 11)


def marian(**changes):
    return MarianMTModel(MarianConfig(vocab_size=37, **SIZES, **LIKE_OPUS, **changes))


def fsmt(target=41, **changes):
    return FSMTForConditionalGeneration(
        FSMTConfig(src_vocab_size=37, tgt_vocab_size=target, **SIZES, **changes)
    )


def of(model_class, config_class, **changes):
    return lambda: model_class(config_class(vocab_size=37, **SIZES, **changes))


M2M100 = (M2M100ForConditionalGeneration, M2M100Config)
PEGASUS = (PegasusForConditionalGeneration, PegasusConfig)
BART = (BartForConditionalGeneration, BartConfig)
PLBART = (PLBartForConditionalGeneration, PLBartConfig)
MBART = (MBartForConditionalGeneration, MBartConfig)
BLENDERBOT = (BlenderbotForConditionalGeneration, BlenderbotConfig)
START, SCALED = {"decoder_start_token_id": 2}, {"scale_embedding": True}
BUILD = {
    "m2m_100": of(*M2M100),
    "m2m_100_unscaled": of(*M2M100, scale_embedding=False, activation_function="gelu"),
    "m2m_100_untied": of(*M2M100, **UNTIED),
    "marian": marian,
    "marian_swish": lambda: marian(activation_function="swish"),
    "marian_two_tables": lambda: marian(**TWO_TABLES),
    "marian_untied": lambda: marian(**UNTIED, **TWO_TABLES),
    "pegasus": of(*PEGASUS),
    "pegasus_untied": of(*PEGASUS, **UNTIED),
    "fsmt": fsmt,
    "fsmt_tied": lambda: fsmt(target=37, tie_word_embeddings=True),
    "bart": of(*BART),
    "bart_untied": of(*BART, **UNTIED),
    "plbart": of(*PLBART, **START),
    "plbart_untied": of(*PLBART, **START, **UNTIED),
    "mbart": of(*MBART, **START, **SCALED),
    "mbart_untied": of(*MBART, **START, **UNTIED),
    "blenderbot": of(*BLENDERBOT, **SCALED),
    "blenderbot_untied": of(*BLENDERBOT, **UNTIED),
}
FSMT_COUNTS_STEPS = (
    "past_key_values_length"
    in signature(modeling_fsmt.SinusoidalPositionalEmbedding.forward).parameters
)


def refill(model):
    """Computes tables of sinusoids anew in float64; these classes make them in float32."""
    is_fairseq = model.config.model_type == "m2m_100"
    for stack in (model.model.encoder, model.model.decoder):
        table = stack.embed_positions.weights if is_fairseq else stack.embed_positions.weight
        positions = torch.arange(len(table), dtype=torch.float64)[:, None]
        half = table.shape[1] // 2
        steps = torch.arange(half, dtype=torch.float64) / (half - 1 if is_fairseq else half)
        angles = positions * 10_000**-steps
        with torch.no_grad():
            table.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))


@pytest.fixture
def source(request):
    """A model whose every weight matters, in float64 where the class can compute in it."""
    torch.manual_seed(5)
    model = BUILD[request.param]().eval()
    if not request.param.startswith("fsmt"):
        model = model.double()
    constants = Declaration.of(model.config.model_type).constants
    has_sinusoids = constants["position_embedding_type"] != "learned"
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not (has_sinusoids and "embed_positions" in name):
                tensor.copy_(0.3 * torch.randn_like(tensor))
    if has_sinusoids and model.dtype == torch.float64:
        refill(model)
    return model


def draw_batch(config):
    generator = torch.Generator().manual_seed(7)
    input_ids = torch.randint(3, 34, (3, 7), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate((7, 5, 3)):
        input_ids[row, length:], attention_mask[row, length:] = config.pad_token_id, 0
    labels = torch.randint(3, 34, (3, 5), generator=generator)
    labels[1, 3:] = -100
    shifted = F.pad(labels[:, :-1], (1, 0), value=config.decoder_start_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "decoder_input_ids": shifted.masked_fill(shifted == -100, config.pad_token_id),
        "labels": labels,
        "use_cache": False,
    }


def assert_alike(source, model, parameters, weights):
    """Compares logits, loss and gradients; `parameters` have the names that `weights` maps."""
    batch = draw_batch(source.config)
    tolerance = {"rtol": 0, "atol": 1e-9 if source.dtype == torch.float64 else 1e-5}

    expected, actual = source(**batch), model(**batch)
    expected.loss.backward()
    actual.loss.backward()

    real = batch["labels"] != -100
    assert expected.logits.abs().max() > 0.5
    torch.testing.assert_close(actual.logits[real], expected.logits[real], **tolerance)
    torch.testing.assert_close(actual.loss, expected.loss, **tolerance)
    gradients = {name: one.grad for name, one in parameters.items() if one.grad is not None}
    # A bias of the logits is no parameter of these classes.
    targets = {name: one for name, one in model.named_parameters() if name != "lm_head.bias"}
    tied = model.all_tied_weights_keys
    plan = weights.plan(shapes_of(targets), shapes_of(gradients), tied)
    assert plan.faults == []
    made = plan.carry_out(gradients)
    assert len(made) == len(targets) >= 40
    for name, parameter in targets.items():
        torch.testing.assert_close(parameter.grad, made[name], **tolerance)


@pytest.mark.parametrize("source", BUILD, indirect=True)
def test_logits_loss_gradients_and_searches_are_those_of_the_source(source):
    before = copy.deepcopy(source.state_dict())
    model = convert(source)
    tied = source.all_tied_weights_keys
    parameters = dict(source.named_parameters(remove_duplicate=False))
    parameters = {name: one for name, one in parameters.items() if name not in tied}

    assert_alike(source, model, parameters, Declaration.of(source.config.model_type).weights)

    # In some releases of Transformers, FSMT's cached steps all read one position.
    if FSMT_COUNTS_STEPS or not isinstance(source, FSMTForConditionalGeneration):
        # In Transformers 5.17, beam search takes this size for the target's.
        source.config.vocab_size = model.config.target_vocab_size
        batch = draw_batch(source.config)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        settings = {**inputs, "num_beams": 4, "length_penalty": 0.6, "max_new_tokens": 12}
        expected, actual = (one.generate(**settings).tolist() for one in (source, model))
        assert actual == expected
    # The weights are copies.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in source.state_dict().items())


def with_rule(names, wrong_names):
    """A mistake in rules: other names of tensors."""

    def change(declaration, content):
        rules = {ours: old.replace(names, wrong_names) for ours, old in content["tensors"].items()}
        assert rules != content["tensors"]
        return replace(declaration, weights=WeightMap(rules, content["ignored"]))

    return change


def with_constants(**fields):
    """A mistake in what a class always has."""
    return lambda declaration, _: replace(
        declaration, constants={**declaration.constants, **fields}, computed={}
    )


@pytest.mark.parametrize("source", ["m2m_100"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_rule(".{fc1,fc2}.{weight,bias}", ".{fc1,fc2}.{bias,weight}"), "must have exactly"),
        (with_rule(".{q,k,v}_proj", ".{k,q,v}_proj"), "encoders' outputs differ already"),
        (with_rule(".{k,v}_proj", ".{v,k}_proj"), "encoders' outputs agree, the decoders do not"),
        (with_constants(position_base=BASE, position_offset=7), "differ already"),
        (with_constants(position_base=BASE, scale_embedding=False), "differ already"),
    ],
)
def test_mistake_in_a_declaration_is_noticed(source, monkeypatch, change, message):
    right = Declaration.of("m2m_100")
    wrong = change(right, declarations._read("m2m_100"))
    monkeypatch.setattr(Declaration, "of", lambda *_: wrong)

    with pytest.raises(ValueError, match=message):
        convert(source)


def test_short_table_of_positions_is_compared():
    for longest in (1, 2, 8):
        sizes = {**SIZES, "max_position_embeddings": longest}
        source = BartForConditionalGeneration(BartConfig(vocab_size=37, **sizes)).eval()

        comparison = compare_logits(source, convert(source))

        comparison.check()
        assert comparison.scale > 0.01


def test_comparison_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="differ by at most nan"):
        LogitGap(float("nan"), 1.0, 0.0).check()


@pytest.fixture
def saved(tmp_path):
    """A folder as Transformers saves one, with a tokenizer."""
    tokenizer = VanillaTransformerTokenizer.train(["ein hund rennt"] * 3, vocab_size=280)
    config = M2M100Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
        **SIZES,
    )
    torch.manual_seed(1)
    M2M100ForConditionalGeneration(config).save_pretrained(tmp_path / "m2m")
    tokenizer.save_pretrained(tmp_path / "m2m")
    return tmp_path / "m2m"


def test_imported_folder_loads_and_generates_like_its_source(saved, tmp_path, capsys):
    main(["import", "--dry_run", str(saved), str(tmp_path / "ours")])

    lines = capsys.readouterr().out.splitlines()
    attention = "model.encoder.layers.0.self_attn"
    parts = " + ".join(f"{attention}.{name}_proj.bias" for name in "qkv")
    assert f"{attention}.qkv_proj.bias <- {parts}" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["m2m"]

    main(["import", str(saved), str(tmp_path / "ours")])

    told = re.search(r"ours: logits of up to \S+ differ by at most (\S+)", capsys.readouterr().out)
    assert float(told[1]) < 1e-5
    source, model = (
        AutoModelForSeq2SeqLM.from_pretrained(path) for path in (saved, tmp_path / "ours")
    )
    assert type(model).__name__ == "VanillaTransformerForConditionalGeneration"
    input_ids = torch.tensor([[9, 10, 11, 2]])
    expected, actual = (
        one.generate(input_ids, max_new_tokens=9).tolist() for one in (source, model)
    )
    assert actual == expected
    run = json.loads((tmp_path / "ours" / "run.json").read_text())
    assert run["imported_from"] == {"name": "m2m", "model_type": "m2m_100"}
    assert {"model.safetensors", "tokenizer.json"} <= run["files"].keys()
    with pytest.raises(FileExistsError, match="ours' must not exist yet"):
        import_model(str(saved), tmp_path / "ours")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: [file.unlink() for file in folder.iterdir()], "a model of Transformers"),
        (lambda folder: change_weights(folder, extra=torch.ones(2)), "unknown to its config"),
        (lambda folder: change(folder, decoder_layers=4), "missing"),
        (lambda folder: change(folder, model_type="t5"), "got 't5'"),
        (lambda folder: change(folder, activation_function="magic"), "got 'magic'"),
        (lambda folder: change(folder, decoder_start_token_id=None), "decoder_start_token_id"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer that can be"),
    ],
)
def test_damaged_source_is_refused_and_leaves_no_folder(saved, tmp_path, refused, damage, message):
    damage(saved)

    told = refused("import", saved, tmp_path / "ours")

    assert re.search(rf"^vanilla-transformer: .*{message}", told, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["m2m"]


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def change_weights(folder, **tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


@pytest.mark.parametrize("exact", [torch.float32, torch.float16])
def test_rounding_of_16_bits_is_told_from_mistakes_in_float32(saved, tmp_path, monkeypatch, exact):
    M2M100ForConditionalGeneration.from_pretrained(saved).half().save_pretrained(saved)
    compared = []

    def compare_logits(source, model):
        assert source.dtype == model.dtype
        compared.append(model.dtype)
        return LogitGap(0.0 if model.dtype == exact else 1.0, 10.0, 0.0)

    monkeypatch.setattr(importing, "compare_logits", compare_logits)
    import_model(str(saved), tmp_path / "ours")

    assert compared == [torch.float16, torch.float32][: 1 + (exact == torch.float32)]
    ours, theirs = (load_model(str(folder)) for folder in (tmp_path / "ours", saved))
    assert ours.dtype == torch.float16
    torch.testing.assert_close(
        ours.get_input_embeddings().weight, theirs.get_input_embeddings().weight, rtol=0, atol=0
    )


def test_pickled_weights_come_in_unless_they_hold_more_than_tensors(saved, tmp_path, capsys):
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    pickled = saved / "pytorch_model.bin"

    torch.save(weights, pickled)
    import_model(str(saved), tmp_path / "ours")
    pickled.write_bytes(pickled.read_bytes()[:-999])
    with pytest.raises(ValueError, match=r"m2m' must be tensors that can be read"):
        import_model(str(saved), tmp_path / "cut")
    torch.save({**weights, "extra": RunsCode()}, pickled)
    with pytest.raises(ValueError, match=r"without running code, got: .*print"):
        import_model(str(saved), tmp_path / "evil")

    assert "never" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m2m", "ours"]


@pytest.mark.parametrize("source", ["mbart", "plbart"])
def test_pretrained_model_without_a_start_token_has_that_of_fine_tuned_ones(source):
    original = BUILD[source]()
    start, original.config.decoder_start_token_id = original.config.decoder_start_token_id, None

    model = convert(original)

    assert model.config.decoder_start_token_id == start == 2
    assert original.training
    assert model.training


def test_every_class_has_a_test():
    """Its row in `BUILD` is known by the whole `model_type`."""
    models = {name: build().config.model_type for name, build in BUILD.items()}

    named = {name for name, kind in models.items() if name == kind}
    assert named == {*known_sources()}, "Add a row to BUILD, by the whole model_type."
    assert {*models.values()} == {*known_sources()}


def test_several_ends_come_in(saved, tmp_path):
    change(saved, eos_token_id=[2, 3])

    import_model(str(saved), tmp_path / "ours")

    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["eos_token_id"] == [2, 3]
    assert Translator.from_pretrained(str(tmp_path / "ours")).tokenizer.eos_token_id == 2
