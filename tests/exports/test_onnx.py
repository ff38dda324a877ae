"""ONNX: graphs that compute what the model computes, for any lengths, and what runs them."""

import json
import random
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import onnxruntime
import pytest
import torch
from torch import nn

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.configuration_vanilla_transformer import CHOICES
from vanilla_transformer_tools.exports import ctranslate2_conversion
from vanilla_transformer_tools.exports import onnx as onnx_export
from vanilla_transformer_tools.exports.export import export_model, verify
from vanilla_transformer_tools.exports.onnx import OPSET, OnnxModel, _DecoderGraph
from vanilla_transformer_tools.exports.to_transformers import FORMATS, to_transformers
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..models import LEARNED, RECTANGULAR, TWO_TABLES, Model, build_variant
from ..plugin.test_variant_grid import AXES, build_combination, each_choice
from ..text.test_tokenizer_pair import build_latin_to_greek
from .test_ctranslate2 import VARIANTS

EOS = 2


class TorchSession:
    """Answers as onnxruntime does, with a graph that torch runs: an export takes ten seconds."""

    def __init__(self, graph: nn.Module) -> None:
        self.graph = graph

    def get_inputs(self):
        model = self.graph.model
        layers, ones = model.model.decoder.layers, torch.ones(1, 1, model.config.d_model)
        parts = layers[0].encoder_attn.source_keys_and_values(ones, None)
        return [
            SimpleNamespace(name=f"past_key_values.{layer}.{side}.{name}", shape=part.shape)
            for layer in range(len(layers))
            for side in ("decoder", "encoder")
            for name, part in zip(("key", "value"), parts, strict=True)
        ]

    @torch.no_grad()
    def run(self, _, inputs):
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        cache = [tensors.pop(name) for name in inputs if name.startswith("past_key_values.")]
        if not cache:
            return [self.graph(**tensors).last_hidden_state.numpy()]
        return [one.numpy() for one in self.graph(**tensors, past_key_values=cache)]


def read_in_torch(model: Model) -> OnnxModel:
    """The reader, on graphs that have not been exported."""
    reader = object.__new__(OnnxModel)
    reader.encoder = TorchSession(model.model.encoder)
    reader.decoder = TorchSession(_DecoderGraph(model))
    reader.generation_config = model.generation_config
    return reader


def draw_rows(count, longest, seed=1, vocab_size=37):
    draw = random.Random(seed)
    return [
        [*draw.choices(range(3, vocab_size), k=draw.randint(0, longest - 1)), EOS]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def model():
    """One with all that is particular."""
    changes = {**RECTANGULAR, **LEARNED, **TWO_TABLES, "pre_norm": False, "d_k": 5, "d_v": 2}
    changes |= {"max_position_embeddings": 20, "position_offset": 1, "decoder_vocab_size": 40}
    model = build_variant(**changes, lm_head_bias=True, attn_implementation="eager")
    # As configs of models with several ends have it.
    model.config.eos_token_id = [EOS]
    return model


@pytest.fixture(scope="module")
def export(model, tmp_path_factory):
    """How its export agrees, and the folder, which has been moved."""
    root = tmp_path_factory.mktemp("onnx")
    _, pair = build_latin_to_greek()
    model.save_pretrained(root / "model")
    pair.save_pretrained(root / "model")
    with pytest.MonkeyPatch.context() as patch:
        # Large weights are in files of their own.
        patch.setattr(onnx_export, "_LARGEST_GRAPH", 0)
        agreement = export_model(str(root / "model"), root / "out", "onnx")
    return agreement, (root / "out").rename(root / "moved")


@pytest.fixture(scope="module")
def folder(export):
    return export[1]


@pytest.fixture(
    scope="module", params=["torch", pytest.param("onnxruntime", marks=pytest.mark.slow)]
)
def exported(request, model):
    if request.param == "torch":
        return read_in_torch(model)
    return OnnxModel(request.getfixturevalue("folder"))


@pytest.mark.slow
def test_folder_is_complete(export):
    agreement, folder = export
    of_tokenizers = {"tokenizer.json", "tokenizer_config.json"}

    assert {path.name for path in folder.iterdir()} == of_tokenizers | {
        *("config.json", "generation_config.json", "run.json", "onnx", "target_tokenizer")
    }
    assert {path.name for path in (folder / "target_tokenizer").iterdir()} == of_tokenizers
    graphs = {"encoder_model.onnx", "decoder_model_merged.onnx"}
    names = {path.name for path in (folder / "onnx").iterdir()}
    assert names == graphs | {f"{name}.data" for name in graphs}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "marian"
    assert agreement.lines == 100
    assert 0 < agreement.gap < 1e-4


@pytest.mark.parametrize(("batch", "longest"), [(1, 1), (3, 7), (6, 2)])
def test_translations_and_scores_are_torchs_for_any_lengths(model, exported, batch, longest):
    agreement = verify(TorchEngine(model), exported.translate, draw_rows(batch, longest))

    assert agreement.identical == agreement.lines == batch
    assert agreement.gap < 1e-5


@pytest.mark.slow
def test_graphs_have_the_names_of_optimum_and_the_documented_opset(folder, model):
    onnx = pytest.importorskip("onnx")
    decoder = onnxruntime.InferenceSession(str(folder / "onnx" / "decoder_model_merged.onnx"))
    shapes = {node.name: node.shape for node in decoder.get_inputs()}

    assert shapes["input_ids"] == ["batch_size", "decoder_sequence_length"]
    assert shapes["encoder_attention_mask"] == ["batch_size", "encoder_sequence_length"]
    assert shapes["encoder_hidden_states"] == ["batch_size", "encoder_sequence_length", 24]
    # Optimum takes them in this order.
    _, heads, _, size = TorchSession(_DecoderGraph(model)).get_inputs()[-1].shape
    assert list(shapes)[3:7] == [
        f"past_key_values.0.{side}.{part}"
        for side in ("decoder", "encoder")
        for part in ("key", "value")
    ]
    for side in ("encoder", "decoder"):
        length = f"past_{side}_sequence_length"
        assert shapes[f"past_key_values.2.{side}.value"] == ["batch_size", heads, length, size]
    assert decoder.get_outputs()[1].name == "present.0.decoder.key"
    graph = onnx.load(folder / "onnx" / "encoder_model.onnx")
    assert [entry.version for entry in graph.opset_import if not entry.domain] == [OPSET]


@each_choice
def test_graphs_of_variants_compute_what_the_model_computes(combination):
    model = build_combination(combination).float()
    model.set_attn_implementation("eager")
    sources = draw_rows(3, 7, vocab_size=model.config.vocab_size)

    agreement = verify(TorchEngine(model), read_in_torch(model).translate, sources)

    assert agreement.identical == agreement.lines == 3
    assert agreement.gap < 1e-5


@pytest.mark.parametrize("name", [*sorted(CHOICES), "norm"])
def test_config_that_no_format_knows_is_refused(name):
    model = build_variant(attn_implementation="eager")
    if name not in CHOICES:
        model.config = with_made_up_field(model.config)
    # As a variant has them that no config of today admits.
    setattr(model.config, name, "other")

    for refuse, format in (
        (onnx_export.refuse_unexpressed, "ONNX"),
        (ctranslate2_conversion.refuse_unexpressed, "CTranslate2"),
        *((partial(to_transformers, name=one), one) for one in FORMATS),
    ):
        with pytest.raises(ValueError, match=rf"(?s){format}.*`{name}` must be .*, got 'other'"):
            refuse(model)


def test_each_choice_that_a_runtime_has_is_compared_with_torch():
    grid = [choice for axis in AXES.values() for choice in axis.values()]
    for choices, compared in ((CHOICES, grid), (ctranslate2_conversion._CHOICES, VARIANTS)):
        for name, values in choices.items():
            default = getattr(VanillaTransformerConfig, name)
            assert {*values} == {default, *(one[name] for one in compared if name in one)}


def with_made_up_field(config):
    """As a variant brings one."""

    @dataclass
    class NewConfig(VanillaTransformerConfig):
        norm: str = "layer"

    return NewConfig(**config.to_diff_dict())
