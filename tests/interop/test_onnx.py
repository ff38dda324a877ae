"""ONNX: graphs that compute what the model computes, for any lengths, and what runs them."""

import random
import shutil
from types import SimpleNamespace

import onnxruntime
import pytest
import torch
from torch import nn

from vanilla_transformer_tools.interop.onnx import (
    OPSET,
    OnnxModel,
    _DecoderGraph,
    _EncoderGraph,
    export_onnx,
)

from ..conftest import VARIANTS, Model, build_variant, each_variant

EOS = 2


class TorchSession:
    """Answers as onnxruntime does, with a graph that torch runs: an export takes ten seconds."""

    def __init__(self, graph: nn.Module) -> None:
        self.graph = graph
        one = torch.ones(1, 1, dtype=torch.long)
        self.caches = {
            f"{index // 2}.{('key', 'value')[index % 2]}": cache.shape
            for index, cache in enumerate(_EncoderGraph(graph.model)(one, one))
        }

    def get_inputs(self):
        return [
            SimpleNamespace(name=f"past.{name}", shape=self.caches[name]) for name in self.caches
        ]

    def get_outputs(self):
        return [SimpleNamespace(name=f"source.{name}") for name in self.caches]

    @torch.no_grad()
    def run(self, _, inputs):
        ids, mask, *_ = tensors = [torch.from_numpy(array) for array in inputs.values()]
        caches = [
            [tensor for name, tensor in zip(inputs, tensors, strict=True) if name.startswith(kind)]
            for kind in ("source.", "past.")
        ]
        return [tensor.numpy() for tensor in self.graph(ids, mask, *filter(None, caches))]


def read_in_torch(model: Model) -> OnnxModel:
    """The reader, on graphs that have not been exported."""
    reader = object.__new__(OnnxModel)
    reader.encoder = TorchSession(_EncoderGraph(model))
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
    model = build_variant(attn_implementation="eager")
    # As configs of models with several ends have it.
    model.config.eos_token_id = [EOS]
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("onnx")
    export_onnx(model, folder)
    model.generation_config.save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module", params=["torch", pytest.param("onnxruntime", marks=pytest.mark.slow)]
)
def exported(request, model):
    if request.param == "torch":
        return read_in_torch(model)
    return OnnxModel(request.getfixturevalue("folder"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("encoder_model.onnx", b"no graph"),
        ("decoder_model.onnx", b""),
        ("decoder_model.onnx.data", b"short"),
        ("encoder_model.onnx", None),
    ],
)
def test_damaged_folder_is_told_in_one_line(folder, tmp_path, name, content):
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    if content is None:
        (damaged / name).unlink()
    else:
        (damaged / name).write_bytes(content)

    with pytest.raises(ValueError, match=r"^onnxruntime .* cannot load '.*damaged': .* again\.$"):
        OnnxModel(damaged)


def torch_logits(model, source, target):
    with torch.no_grad():
        inputs = torch.tensor([[model.config.decoder_start_token_id, *target[:-1]]])
        return model(input_ids=torch.tensor([source]), decoder_input_ids=inputs).logits[0]


@pytest.mark.parametrize(("batch", "source", "target"), [(1, 1, 1), (3, 7, 5), (6, 2, 11)])
def test_logits_equal_torchs_for_any_lengths(model, exported, batch, source, target):
    sources, targets = draw_rows(batch, source), draw_rows(batch, target, seed=2)

    logits = exported.force(sources, targets)

    for row, one_source, one_target in zip(logits, sources, targets, strict=True):
        expected = torch_logits(model, one_source, one_target)
        actual = torch.from_numpy(row[: len(one_target)])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_graphs_name_their_axes_and_have_the_documented_opset(folder):
    onnx = pytest.importorskip("onnx")
    decoder = onnxruntime.InferenceSession(str(folder / "decoder_model.onnx"))
    shapes = {node.name: node.shape for node in decoder.get_inputs()}

    assert shapes["decoder_input_ids"] == ["batch", "target"]
    assert shapes["attention_mask"] == ["batch", "source"]
    assert shapes["source.2.value"] == ["batch", 4, "source", 6]
    assert shapes["past.0.key"] == ["batch", 4, "past", 6]
    graph = onnx.load(folder / "encoder_model.onnx", load_external_data=False)
    assert [entry.version for entry in graph.opset_import if not entry.domain] == [OPSET]


@pytest.mark.slow
def test_weights_lie_in_files_that_move_with_the_graphs(folder, tmp_path, model):
    assert (folder / "decoder_model.onnx.data").is_file()

    moved = folder.rename(tmp_path / "moved")
    try:
        assert_computes_alike(OnnxModel(moved), model)
    finally:
        moved.rename(folder)


def assert_computes_alike(reader, model):
    sources = draw_rows(4, 9)
    targets = draw_rows(4, 7, seed=2, vocab_size=model.config.target_vocab_size)
    for source, target in zip(sources, targets, strict=True):
        (logits,) = reader.force([source], [target])
        expected = torch_logits(model, source, target)
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)


@each_variant
def test_graphs_of_variants_compute_what_the_model_computes(changes):
    model = build_variant(**changes, attn_implementation="eager")

    assert_computes_alike(read_in_torch(model), model)


@pytest.mark.slow
def test_exported_variant_computes_what_torch_computes(tmp_path):
    model = build_variant(**VARIANTS["everything"], pre_norm=False, attn_implementation="eager")
    export_onnx(model, tmp_path)
    model.generation_config.save_pretrained(tmp_path)

    assert_computes_alike(OnnxModel(tmp_path), model)


def test_other_attention_is_refused(tiny_model, tmp_path):
    tiny_model.set_attn_implementation("sdpa")

    with pytest.raises(ValueError, match="needs `attn_implementation='eager'`, got 'sdpa'"):
        export_onnx(tiny_model, tmp_path)
