"""ONNX: graphs that compute what the model computes, for any lengths, and their reader."""

import random
import shutil
from copy import copy, deepcopy
from types import SimpleNamespace

import numpy as np
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
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.engines import TorchEngine

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


@pytest.mark.parametrize("portions", [[1, 1, 1, 1], [2, 2], [1, 3]])
def test_decoding_in_steps_equals_decoding_at_once(exported, portions):
    sources = draw_rows(3, 7)
    tokens = np.array([[1, 6, 33, 19], [1, 25, 7, 9], [1, 10, 28, 14]])
    encoded, past = exported.encode(sources), exported.empty_past(3)
    at_once, _ = exported.decode(tokens, encoded, past)

    steps = []
    for portion in np.split(tokens, np.cumsum(portions)[:-1], axis=1):
        logits, past = exported.decode(portion, encoded, past)
        steps.append(logits)

    np.testing.assert_allclose(np.concatenate(steps, axis=1), at_once, rtol=1e-4, atol=1e-4)


def test_greedy_translations_equal_those_of_generate(model, exported):
    sources = draw_rows(12, 9)
    limits = [len(source) + index % 7 for index, source in enumerate(sources)]

    actual = exported.generate(sources, limits)

    found = TorchEngine(model).translate_batch(sources, [[] for _ in sources], limits, Search())
    assert actual == [hypotheses[0].tokens for hypotheses in found]
    assert {hypotheses[0].reached_limit for hypotheses in found} == {False, True}
    assert len(set(map(tuple, actual))) > len(actual) / 2


def test_several_end_tokens_end_a_translation(exported):
    sources = draw_rows(6, 9)
    before = exported.generate(sources, [9] * 6)
    other_end = max(before, key=len)[0]
    reader = copy(exported)
    reader.generation_config = deepcopy(exported.generation_config)
    reader.generation_config.eos_token_id = [EOS, other_end]

    after = reader.generate(sources, [9] * 6)

    assert after == [row[: row.index(other_end)] if other_end in row else row for row in before]
    assert after != before


def test_outputs_begin_with_the_token_of_the_generation_config(model, exported):
    sources = draw_rows(6, 9)
    reader = copy(exported)
    reader.generation_config = deepcopy(exported.generation_config)
    reader.generation_config.forced_bos_token_id = 7

    actual = reader.generate(sources, [9] * 6)

    search = Search(first_token=7)
    found = TorchEngine(model).translate_batch(sources, [[] for _ in sources], [9] * 6, search)
    assert actual == [hypotheses[0].tokens for hypotheses in found]
    assert {row[0] for row in actual} == {7}


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
        sources = draw_rows(2, 5)
        expected = read_in_torch(model).generate(sources, [4, 4])
        assert OnnxModel(moved).generate(sources, [4, 4]) == expected
    finally:
        moved.rename(folder)


def assert_computes_alike(reader, model):
    sources = draw_rows(4, 9)
    limits = [9] * len(sources)

    actual = reader.generate(sources, limits)

    found = TorchEngine(model).translate_batch(sources, [[] for _ in sources], limits, Search())
    assert actual == [best.tokens for best, *_ in found]
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


def test_options_reach_onnxruntime(model, tmp_path, monkeypatch):
    model.generation_config.save_pretrained(tmp_path)
    sessions = []

    def open_session(file, options, providers):
        sessions.append((file, options.intra_op_num_threads, providers))

    monkeypatch.setattr(onnxruntime, "InferenceSession", open_session)

    OnnxModel(tmp_path, providers=("CUDAExecutionProvider",), num_threads=3)

    assert sessions == [
        (str(tmp_path / f"{side}_model.onnx"), 3, ["CUDAExecutionProvider"])
        for side in ("encoder", "decoder")
    ]


def test_other_attention_is_refused(tiny_model, tmp_path):
    tiny_model.set_attn_implementation("sdpa")

    with pytest.raises(ValueError, match="needs `attn_implementation='eager'`, got 'sdpa'"):
        export_onnx(tiny_model, tmp_path)
