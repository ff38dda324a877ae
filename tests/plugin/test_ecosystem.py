"""PEFT, resized vocabularies, sharded and offloaded weights, export: as users know them."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import fast_loss_vanilla_transformer
from vanilla_transformer_tools.exports.to_transformers import to_transformers

from ..models import CONCATENATED, TWO_TABLES, Model, build_variant, source_of, without_labels

PROJECTIONS = ["qkv_proj", "q_proj", "kv_proj", "out_proj", "fc1", "fc2"]

# PEFT asks Transformers by a name of which newer releases warn.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)

both_ties = pytest.mark.parametrize("tied", [True, False])


NEW_TOKENS = [30, 36]


def single_tokens(**settings: Any) -> LoraConfig:
    return LoraConfig(r=3, target_modules=["fc1"], **settings)


SINGLE_TOKENS = {
    "list": single_tokens(trainable_token_indices=NEW_TOKENS),
    "ensured": single_tokens(trainable_token_indices=NEW_TOKENS, ensure_weight_tying=True),
    "by_stack": single_tokens(trainable_token_indices={"embed_tokens": NEW_TOKENS}),
    "tokens_only": TrainableTokensConfig(token_indices=NEW_TOKENS),
}


def losses_of_adapter(model: nn.Module, config: Any, batch: dict[str, Tensor]) -> list[float]:
    """Of three updates, then before and after merging."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, copy.deepcopy(config)).train()
    optimizer = torch.optim.SGD((p for p in adapted.parameters() if p.requires_grad), lr=0.3)
    losses = []
    for _ in range(3):
        losses.append(adapted(**batch).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    losses.append(adapted.eval()(**batch).loss)
    losses.append(adapted.merge_and_unload().eval()(**batch).loss)
    return [loss.item() for loss in losses]


# PEFT says that two tables are not tied after merging, and that only tokens are tied before.
@pytest.mark.filterwarnings(
    "ignore:.*no longer tied:UserWarning", "ignore:.*`ensure_weight_tying`:UserWarning"
)
@pytest.mark.parametrize(
    ("chosen", "name", "fields"),
    [
        *((chosen, "pegasus", {}) for chosen in ("list", "ensured", "tokens_only")),
        ("by_stack", "marian", {**TWO_TABLES, "pre_norm": False}),
    ],
)
def test_new_tokens_learn_as_in_models_of_transformers(batch, chosen, name, fields):
    config = SINGLE_TOKENS[chosen]
    model = build_variant(**CONCATENATED, **fields).double()
    batch["input_ids"][:, 2], batch["labels"][:, 1] = NEW_TOKENS
    theirs = to_transformers(model, name)

    expected, actual = (losses_of_adapter(one, config, batch) for one in (theirs, model))

    assert actual == pytest.approx(expected, abs=1e-5)
    assert actual[-1] < actual[0]


@pytest.mark.filterwarnings("ignore:.*tied:UserWarning", "ignore:.*tie_word_embeddings:UserWarning")
def test_adapter_that_takes_the_place_of_a_shared_table_serves_both_stacks(
    tiny_model, batch, tmp_path
):
    config = single_tokens(modules_to_save=["shared"])
    before = tiny_model(**batch).loss
    model = get_peft_model(tiny_model, config).train()
    table = tiny_model.get_input_embeddings()
    calls = []
    table.register_forward_hook(lambda *_: calls.append(1))

    model(**batch).loss.backward()

    assert table is tiny_model.model.encoder.embed_tokens is tiny_model.model.decoder.embed_tokens
    assert len(calls) == 2
    assert table.modules_to_save["default"].weight.grad.any()
    with torch.no_grad():
        table.modules_to_save["default"].weight *= 2
    merged = model.merge_and_unload().eval()
    merged.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**batch).loss, merged(**batch).loss)
    assert not torch.isclose(before, merged(**batch).loss)


def test_linear_maps_are_those_that_quantisers_replace(tiny_model):
    linears = [module for module in tiny_model.modules() if isinstance(module, nn.Linear)]

    assert {type(module) for module in linears} == {nn.Linear}


class OwnProducts(Tensor):
    """A weight like torchao's: it multiplies in its own way and has no other operations."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            hidden, weight, bias = args
            return F.linear(hidden, 2 * weight.as_subclass(Tensor), bias)
        if func in (F.embedding, torch.mm):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@both_ties
def test_weights_with_products_of_their_own_are_called(batch, tied):
    model = build_variant(tie_word_embeddings=tied)
    expected = mean_cross_entropy(2 * model(**without_labels(batch)).logits, batch["labels"])
    weight = model.lm_head.weight.detach().clone()
    model.lm_head.weight = nn.Parameter(weight.as_subclass(OwnProducts), requires_grad=False)

    loss = model.train()(**batch).loss
    loss.backward()

    torch.testing.assert_close(loss, expected)
    assert model.model.shared.weight.grad.any()


def with_lora(model: nn.Module, **changes: Any) -> PeftModel:
    """Adapters that change the outputs at once: by default they start as zero."""
    torch.manual_seed(0)
    settings = {"r": 3, "target_modules": PROJECTIONS, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**settings | changes)).eval()


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# PEFT warns that it will not merge into a tied projection; this test does not merge.
@pytest.mark.filterwarnings("ignore:.*tied:UserWarning", "ignore:.*tie_word_embeddings:UserWarning")
@both_ties
@pytest.mark.parametrize(
    "changes",
    [{}, {"target_modules": [*PROJECTIONS, "lm_head"]}, {"modules_to_save": ["lm_head"]}],
    ids=["projections", "lora_on_lm_head", "lm_head_of_its_own"],
)
def test_loss_and_gradients_of_adapters_are_those_of_the_logits(batch, monkeypatch, tied, changes):
    monkeypatch.setattr(fast_loss_vanilla_transformer, "CHUNK_ROWS", 5)
    peft_model = with_lora(build_variant(tie_word_embeddings=tied), **changes)
    trained = {
        name: parameter
        for name, parameter in peft_model.named_parameters()
        if parameter.requires_grad
    }
    expected = mean_cross_entropy(peft_model(**without_labels(batch)).logits, batch["labels"])
    expected_gradients = torch.autograd.grad(expected, list(trained.values()))

    loss = peft_model.train()(**batch).loss
    loss.backward()

    torch.testing.assert_close(loss, expected)
    for (name, parameter), gradient in zip(trained.items(), expected_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=lambda m, n=name: f"{n}: {m}")
        assert gradient.any(), name


@both_ties
def test_resized_model_loads_trains_and_generates_with_its_new_tokens(batch, tmp_path, tied):
    model = build_variant(tie_word_embeddings=tied, lm_head_bias=True)
    before = model(**batch).logits

    model.resize_token_embeddings(38, pad_to_multiple_of=8)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    logits = loaded(**batch).logits
    assert loaded.config.vocab_size == logits.shape[-1] == 40
    assert (loaded.lm_head.weight is loaded.model.shared.weight) == tied
    torch.testing.assert_close(logits[..., :37], before)
    assert torch.equal(logits, model(**batch).logits)
    generated = loaded.generate(**source_of(batch), forced_bos_token_id=39, max_new_tokens=6)
    next_logits = loaded(**source_of(batch), decoder_input_ids=generated[:, :2]).logits[:, -1]
    assert (generated[:, 1] == 39).all()
    # Neither `<pad>` nor `<s>` is generated.
    assert torch.equal(generated[:, 2], next_logits[:, 2:].argmax(-1) + 2)
    batch["labels"][0, 0] = 39
    loss = loaded.train()(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, mean_cross_entropy(logits, batch["labels"]))
    assert loaded.lm_head.weight.grad[39].any()


# The map names the table of each stack; accelerate knows a module that is shared by one name only.
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match:UserWarning")
# Transformers 5.17 asks the weights, which have no place of their own, where inputs belong.
@pytest.mark.filterwarnings("ignore:You are calling .generate.. with the `input_ids`:UserWarning")
@pytest.mark.parametrize("bytes_in_memory", [0, 60_000])
def test_weights_on_disk_give_the_same_results(tiny_model, batch, tmp_path, bytes_in_memory):
    tiny_model.save_pretrained(tmp_path / "model")

    offloaded = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "model",
        device_map="auto" if bytes_in_memory else {"": "disk"},
        max_memory={"cpu": bytes_in_memory},
        offload_folder=tmp_path / "offload",
    )

    assert offloaded.model.decoder.layers[0].fc1.weight.is_meta
    assert offloaded.model.shared.weight.is_meta == (bytes_in_memory == 0)
    torch.testing.assert_close(offloaded(**batch).logits, tiny_model(**batch).logits)
    settings = {"num_beams": 2, "max_new_tokens": 6}
    assert torch.equal(
        offloaded.generate(**source_of(batch), **settings),
        tiny_model.generate(**source_of(batch), **settings),
    )
