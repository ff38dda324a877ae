"""CTranslate2: what the loader takes over and refuses, and an engine that searches like torch's."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.exports.ctranslate2_conversion import (
    _ACTIVATIONS,
    convert,
    refuse_unexpressed,
)
from vanilla_transformer_tools.translation import Search
from vanilla_transformer_tools.translation.ctranslate2_engine import CTranslate2Engine, patience
from vanilla_transformer_tools.translation.engine import Hypothesis
from vanilla_transformer_tools.translation.torch_engine import TorchEngine

from ..models import CONCATENATED, LEARNED, TWO_TABLES, UNTIED, build_variant

PAD, BOS, EOS, UNK = range(4)
# Bytes of a number in each type of weights.
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1}
BYTES |= {"int8_float32": 1, "int8_float16": 1, "int8_bfloat16": 1}


def settle(model):
    """Makes `<pad>` and `<s>` next to impossible, as in a trained model.

    Otherwise what is forbidden has a share of the probability, which torch's scores keep and
    CTranslate2's do not.
    """
    with torch.no_grad():
        model.model.decoder.layer_norm.weight[0] = 0
        model.model.decoder.layer_norm.bias[0] = 1
        model.lm_head.weight[[PAD, BOS], 0] = -50
    return model


@pytest.fixture
def model(tiny_model):
    return settle(tiny_model)


@pytest.fixture
def export(tokenizer, tmp_path):
    """Converts a model and loads what came out."""

    def convert_and_load(model, quantization="float32", tokenizer=tokenizer):
        convert(model, tokenizer, tmp_path / "ct2", quantization)
        return CTranslate2Engine(tmp_path / "ct2", device="cpu")

    return convert_and_load


def draw_sources(count=30, vocab_size=37, longest=9):
    draw = random.Random(1)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [[*draw.choices(range(UNK, vocab_size), k=length), EOS] for length in lengths]


SOURCES = draw_sources()
# Each source has a limit of its own; some of them cut a search off.
LIMITS = [len(source) + index % 9 for index, source in enumerate(SOURCES)]


def run(engine, search=None, sources=SOURCES, limits=LIMITS, prefix_length=0):
    search = replace(search or Search(), scores=True)
    prefixes = [[9 + index % 3, 11][:prefix_length] for index in range(len(sources))]
    return engine.translate_batch(sources, prefixes, limits, search)


def best(results: list[list[Hypothesis]]) -> list[tuple[list[int], bool]]:
    return [(found[0].tokens, found[0].reached_limit) for found in results]


def assert_translates_alike(model, engine, **settings):
    expected, actual = run(TorchEngine(model), **settings), run(engine, **settings)
    assert best(actual) == best(expected)
    scores = [[found[0].score for found in results] for results in (actual, expected)]
    torch.testing.assert_close(*map(torch.tensor, scores), rtol=1e-4, atol=1e-5)
    # Different sources do make a difference.
    assert len(set(scores[0])) > len(settings.get("sources", SOURCES)) / 2


def scores_by_torch(model, sources, results, search):
    """Scores of the hypotheses of all sources, in one list."""
    targets = [one.ended for found in results for one in found]
    reads = [one.log_probs for one in TorchEngine(model).force(sources, targets)]
    return [sum(numbers) / len(numbers) ** search.length_penalty for numbers in reads]


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change_file(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return change_file


def without_field(name: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        fields = json.loads(content)
        del fields[name]
        return json.dumps(fields).encode()

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewrite("model.bin", lambda content: content[:3000]), "(incomplete|payload).* Export the"),
        # The version, of four bytes.
        (rewrite("model.bin", lambda content: b"\x63" + content[1:]), "binary version v99.*again"),
        (lambda folder: (folder / "model.bin").unlink(), "Unable to open file 'model.bin'"),
        (rewrite("shared_vocabulary.json", lambda content: b'["a", "b"]'), "'</s>'. Export the m"),
        (rewrite("config.json", without_field("eos_token")), "made, got no `eos_token` in its con"),
    ],
)
def test_damaged_export_is_told_in_one_line(model, export, tmp_path, damage, message):
    export(model)
    damage(tmp_path / "ct2")

    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        CTranslate2Engine(tmp_path / "ct2", device="cpu")


def test_type_that_cannot_be_computed_in_is_told(model, export, tmp_path):
    export(model)

    with pytest.raises(ValueError, match=r"to compute in 'int8_int8'.* compute in another type"):
        CTranslate2Engine(tmp_path / "ct2", device="cpu", compute_type="int8_int8")


@pytest.mark.parametrize("prefix_length", [0, 2])
@pytest.mark.parametrize(
    "restriction", [{"min_length": 5}, {"no_repeat_ngram_size": 1}, {"repetition_penalty": 1.5}]
)
def test_restrictions_are_those_of_torch(model, export, restriction, prefix_length):
    search = Search(**restriction)
    limits = [limit + prefix_length for limit in LIMITS]
    engines = TorchEngine(model), export(model)

    expected, found = (
        best(run(engine, search, limits=limits, prefix_length=prefix_length)) for engine in engines
    )

    assert found == expected
    assert found != best(run(engines[1], limits=limits, prefix_length=prefix_length))


@pytest.mark.parametrize("length_penalty", [0.0, 0.6])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_beam_search_finds_torchs_translations(model, export, num_beams, length_penalty):
    search = Search(num_beams, length_penalty)

    assert_translates_alike(model, export(model), search=search)


@pytest.mark.parametrize("early_stopping", [True, False, "never", None])
def test_patience_is_that_of_the_generation_config(model, export, tmp_path, early_stopping):
    search = Search(num_beams=3, length_penalty=1.0)
    export(model)
    model.generation_config.early_stopping = early_stopping
    chosen = patience(model.generation_config)
    engines = [
        CTranslate2Engine(tmp_path / "ct2", device="cpu", patience=number)
        for number in (chosen, 3 - chosen)
    ]

    expected, *found = (best(run(each, search)) for each in (TorchEngine(model), *engines))

    chosen_equal, other_equal = (
        sum(a == b for a, b in zip(results, expected, strict=True)) for results in found
    )
    assert chosen_equal > other_equal


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_n_best_is_ranked_by_the_scores_that_torch_gives_it(model, export, length_penalty):
    search = Search(num_beams=4, length_penalty=length_penalty, num_hypotheses=3)

    results = run(export(model), search)

    expected = scores_by_torch(model, SOURCES, results, search)
    assert [one.score for found in results for one in found] == pytest.approx(
        expected, rel=1e-5, abs=1e-5
    )
    for found in results:
        scores = [one.score for one in found]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(one.tokens) for one in found}) == len(found) == 3


def test_forced_prefix_is_followed_as_by_torch(model, export):
    settings = {"prefix_length": 2, "limits": [limit + 2 for limit in LIMITS]}
    engine = export(model)

    assert_translates_alike(model, engine, **settings)
    outputs = [found[0].tokens for found in run(engine, **settings)]
    assert [tokens[:2] for tokens in outputs] == [[9 + index % 3, 11] for index in range(30)]
    # One may end directly behind the prefix, and another go on.
    assert {len(tokens) == 2 for tokens in outputs} == {False, True}


def test_samples_differ_and_have_the_models_scores(model, export):
    search = Search(do_sample=True, num_hypotheses=4, temperature=1.5, length_penalty=0.6)

    results = run(export(model), search)

    assert {len(found) for found in results} == {4}
    assert len({tuple(one.tokens) for one in results[0]}) > 1
    expected = scores_by_torch(model, SOURCES, results, search)
    scores = [one.score for found in results for one in found]
    assert scores == pytest.approx(expected, rel=1e-4, abs=1e-4)
    for found, limit in zip(results, LIMITS, strict=True):
        assert max(len(one.tokens) for one in found) <= limit


def test_sample_that_reaches_its_limit_is_not_drawn_again(model, export):
    with torch.no_grad():
        model.lm_head.weight[EOS, 0] = 2
    empty = Hypothesis([], 0.0, EOS)
    (score,) = scores_by_torch(model, SOURCES[:1], [[empty]], Search())
    expected = math.exp(score)

    # The last source has another limit.
    sources, limits = [SOURCES[0]] * 800 + [SOURCES[1]], [2] * 800 + [9]
    *results, _ = run(export(model), Search(do_sample=True), sources=sources, limits=limits)

    # Drawn again, those of two tokens would have another chance to be empty.
    frequency = sum(not found[0].tokens for found in results) / 800
    assert 0.1 < expected < 0.6
    assert abs(frequency - expected) < 0.07


@pytest.mark.parametrize("num_beams", [1, 4])
def test_forbidden_tokens_are_never_generated(tiny_model, export, num_beams):
    # `<pad>` and `<s>` would sometimes win, see `redraw_parameters`.
    suppressed = best(run(TorchEngine(tiny_model)))[0][0][0]
    tiny_model.generation_config.suppress_tokens = [suppressed]
    engine = export(tiny_model)

    results = run(engine, Search(num_beams, num_hypotheses=num_beams))

    tokens = {token for found in results for one in found for token in one.tokens}
    assert not tokens & {PAD, BOS, suppressed}
    assert best(run(engine)) == best(run(TorchEngine(tiny_model)))


def build(**changes):
    return settle(build_variant(**changes))


VARIANTS = [
    {"pre_norm": False},
    {"add_final_layer_norm": False},
    {"embedding_layer_norm": True, "layer_norm_eps": 0.01},
    {"attention_bias": False},
    {"scale_embedding": False},
    {"position_base": 100},
    UNTIED,
    {**TWO_TABLES, **UNTIED},
    {**CONCATENATED, "pre_norm": False},
    # As BART.
    {**LEARNED, "position_offset": 2, "pre_norm": False, "embedding_layer_norm": True}
    | {"scale_embedding": False, "activation_function": "gelu"},
    # Rows without a token.
    {"vocab_size": 40},
    {"norm_type": "rms_norm", "embedding_layer_norm": True, "layer_norm_eps": 0.01},
    {"position_embedding_type": "rotary"},
    {"position_embedding_type": "rotary", "norm_type": "rms_norm", "position_base": 100},
    {"decoder_start_token_id": 5},
    {"encoder_attention_heads": 3, "decoder_attention_heads": 1},
    *({"activation_function": name} for name in sorted(_ACTIVATIONS)),
]


@pytest.mark.parametrize(
    "changes",
    VARIANTS,
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_variant_of_the_model_translates_as_in_torch(export, changes):
    model = build_variant(**{**changes, "lm_head_bias": True})
    with torch.no_grad():
        model.lm_head.bias[[PAD, BOS]] = -50
    # Of nine learned positions the longest sources need all, and most outputs more.
    sources = draw_sources(vocab_size=model.config.vocab_size, longest=8)

    assert_translates_alike(model, export(model), sources=sources)


def test_every_token_of_a_vocabulary_with_bytes_survives(export):
    # Among them the line feed, NUL, quotes, and a token with a control character.
    lines = ['a\tb "c" \\ d\x01e', 'a\tb "c" \\ d\x01e']
    tokenizer = VanillaTransformerTokenizer.train(lines, vocab_size=280)
    vocab_size = len(tokenizer)
    model = build(vocab_size=vocab_size)
    every_id = list(range(vocab_size))
    sources = [[*every_id[start : start + 10], EOS] for start in range(0, vocab_size, 10)]
    settings = {"sources": sources, "limits": [15] * len(sources)}

    engine = export(model, tokenizer=tokenizer)

    assert engine.target_tokens == engine.source_tokens == tokenizer.convert_ids_to_tokens(every_id)
    assert_translates_alike(model, engine, **settings)


@pytest.mark.parametrize("quantization", BYTES)
def test_each_type_of_weights_gives_nearly_the_models_scores(model, export, tmp_path, quantization):
    results = run(export(model, quantization))

    expected = scores_by_torch(model, SOURCES, results, Search())
    gaps = [abs(found[0].score - one) for found, one in zip(results, expected, strict=True)]
    assert max(gaps) < (0.3 if "int" in quantization else 0.03)
    positions = 2048 * 24 * (2 if quantization.endswith("float16") else 4)
    weights = (tmp_path / "ct2" / "model.bin").stat().st_size - positions
    parameters = sum(one.numel() for one in model.parameters())
    # Biases, norms and scales have more bytes, and there are names.
    assert 1 < weights / (parameters * BYTES[quantization]) < 1.7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu6"}, r"`activation_function` must be one of .*got 'relu6'"),
        ({"eos_token_id": [2, 7]}, r"`eos_token_id` must be one id, got \[2, 7\]"),
        ({"d_k": 5, "d_v": 7}, r"`d_k` must be None, got 5\.\n`d_v` must be None, got 7"),
        ({"talking_heads": "both"}, "`talking_heads` must be None, got 'both'"),
    ],
)
def test_setting_without_a_counterpart_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refuse_unexpressed(build_variant(**changes))


def test_start_and_end_are_those_of_the_generation_config(model, export):
    model.generation_config.update(decoder_start_token_id=9, eos_token_id=[11])

    engine = export(model)

    some = {"sources": SOURCES[:20], "limits": LIMITS[:20]}
    assert engine.end_id == 11
    assert best(run(engine, **some)) == best(run(TorchEngine(model), **some))


def test_generation_config_without_a_counterpart_is_refused(model, export):
    model.generation_config.bad_words_ids = [[0], [5, 6]]

    with pytest.raises(ValueError, match=r"single tokens.*got \[\[5, 6\]\]"):
        export(model)


def test_lengths_end_where_the_position_table_does(model, export):
    longest = [[*random.Random(0).choices(range(UNK, 37), k=2047), EOS]]
    engine = export(model)

    assert_translates_alike(model, engine, sources=longest, limits=[6])
    with pytest.raises(ValueError, match=r"positions for 2048 tokens, got 2049\."):
        run(engine, sources=[[5] * 2048 + [EOS]], limits=[3])
    assert run(engine, sources=[[EOS]], limits=[5]) == [[Hypothesis([], 0.0, EOS)]]
    with torch.no_grad():
        model.lm_head.weight[EOS, 0] = -50
    ((only,),) = run(export(model), sources=[[5, EOS]], limits=[9999])
    assert (len(only.tokens), only.reached_limit) == (2048, True)
    grown = export(build(max_position_embeddings=1500))
    assert (grown.max_positions, grown.last_position) == (1500, 3000)


def test_each_thread_has_a_part_of_a_batch_which_changes_nothing(model, export, tmp_path):
    expected = run(export(model))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = CTranslate2Engine(tmp_path / "ct2", device="cpu")

        assert engine.translator.num_translators == engine.parts == 2
        assert best(run(engine)) == best(expected)
        # CTranslate2 has set them to its own.
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_folder_of_another_origin_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="must be a folder that `vanilla-transformer export"):
        CTranslate2Engine(tmp_path)
