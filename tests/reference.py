"""Slow oracle of the model: the paper's equations in float64, one sentence and one position a time.

It shares nothing with the package and reads like the paper: a sequence is a Python list with one
vector per position, and every sentence is computed alone, without any padding. So there are no
masks and no batch axis here that could be wrong, and a model that agrees with it treats padding,
positions and the future as promised. Tensors serve as arrays whose elementary operations
`torch.autograd` can differentiate; every formula above them is written out.

Weights are a dictionary with the names of the model's state dict. Letters of shapes: D `d_model`,
H heads, E head size D / H, V vocabulary, B batch, S source, T target.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

IGNORED_LABEL = -100

Weights = Mapping[str, Tensor]
Vectors = list[Tensor]  # one for each position


class Config(Protocol):
    """The fields of the model's configuration that the equations depend on."""

    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    activation_function: str
    layer_norm_eps: float
    scale_embedding: bool
    tie_word_embeddings: bool
    pad_token_id: int
    bos_token_id: int
    eos_token_id: int
    decoder_start_token_id: int


def leaves(state_dict: Weights) -> dict[str, Tensor]:
    """Copies weights to float64 tensors that collect their own gradients."""
    return {
        name: tensor.detach().to(torch.float64, copy=True).requires_grad_()
        for name, tensor in state_dict.items()
    }


def sinusoid(position: int, d_model: int) -> Tensor:
    """Positional encoding of section 3.5: sine in even columns, cosine in odd ones, `[D]`."""
    encoding = []
    for column in range(d_model):
        pair = column // 2
        angle = position / 10000 ** (2 * pair / d_model)
        encoding.append(math.sin(angle) if column % 2 == 0 else math.cos(angle))
    return torch.tensor(encoding, dtype=torch.float64)


def softmax(scores: Tensor) -> Tensor:
    """Probabilities exp(x_i) / sum_j exp(x_j)."""
    exponentials = scores.exp()
    return exponentials / exponentials.sum()


def relu(vector: Tensor) -> Tensor:
    """Rectifier max(0, x) of section 3.3."""
    return torch.where(vector > 0, vector, 0.0)


def gelu(vector: Tensor) -> Tensor:
    """Gaussian error linear unit (arXiv 1606.08415): x times the normal distribution's P(X < x)."""
    return vector * (1 + torch.erf(vector / math.sqrt(2))) / 2


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": relu, "gelu": gelu}


def linear(weights: Weights, name: str, vector: Tensor) -> Tensor:
    """Affine map Wx + b of the module called `name`."""
    return weights[f"{name}.weight"] @ vector + weights[f"{name}.bias"]


def layer_norm(weights: Weights, name: str, vector: Tensor, eps: float) -> Tensor:
    """Layer normalisation (arXiv 1607.06450): zero mean, unit variance, then gain and bias."""
    mean = vector.sum() / len(vector)
    variance = ((vector - mean) ** 2).sum() / len(vector)
    normalised = (vector - mean) / torch.sqrt(variance + eps)
    return weights[f"{name}.weight"] * normalised + weights[f"{name}.bias"]


def attention(queries: Vectors, keys: Vectors, values: Vectors, causal: bool) -> Vectors:
    """Scaled dot-product attention of one head, equation (1): `[E]` for each query.

    Args:
        queries: One vector `[E]` for each position that asks.
        keys: One vector `[E]` for each position that answers.
        values: One vector `[E]` for each key.
        causal: Whether a query sees only the keys up to its own position.
    """
    outputs = []
    for position, query in enumerate(queries):
        visible = position + 1 if causal else len(keys)
        scores = [(query * key).sum() / math.sqrt(len(query)) for key in keys[:visible]]
        output = torch.zeros_like(values[0])
        for probability, value in zip(softmax(torch.stack(scores)), values[:visible], strict=True):
            output = output + probability * value
        outputs.append(output)
    return outputs


def split(sequence: Vectors, parts: int) -> list[Vectors]:
    """Cuts every vector into `parts` neighbouring pieces of one size: one sequence for each."""
    size = len(sequence[0]) // parts
    return [[vector[p * size : (p + 1) * size] for vector in sequence] for p in range(parts)]


def multi_head_attention(
    weights: Weights,
    name: str,
    queries: Vectors,
    keys: Vectors,
    values: Vectors,
    num_heads: int,
    causal: bool,
) -> Vectors:
    """Section 3.2.2: every head attends on its own, `out_proj` mixes what they found."""
    parts = zip(
        split(queries, num_heads), split(keys, num_heads), split(values, num_heads), strict=True
    )
    heads = [attention(q, k, v, causal) for q, k, v in parts]
    outputs = zip(*heads, strict=True)  # for each position, what every head found
    return [linear(weights, f"{name}.out_proj", torch.cat(output)) for output in outputs]


def self_attention(
    weights: Weights, name: str, config: Config, states: Vectors, num_heads: int, causal: bool
) -> Vectors:
    """Every position of a sequence looks at the same sequence."""
    width = config.d_model
    queries, keys, values = [], [], []
    for state in states:
        projected = linear(weights, f"{name}.qkv_proj", state)
        queries.append(projected[:width])
        keys.append(projected[width : 2 * width])
        values.append(projected[2 * width :])
    return multi_head_attention(weights, name, queries, keys, values, num_heads, causal)


def cross_attention(
    weights: Weights, name: str, config: Config, states: Vectors, source: Vectors, num_heads: int
) -> Vectors:
    """Every target position looks at the encoder's whole output."""
    width = config.d_model
    queries = [linear(weights, f"{name}.q_proj", state) for state in states]
    keys, values = [], []
    for state in source:
        projected = linear(weights, f"{name}.kv_proj", state)
        keys.append(projected[:width])
        values.append(projected[width:])
    return multi_head_attention(weights, name, queries, keys, values, num_heads, causal=False)


def feed_forward(weights: Weights, layer: str, config: Config, states: Vectors) -> Vectors:
    """Section 3.3, equation (2): the same two maps at every position."""
    activation = ACTIVATIONS[config.activation_function]
    return [
        linear(weights, f"{layer}.fc2", activation(linear(weights, f"{layer}.fc1", state)))
        for state in states
    ]


def residual(
    weights: Weights,
    norm: str,
    config: Config,
    states: Vectors,
    sublayer: Callable[[Vectors], Vectors],
) -> Vectors:
    """Adds to every state what the sub-layer makes of the normalised states (pre-norm)."""
    normalised = [layer_norm(weights, norm, state, config.layer_norm_eps) for state in states]
    return [state + update for state, update in zip(states, sublayer(normalised), strict=True)]


def embed(weights: Weights, config: Config, ids: list[int]) -> Vectors:
    """Sections 3.4 and 3.5: sqrt(D) times the row of each id, plus its position from 0.

    Where padding is read as if it were a token, its row learns nothing from that: it may learn as
    a row of the output projection only.
    """
    scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
    states = []
    for position, token in enumerate(ids):
        row = weights["model.shared.weight"][token]
        if token == config.pad_token_id:
            row = row.detach()
        states.append(row * scale + sinusoid(position, config.d_model))
    return states


def encoder_layer(weights: Weights, layer: str, config: Config, states: Vectors) -> Vectors:
    """Looks around in the source, then thinks at every position alone."""

    def look_around(inputs: Vectors) -> Vectors:
        num_heads = config.encoder_attention_heads
        return self_attention(
            weights, f"{layer}.self_attn", config, inputs, num_heads, causal=False
        )

    def think(inputs: Vectors) -> Vectors:
        return feed_forward(weights, layer, config, inputs)

    states = residual(weights, f"{layer}.self_attn_layer_norm", config, states, look_around)
    return residual(weights, f"{layer}.final_layer_norm", config, states, think)


def decoder_layer(
    weights: Weights, layer: str, config: Config, states: Vectors, source: Vectors
) -> Vectors:
    """Looks back in the target, then across at the source, then thinks."""
    num_heads = config.decoder_attention_heads

    def look_back(inputs: Vectors) -> Vectors:
        return self_attention(weights, f"{layer}.self_attn", config, inputs, num_heads, causal=True)

    def look_across(inputs: Vectors) -> Vectors:
        name = f"{layer}.encoder_attn"
        return cross_attention(weights, name, config, inputs, source, num_heads)

    def think(inputs: Vectors) -> Vectors:
        return feed_forward(weights, layer, config, inputs)

    states = residual(weights, f"{layer}.self_attn_layer_norm", config, states, look_back)
    states = residual(weights, f"{layer}.encoder_attn_layer_norm", config, states, look_across)
    return residual(weights, f"{layer}.final_layer_norm", config, states, think)


def final_norm(weights: Weights, name: str, config: Config, states: Vectors) -> Vectors:
    """Normalises what leaves a pre-norm stack, whose layers only add."""
    return [layer_norm(weights, name, state, config.layer_norm_eps) for state in states]


def encode(weights: Weights, config: Config, source_ids: list[int]) -> Vectors:
    """Encoder stack: one state `[D]` for each token of one source sentence."""
    states = embed(weights, config, source_ids)
    for index in range(config.encoder_layers):
        states = encoder_layer(weights, f"model.encoder.layers.{index}", config, states)
    return final_norm(weights, "model.encoder.layer_norm", config, states)


def decode(weights: Weights, config: Config, target_ids: list[int], source: Vectors) -> Vectors:
    """Decoder stack: one state `[D]` for each token of one target sentence, given `encode`'s."""
    states = embed(weights, config, target_ids)
    for index in range(config.decoder_layers):
        states = decoder_layer(weights, f"model.decoder.layers.{index}", config, states, source)
    return final_norm(weights, "model.decoder.layer_norm", config, states)


def project(weights: Weights, config: Config, state: Tensor) -> Tensor:
    """Pre-softmax linear map of section 3.4: `[D]` -> `[V]`."""
    name = "model.shared.weight" if config.tie_word_embeddings else "lm_head.weight"
    return weights[name] @ state


def real_tokens(ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The sentences of a batch without their padding, wherever it stands."""
    if attention_mask is None:
        attention_mask = torch.ones_like(ids)
    return [row[mask.bool()].tolist() for row, mask in zip(ids, attention_mask, strict=True)]


def logits(
    weights: Weights,
    config: Config,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    decoder_input_ids: Tensor,
    decoder_attention_mask: Tensor | None = None,
) -> list[Tensor]:
    """Scores of the next token: for each sentence one tensor, real target tokens by V.

    Args:
        weights: Parameters by name, float64.
        config: Sizes and token ids.
        input_ids: Source ids, `[B, S]`.
        attention_mask: 1 for a real source token, 0 for padding, `[B, S]`; None means all real.
        decoder_input_ids: Target ids that the decoder reads, `[B, T]`.
        decoder_attention_mask: The same for the target, `[B, T]`.
    """
    sources = real_tokens(input_ids, attention_mask)
    targets = real_tokens(decoder_input_ids, decoder_attention_mask)
    scores = []
    for source_ids, target_ids in zip(sources, targets, strict=True):
        states = decode(weights, config, target_ids, encode(weights, config, source_ids))
        scores.append(torch.stack([project(weights, config, state) for state in states]))
    return scores


def shift_right(config: Config, labels: list[int]) -> list[int]:
    """What the decoder reads in order to predict `labels`: the start token, then all but the last.

    An ignored label has no token of its own, so padding stands in for it.
    """
    previous = [config.decoder_start_token_id, *labels[:-1]]
    return [config.pad_token_id if token == IGNORED_LABEL else token for token in previous]


def token_loss(scores: Tensor, label: int, label_smoothing: float) -> Tensor:
    """Cross-entropy in nats against 1 - e on the label plus e spread evenly over all V ids."""
    log_probabilities = scores - scores.exp().sum().log()
    expected = -(1 - label_smoothing) * log_probabilities[label]
    for log_probability in log_probabilities:
        expected = expected - label_smoothing / len(scores) * log_probability
    return expected


def loss(
    weights: Weights,
    config: Config,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: int | None = None,
) -> Tensor:
    """Sum of the real targets' losses, divided by their number or by `num_items_in_batch`."""
    decoder_input_ids = torch.tensor([shift_right(config, row) for row in labels.tolist()])
    scores = logits(weights, config, input_ids, attention_mask, decoder_input_ids)
    terms = [
        token_loss(row_scores[position], label, label_smoothing)
        for row_scores, row_labels in zip(scores, labels.tolist(), strict=True)
        for position, label in enumerate(row_labels)
        if label != IGNORED_LABEL
    ]
    count = len(terms) if num_items_in_batch is None else num_items_in_batch
    return torch.stack(terms).sum() / count


def greedy(
    weights: Weights,
    config: Config,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
) -> list[list[int]]:
    """Most probable next token, again and again from scratch, until `</s>` or the limit.

    Each sequence starts with the start token; `<pad>` and `<s>` are never chosen.
    """
    sequences = []
    for source_ids in real_tokens(input_ids, attention_mask):
        source = encode(weights, config, source_ids)
        target_ids = [config.decoder_start_token_id]
        while len(target_ids) <= max_new_tokens and target_ids[-1] != config.eos_token_id:
            state = decode(weights, config, target_ids, source)[-1]
            scores = project(weights, config, state).tolist()
            scores[config.pad_token_id] = scores[config.bos_token_id] = -math.inf
            target_ids.append(scores.index(max(scores)))
        sequences.append(target_ids)
    return sequences
