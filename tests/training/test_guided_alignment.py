"""Guided alignment: links of words become links of tokens, and a head learns them."""

import pytest
import torch

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer_tools.training.guided_alignment import (
    HEAD,
    WEIGHT,
    AlignedCollator,
    _links,
    _words_of_tokens,
    guided_pass,
)
from vanilla_transformer_tools.training.trainer import r_drop
from vanilla_transformer_tools.translation import Translator

from ..support.aligned_numbers import write_aligned_corpus
from ..support.training_runs import read_json, run_training

# Row, target, source: a target with two links, one without any, and a short row.
LINKS = torch.tensor([[0, 0, 1], [0, 1, 0], [0, 1, 3], [1, 0, 6], [2, 2, 1]])


def expected_loss(model, batch):
    """By the weights that eager attention returns."""
    outputs = model(**batch, output_attentions=True)
    weights = outputs.cross_attentions[1][:, HEAD]
    # Both links of a target have half of its weight.
    total = weights[[0, 1, 2], [0, 0, 2], [1, 6, 1]].log().sum()
    total = total + weights[0, 1, [0, 3]].log().mean()
    return outputs.loss - WEIGHT * total / (batch["labels"] != -100).sum()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_loss_is_the_cross_entropy_of_one_head(tiny_model, batch, attention):
    tiny_model.train().set_attn_implementation(attention)
    layer = tiny_model.model.decoder.layers[1].encoder_attn
    expected = expected_loss(tiny_model, batch)
    expected_gradient = torch.autograd.grad(expected, layer.q_proj.weight)[0]

    twice = 2 * (batch["labels"] != -100).sum()
    loss, unguided, halved = (
        guided_pass(tiny_model, attention=layer, alignment=links, **changes, **batch).loss
        for links, changes in ((LINKS, {}), (LINKS[:0], {}), (LINKS, {"num_items_in_batch": twice}))
    )

    torch.testing.assert_close(loss, expected)
    gradient = torch.autograd.grad(loss, layer.q_proj.weight)[0]
    torch.testing.assert_close(gradient, expected_gradient)
    assert not layer.q_proj._forward_hooks
    torch.testing.assert_close(unguided, tiny_model(**batch).loss)
    torch.testing.assert_close(2 * halved, loss)


def test_loss_adds_to_that_of_r_drop(tiny_model, batch):
    layer = tiny_model.train().model.decoder.layers[1].encoder_attn
    guidance = expected_loss(tiny_model, batch) - tiny_model(**batch).loss

    def pass_twice(model, **inputs):
        return r_drop(model, 3.0, **inputs)

    loss = guided_pass(
        tiny_model, attention=layer, training_pass=pass_twice, alignment=LINKS, **batch
    ).loss

    torch.testing.assert_close(loss, r_drop(tiny_model, 3.0, **batch).loss + guidance)


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizer.train(["ein hund rennt", "a dog runs"] * 2, vocab_size=290)


def test_tokens_have_the_links_of_their_words(tokenizer):
    pair = "ein hund", "dog a"
    sides = [
        next(_words_of_tokens(tokenizer, name, [text], prefixes, 20))
        for name, text, prefixes in (("text", pair[0], [(5,)]), ("text_target", pair[1], None))
    ]

    flat = list(_links("0-1 1-0", *sides, *pair))

    assert sides[0][0] == set()
    links = set(zip(flat[::2], flat[1::2], strict=True))
    assert links == {
        (target, source)
        for target, target_words in enumerate(sides[1])
        for source, source_words in enumerate(sides[0])
        if {(0, 1), (1, 0)} & {(s, t) for s in source_words for t in target_words}
    }
    assert links


def test_collator_numbers_the_rows(tokenizer):
    rows = [{"input_ids": [5, 2], "labels": [6, 2], "alignment": links} for links in ([0, 1], [])]
    collate = AlignedCollator(tokenizer)

    batch = collate([*rows, {**rows[0], "alignment": [1, 0, 1, 1]}])

    assert batch["alignment"].tolist() == [[0, 0, 1], [2, 1, 0], [2, 1, 1]]
    assert "alignment" not in collate([{"input_ids": [5, 2], "labels": [6, 2]}])


@pytest.fixture(scope="module")
def aligned_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligned")
    write_aligned_corpus(folder, train=60, validation=5, test=40)
    return folder


def test_run_names_its_head_and_skips_dropped_pairs(aligned_corpus, tmp_path):
    sides = [aligned_corpus / f"train.{language}" for language in ("de", "en")]
    with sides[0].open("a", encoding="utf-8") as file:
        file.write("\n")
    with sides[1].open("a", encoding="utf-8") as file:
        file.write("x\n")
    links = aligned_corpus / "train.align"
    # The third pair is dropped, and so is its line.
    text = "\n\n\n" + links.read_text(encoding="utf-8").split("\n", 3)[3] + "\n"
    (tmp_path / "links").write_text(text, encoding="utf-8")

    folder = run_training(
        aligned_corpus,
        tmp_path / "run",
        {"alignments": str(tmp_path / "links"), "filter_empty": True},
    )

    assert read_json(folder / "generation_config.json")["alignment_heads"] == [[0, 0]]
    assert "links" in read_json(folder / "run.json")["sha256"]
    Translator.from_pretrained(str(folder), engine="torch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-0\n", "one line for each of the .* pairs of --train, got 1 in"),
        ("9-0\n" * 61, "line 1: Links must be source-target.* got '9-0'"),
    ],
)
def test_file_that_does_not_fit_is_refused(aligned_corpus, tmp_path, text, message):
    count = len((aligned_corpus / "train.de").read_text(encoding="utf-8").splitlines())
    lines = text.splitlines(keepends=True)
    (tmp_path / "links").write_text("".join(lines[: count if len(lines) > 1 else 1]), "utf-8")

    with pytest.raises(ValueError, match=message):
        run_training(aligned_corpus, tmp_path / "run", {"alignments": str(tmp_path / "links")})
