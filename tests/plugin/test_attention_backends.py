"""Attention kernels: whichever computes the attention, the model's results are the same."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForSeq2SeqLM
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.utils import is_flash_attn_2_available

from vanilla_transformer.generation_vanilla_transformer import CACHE

from ..models import Batch, Model, build_variant, gradients, pad, source_of, without_labels

pytestmark = [
    # Most tests here leave flex attention uncompiled.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    # Among torch's own modules, and to Transformers' `flex_attention_mask`.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
]


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, visible: Tensor) -> Tensor:
    """Attention of one sentence, `[H, Q, E]`, to the `visible` `[Q, K]`; 0 where nothing is."""
    scores = (query @ key.transpose(-2, -1) * scaling).masked_fill(~visible, float("-inf"))
    return scores.softmax(dim=-1).nan_to_num() @ value


def up_to_the_last_key(query_length: int, key_length: int, causal: bool) -> Tensor:
    """What flash kernels call causal: the last query sees the last key, `[Q, K]`."""
    everything = torch.ones(query_length, key_length, dtype=torch.bool)
    return everything.tril(key_length - query_length) if causal else everything


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool
) -> Tensor:
    """The kernel for sentences of equal length, `[B, Q, H, E]`, in plain torch."""
    visible = up_to_the_last_key(q.shape[1], k.shape[1], causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows = [attend(*row, softmax_scale, visible) for row in zip(q, k, v, strict=True)]
    return torch.stack(rows).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """The kernel for sentences end to end, `[B * Q, H, E]`, in plain torch."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert (lengths_q.max(), lengths_k.max()) == (max_seqlen_q, max_seqlen_k)
    splits = [
        x.transpose(0, 1).split(lengths.tolist(), dim=1)
        for x, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k))
    ]
    rows = [
        attend(*row, softmax_scale, up_to_the_last_key(row[0].shape[1], row[1].shape[1], causal))
        for row in zip(*splits, strict=True)
    ]
    return torch.cat(rows, dim=1).transpose(0, 1)


def own_kernel(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, None]:
    """What a user may register: takes masks of keys, `[B, K]`, and causality from `module`."""
    visible = up_to_the_last_key(query.shape[2], key.shape[2], module.is_causal)
    if attention_mask is None:
        attention_mask = torch.ones(len(key), key.shape[2], dtype=torch.bool)
    rows = [
        attend(*row, scaling, visible & is_real)
        for *row, is_real in zip(query, key, value, attention_mask, strict=True)
    ]
    return torch.stack(rows).transpose(1, 2), None


AttentionInterface.register("own_kernel", own_kernel)
AttentionMaskInterface.register("own_kernel", flash_attention_mask)
# Transformers' own way to a flash kernel, up to the kernel itself, which needs a GPU.
AttentionInterface.register("flash_in_torch", flash_attention_forward)
AttentionMaskInterface.register("flash_in_torch", flash_attention_mask)


@pytest.fixture(autouse=True)
def flash_kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernels(implementation: str | None, *_: Any, **__: Any) -> tuple[Callable[..., Any], ...]:
        assert implementation == "flash_in_torch"
        unpadding = (flash_utils._pad_input, flash_utils._unpad_input)
        return flash_attn_func, flash_attn_varlen_func, None, *unpadding

    monkeypatch.setattr(flash_utils, "_lazy_imports", kernels)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)


KERNELS = ["sdpa", "flex_attention", "flash_in_torch", "own_kernel"]


@pytest.fixture(params=KERNELS)
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    # To compile flex attention takes half a minute; its meaning is the same without.
    is_flex = request.param == "flex_attention"
    with torch.compiler.set_stance("force_eager") if is_flex else nullcontext():
        yield request.param


@pytest.fixture
def eager_model(tiny_model: Model) -> Model:
    tiny_model.set_attn_implementation("eager")
    return tiny_model


def make_cache(kind: str, model: Model) -> EncoderDecoderCache:
    def make(length: int) -> Cache:
        if kind == "dynamic":
            return DynamicCache(config=model.config)
        return StaticCache(config=model.config, max_cache_len=length)

    # More than the target's five positions, and than the source's seven.
    return EncoderDecoderCache(make(9), make(8))


def real_rows(ids: Tensor, is_real: Tensor) -> list[Tensor]:
    return [row[real] for row, real in zip(ids, is_real.bool(), strict=True)]


def padded(batch: Batch, side: str, extra: int) -> Batch:
    """The pairs of `batch` with masks for both sides and targets of width 5 + `extra`."""
    sources = real_rows(batch["input_ids"], batch["attention_mask"])
    targets = real_rows(batch["decoder_input_ids"], batch["labels"] != -100)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    return dict(zip(names, (*pad(sources, side, 0), *pad(targets, side, extra)), strict=True))


# Targets narrower than the sources, as wide, and wider: flash kernels take three ways.
@pytest.mark.parametrize(
    ("attention", "extra"),
    [*((kernel, 0) for kernel in KERNELS), ("flash_in_torch", 2), ("flash_in_torch", 4)],
    indirect=["attention"],
)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_logits_are_those_of_eager_attention(eager_model, batch, attention, side, extra):
    inputs = padded(batch, side, extra)
    is_real = inputs["decoder_attention_mask"].bool()
    expected = eager_model(**inputs).logits

    eager_model.set_attn_implementation(attention)
    actual = eager_model(**inputs).logits

    torch.testing.assert_close(actual[is_real], expected[is_real])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_is_that_of_eager_attention(eager_model, batch, attention, num_beams):
    inputs = source_of(padded(batch, "left", 0))
    search = {"num_beams": num_beams, "max_new_tokens": 7}
    expected = eager_model.generate(**inputs, **search)

    eager_model.set_attn_implementation(attention)
    actual = eager_model.generate(**inputs, **search)

    assert actual.tolist() == expected.tolist()


# A kernel of the user's own has no part in this: with no mask it is to attend to all keys, and only
# by its name, as Transformers does, could one know that it is to be given one.
@pytest.mark.parametrize("attention", ["eager", *KERNELS[:-1]], indirect=True)
@pytest.mark.parametrize(
    ("chunks", "kind"), [((2, 3), "dynamic"), ((1, 1, 1, 1, 1), "static"), ((5,), "static")]
)
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_decoding_in_chunks_is_eager_attention_at_once(
    eager_model, batch, attention, chunks, kind, masked
):
    if kind == "static" and attention == "flex_attention":
        pytest.skip("refused, see below")
    inputs = padded(batch, "left", 0) if masked else without_labels(batch)
    # Without padding no mask is given: positions then follow from the cache.
    target, mask = inputs.pop("decoder_input_ids"), inputs.pop("decoder_attention_mask", None)
    expected = eager_model(**inputs, decoder_input_ids=target, decoder_attention_mask=mask).logits

    eager_model.set_attn_implementation(attention)
    cache, pieces = make_cache(kind, eager_model), []
    for piece in target.split(chunks, dim=1):
        end = cache.get_seq_length() + piece.shape[1]
        output = eager_model(
            **inputs,
            decoder_input_ids=piece,
            decoder_attention_mask=None if mask is None else mask[:, :end],
            cache=cache,
        )
        assert output[CACHE] is cache
        pieces.append(output.logits)

    is_real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[is_real], expected[is_real])


@torch.no_grad()
def test_row_of_padding_gives_finite_logits_and_leaves_the_others_alone(
    eager_model, batch, attention
):
    inputs = without_labels(batch)
    inputs["attention_mask"][1] = 0
    expected = eager_model(**inputs).logits[[0, 2]]

    eager_model.set_attn_implementation(attention)
    actual = eager_model(**inputs).logits

    assert actual.isfinite().all()
    torch.testing.assert_close(actual[[0, 2]], expected)


# Torch's compiler looks at `.grad` of tensors that have none.
@pytest.mark.filterwarnings("ignore:.*is not a leaf Tensor:UserWarning")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU has other kernels than a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
def test_row_of_padding_gives_finite_gradients_on_a_gpu(batch, kernel, dtype):
    # Heads of 32 and 16 entries: the kernel of flex attention takes none below 16.
    model = build_variant(d_model=64).to("cuda", dtype)
    model.set_attn_implementation(kernel)
    batch["attention_mask"][1] = 0

    found = gradients(model, {name: x.cuda() for name, x in batch.items()})

    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("attention", ["flash_in_torch", "own_kernel"], indirect=True)
def test_gradients_are_those_of_eager_attention(eager_model, batch, attention):
    expected = gradients(eager_model, batch)

    eager_model.set_attn_implementation(attention)
    actual = gradients(eager_model, batch)

    torch.testing.assert_close(actual, expected)


@torch.no_grad()
def test_flex_attention_refuses_a_static_cache(tiny_model, batch):
    tiny_model.set_attn_implementation("flex_attention")

    with pytest.raises(ValueError, match="got `flex_attention` and a static cache"):
        tiny_model(**without_labels(batch), cache=make_cache("static", tiny_model))


OUTPUTS = (
    "encoder_hidden_states",
    "decoder_hidden_states",
    "encoder_attentions",
    "decoder_attentions",
    "cross_attentions",
)


@torch.no_grad()
def test_weights_and_states_are_returned_under_any_kernel(eager_model, batch, attention):
    inputs, asked = without_labels(batch), {"output_attentions": True, "output_hidden_states": True}
    expected = eager_model(**inputs, **asked)

    eager_model.set_attn_implementation(attention)
    actual = eager_model(**inputs, **asked)

    # Two layers and three, and the embeddings below each stack.
    assert [len(actual[name]) for name in OUTPUTS] == [3, 4, 2, 3, 3]
    for name in OUTPUTS:
        torch.testing.assert_close(actual[name], expected[name])
    assert eager_model.config._attn_implementation == attention


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the user's kernel got, a record for each call."""
    calls: list[dict[str, Any]] = []

    def recorder(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        names = ("query", "key", "value", "attention_mask")
        calls.append({"module": module, **dict(zip(names, args, strict=True)), **kwargs})
        return own_kernel(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "own_kernel", recorder)
    return calls


# Both stacks share the one config, which has no name of its own.
@pytest.mark.parametrize("choice", ["own_kernel", {"": "own_kernel"}, None])
def test_chosen_kernel_computes_every_attention_and_is_not_saved(
    tiny_model, batch, tmp_path, handed, choice
):
    tiny_model.save_pretrained(tmp_path)
    expected = tiny_model(**batch).logits

    at_once = {} if choice else {"attn_implementation": "own_kernel"}
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **at_once)
    if choice:
        model.set_attn_implementation(choice)
    actual = model(**batch).logits

    torch.testing.assert_close(actual, expected)
    assert len(handed) == 2 + 2 * 3
    model.save_pretrained(tmp_path)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.slow
@torch.no_grad()
def test_compiled_flex_attention_is_eager_attention(eager_model, batch):
    expected = eager_model(**without_labels(batch)).logits

    eager_model.set_attn_implementation("flex_attention")
    actual = eager_model(**without_labels(batch)).logits

    torch.testing.assert_close(actual, expected)


# Torch's compiler looks at `.grad` of tensors that have none.
@pytest.mark.filterwarnings("ignore:.*is not a leaf Tensor:UserWarning")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex has no backward pass on a CPU")
def test_gradients_of_flex_attention_are_those_of_eager_attention(batch):
    # Heads of 32 and 16 entries: its kernel takes none below 16.
    model = build_variant(d_model=64).cuda()
    model.set_attn_implementation("eager")
    batch = {name: x.cuda() for name, x in batch.items()}
    expected = gradients(model, batch)

    model.set_attn_implementation("flex_attention")
    actual = gradients(model, batch)

    # Both sum in float32, in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn or a GPU is absent")
@pytest.mark.parametrize("extra", [0, 2, 4])
@torch.no_grad()
def test_flash_attention_is_eager_attention(eager_model, batch, monkeypatch, extra):
    monkeypatch.undo()  # the real kernels
    model = eager_model.cuda().bfloat16()
    inputs = {name: x.cuda() for name, x in padded(batch, "right", extra).items()}
    is_real = inputs["decoder_attention_mask"].bool()
    expected = model(**inputs).logits[is_real].float()

    model.set_attn_implementation("flash_attention_2")
    actual = model(**inputs).logits[is_real].float()

    # Flash rounds the weights to bfloat16 elsewhere; five layers of steps of 2^-8.
    assert F.cosine_similarity(actual, expected, dim=-1).min() > 0.99
