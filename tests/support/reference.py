"""Slow oracle of the model: the paper's equations in float64, one sentence and one position a time.

It shares nothing with the package and reads like the paper: a sequence is a Python list with one
vector per position, and every sentence is computed alone, without any padding. So there are no
masks and no batch axis here that could be wrong, and a model that agrees with it treats padding,
positions and the future as promised. Tensors serve as arrays whose elementary operations
`torch.autograd` can differentiate; every formula above them is written out.

Weights are a dictionary with the names of the model's state dict, and a part of the model is called
by its name there. Letters of shapes: D `d_model`, H heads, E head size (d_k or d_v), K key
positions, V vocabulary, B batch, S source, T target.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100

Weights = Mapping[str, Tensor]
Vectors = list[Tensor]  # one for each position, or for each head
Config = Any  # the model's configuration


def leaves(state_dict: Weights) -> dict[str, Tensor]:
    """Copies weights to float64 tensors that collect their own gradients."""
    return {
        name: tensor.detach().to(torch.float64, copy=True).requires_grad_()
        for name, tensor in state_dict.items()
    }


def sinusoid(
    position: float, d_model: int, base: float = 10000, concatenated: bool = False
) -> Tensor:
    """Positional encoding of section 3.5: sine in even columns, cosine in odd ones, `[D]`.

    If `concatenated`, all sines are in the first half of the columns, all cosines in the second.
    """
    pairs = []
    for pair in range(d_model // 2):
        angle = position / base ** (2 * pair / d_model)
        pairs.append((math.sin(angle), math.cos(angle)))
    if concatenated:
        encoding = [sine for sine, _ in pairs] + [cosine for _, cosine in pairs]
    else:
        encoding = [number for pair in pairs for number in pair]
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


def linear(weights: Weights, name: str, vector: Tensor, bias: bool = True) -> Tensor:
    """Affine map Wx + b of the module called `name`, or Wx without the bias."""
    product = weights[f"{name}.weight"] @ vector
    return product + weights[f"{name}.bias"] if bias else product


def layer_norm(weights: Weights, name: str, vector: Tensor, eps: float) -> Tensor:
    """Layer normalisation (arXiv 1607.06450): zero mean, unit variance, then gain and bias."""
    mean = vector.sum() / len(vector)
    variance = ((vector - mean) ** 2).sum() / len(vector)
    normalised = (vector - mean) / torch.sqrt(variance + eps)
    return weights[f"{name}.weight"] * normalised + weights[f"{name}.bias"]


def rms_norm(weights: Weights, name: str, vector: Tensor, eps: float) -> Tensor:
    """RMS normalisation (arXiv 1910.07467, equation 4): a mean square of 1, then gain."""
    mean_square = (vector**2).sum() / len(vector)
    return weights[f"{name}.weight"] * vector / torch.sqrt(mean_square + eps)


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}


def num_heads(name: str, config: Config) -> int:
    """Number H of softmax maps of the attention called `name`: that of its stack."""
    in_encoder = name.startswith("model.encoder.")
    return config.encoder_attention_heads if in_encoder else config.decoder_attention_heads


def key_rows(name: str, config: Config) -> tuple[int, int]:
    """Heads of queries and keys, and the size d_k of each (section 3.2.2: d_k = D / H)."""
    heads = num_heads(name, config) if config.key_heads is None else config.key_heads
    return heads, config.d_model // heads if config.d_k is None else config.d_k


def value_rows(name: str, config: Config) -> tuple[int, int]:
    """Heads of values, and the size d_v of each."""
    heads = num_heads(name, config) if config.value_heads is None else config.value_heads
    return heads, config.d_model // heads if config.d_v is None else config.d_v


def split(vector: Tensor, heads: int, size: int) -> Vectors:
    """Cuts a vector into as many neighbouring pieces of one size."""
    assert len(vector) == heads * size
    return [vector[head * size : (head + 1) * size] for head in range(heads)]


def projections(
    weights: Weights, name: str, config: Config, states: Vectors, source: Vectors | None = None
) -> tuple[list[Vectors], list[Vectors], list[Vectors]]:
    """Queries, keys and values: at each position one vector `[E]` for each head.

    Keys and values are those of the source's states, if there are any, or of the same states.
    """
    key_heads, d_k = key_rows(name, config)
    width = key_heads * d_k
    first, second = ("qkv_proj", "qkv_proj") if source is None else ("q_proj", "kv_proj")
    queries, keys, values = [], [], []
    for state in states:
        projected = linear(weights, f"{name}.{first}", state, config.attention_bias)
        queries.append(split(projected[:width], key_heads, d_k))
    for state in states if source is None else source:
        projected = linear(weights, f"{name}.{second}", state, config.attention_bias)
        if source is None:
            projected = projected[width:]
        keys.append(split(projected[:width], key_heads, d_k))
        values.append(split(projected[width:], *value_rows(name, config)))
    if source is None:
        queries, keys = turned(config, queries), turned(config, keys)
    return queries, keys, values


def rotation(position: int, size: int, base: float) -> Tensor:
    """The matrix of RoFormer (arXiv 2104.09864, equation 15) for one position, `[E, E]`.

    On its diagonal are matrices of two by two, each of which turns a plane by its own angle.
    """
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for pair in range(size // 2):
        angle = position / base ** (2 * pair / size)
        one, two = 2 * pair, 2 * pair + 1
        matrix[one, one] = matrix[two, two] = math.cos(angle)
        matrix[one, two], matrix[two, one] = -math.sin(angle), math.sin(angle)
    return matrix


def turned(config: Config, vectors: list[Vectors]) -> list[Vectors]:
    """Queries or keys of self-attention, turned by their positions if these are rotary."""
    if config.position_embedding_type != "rotary":
        return vectors
    return [
        [rotation(position, len(head), config.position_base) @ head for head in heads]
        for position, heads in enumerate(vectors)
    ]


def mix(weights: Weights, name: str, maps: Vectors) -> Vectors:
    """Talking heads (arXiv 2003.02436): every new map `[K]` is a weighted sum of all the maps."""
    mixed = []
    for shares in weights[f"{name}.weight"]:
        terms = [share * one_map for share, one_map in zip(shares, maps, strict=True)]
        mixed.append(torch.stack(terms).sum(dim=0))
    return mixed


def attention_weights(
    weights: Weights, name: str, config: Config, query: Vectors, keys: list[Vectors]
) -> Vectors:
    """How much one position takes of each value, equation (1): `[K]` for each head of values.

    The `query` has one vector `[E]` for each head; so have the `keys` of every visible position.
    """
    maps = []
    for head, asked in enumerate(query):
        scores = [(asked * key[head]).sum() / math.sqrt(len(asked)) for key in keys]
        maps.append(torch.stack(scores))
    if config.talking_heads in ("logits", "both"):
        maps = mix(weights, f"{name}.logits_mixing", maps)
    assert len(maps) == num_heads(name, config)
    maps = [softmax(one_map) for one_map in maps]
    if config.talking_heads in ("weights", "both"):
        maps = mix(weights, f"{name}.weights_mixing", maps)
    return maps


def multi_head_attention(
    weights: Weights,
    name: str,
    config: Config,
    queries: list[Vectors],
    keys: list[Vectors],
    values: list[Vectors],
    causal: bool,
) -> Vectors:
    """Section 3.2.2: what every head takes of the values, brought together by `out_proj`.

    At each position there is one vector `[E]` for each head. If `causal`, a query sees only the
    keys up to its own position.
    """
    outputs = []
    for position, query in enumerate(queries):
        visible = position + 1 if causal else len(keys)
        found = []
        for head, taken in enumerate(
            attention_weights(weights, name, config, query, keys[:visible])
        ):
            terms = [
                share * value[head] for share, value in zip(taken, values[:visible], strict=True)
            ]
            found.append(torch.stack(terms).sum(dim=0))
        joined = torch.cat(found)
        outputs.append(linear(weights, f"{name}.out_proj", joined, config.attention_bias))
    return outputs


def feed_forward(weights: Weights, layer: str, config: Config, states: Vectors) -> Vectors:
    """Section 3.3, equation (2): the same two maps at every position."""
    activation = ACTIVATIONS[config.activation_function]
    return [
        linear(weights, f"{layer}.fc2", activation(linear(weights, f"{layer}.fc1", state)))
        for state in states
    ]


def normalise(weights: Weights, name: str, config: Config, states: Vectors) -> Vectors:
    """Norm of every state."""
    norm = NORMS[config.norm_type]
    return [norm(weights, name, state, config.layer_norm_eps) for state in states]


def residual(
    weights: Weights,
    norm: str,
    config: Config,
    states: Vectors,
    sublayer: Callable[[Vectors], Vectors],
) -> Vectors:
    """Adds to every state what the sub-layer makes of the states, section 3.1.

    Pre-norm: x + Sublayer(LayerNorm(x)). Post-norm, figure 1: LayerNorm(x + Sublayer(x)).
    """
    inputs = normalise(weights, norm, config, states) if config.pre_norm else states
    sums = [state + update for state, update in zip(states, sublayer(inputs), strict=True)]
    return sums if config.pre_norm else normalise(weights, norm, config, sums)


def encode_position(weights: Weights, stack: str, config: Config, index: int) -> Tensor:
    """What is added to the token at `index`, counted from 0, of a stack's input: `[D]`."""
    if config.position_embedding_type == "rotary":
        return torch.zeros(config.d_model, dtype=torch.float64)
    position = index + config.position_offset
    if config.position_embedding_type == "learned":
        return weights[f"{stack}.embed_positions.weight"][position]
    layouts = {"sinusoidal": False, "sinusoidal_concatenated": True}
    concatenated = layouts[config.position_embedding_type]
    return sinusoid(position, config.d_model, config.position_base, concatenated)


def table(stack: str, config: Config) -> str:
    """Name of the weights whose rows embed the tokens of a stack."""
    shared = config.share_encoder_decoder_embeddings
    return "model.shared.weight" if shared else f"{stack}.embed_tokens.weight"


def embed(weights: Weights, stack: str, config: Config, ids: list[int]) -> Vectors:
    """Sections 3.4 and 3.5: sqrt(D) times the row of each id, plus its position.

    Where padding is read as if it were a token, its row learns nothing from that: it may learn as
    a row of the output projection only.
    """
    scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
    states = []
    for index, token in enumerate(ids):
        row = weights[table(stack, config)][token]
        if token == config.pad_token_id:
            row = row.detach()
        states.append(row * scale + encode_position(weights, stack, config, index))
    if config.embedding_layer_norm:
        states = normalise(weights, f"{stack}.embed_layer_norm", config, states)
    return states


def encoder_layer(weights: Weights, layer: str, config: Config, states: Vectors) -> Vectors:
    """Looks around in the source, then thinks at every position alone."""

    def look_around(inputs: Vectors) -> Vectors:
        name = f"{layer}.self_attn"
        projected = projections(weights, name, config, inputs)
        return multi_head_attention(weights, name, config, *projected, causal=False)

    def think(inputs: Vectors) -> Vectors:
        return feed_forward(weights, layer, config, inputs)

    states = residual(weights, f"{layer}.self_attn_layer_norm", config, states, look_around)
    return residual(weights, f"{layer}.final_layer_norm", config, states, think)


def decoder_layer(
    weights: Weights, layer: str, config: Config, states: Vectors, source: Vectors
) -> Vectors:
    """Looks back in the target, then across at the source, then thinks."""

    def look_back(inputs: Vectors) -> Vectors:
        name = f"{layer}.self_attn"
        projected = projections(weights, name, config, inputs)
        return multi_head_attention(weights, name, config, *projected, causal=True)

    def look_across(inputs: Vectors) -> Vectors:
        name = f"{layer}.encoder_attn"
        projected = projections(weights, name, config, inputs, source)
        return multi_head_attention(weights, name, config, *projected, causal=False)

    def think(inputs: Vectors) -> Vectors:
        return feed_forward(weights, layer, config, inputs)

    states = residual(weights, f"{layer}.self_attn_layer_norm", config, states, look_back)
    states = residual(weights, f"{layer}.encoder_attn_layer_norm", config, states, look_across)
    return residual(weights, f"{layer}.final_layer_norm", config, states, think)


def close(weights: Weights, stack: str, config: Config, states: Vectors) -> Vectors:
    """Normalises what leaves a pre-norm stack, whose layers only add, unless told otherwise."""
    chosen = config.add_final_layer_norm
    has_norm = config.pre_norm if chosen is None else chosen
    return normalise(weights, f"{stack}.layer_norm", config, states) if has_norm else states


def encode(weights: Weights, config: Config, source_ids: list[int]) -> Vectors:
    """Encoder stack: one state `[D]` for each token of one source sentence."""
    states = embed(weights, "model.encoder", config, source_ids)
    for index in range(config.encoder_layers):
        states = encoder_layer(weights, f"model.encoder.layers.{index}", config, states)
    return close(weights, "model.encoder", config, states)


def decode(weights: Weights, config: Config, target_ids: list[int], source: Vectors) -> Vectors:
    """Decoder stack: one state `[D]` for each token of one target sentence, given `encode`'s."""
    states = embed(weights, "model.decoder", config, target_ids)
    for index in range(config.decoder_layers):
        states = decoder_layer(weights, f"model.decoder.layers.{index}", config, states, source)
    return close(weights, "model.decoder", config, states)


def project(weights: Weights, config: Config, state: Tensor) -> Tensor:
    """Pre-softmax linear map of section 3.4: `[D]` -> `[V]`."""
    tied = config.tie_word_embeddings
    scores = weights[table("model.decoder", config) if tied else "lm_head.weight"] @ state
    return scores + weights["lm_head.bias"] if config.lm_head_bias else scores


def real_tokens(ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The sentences of a batch without their padding, wherever it is."""
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

    Source ids are `[B, S]`, target ids `[B, T]`; masks are 1 for real tokens, None if all are.
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
