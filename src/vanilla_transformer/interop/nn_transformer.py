"""A translation model around torch.nn.Transformer; this file needs torch and safetensors only.

Exports have a copy of it beside their weights:

```python
from nn_transformer import load

model = load("runs/de-en-torch")
logits = model(input_ids, attention_mask, decoder_input_ids)
```
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class Model(nn.Module):
    """Tables of tokens and positions, torch.nn.Transformer, and a projection onto tokens.

    Args:
        settings: As in `config.json`; `transformer` has the arguments of torch.nn.Transformer.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # That nested tensors are not used.
            warnings.simplefilter("ignore")
            self.transformer = nn.Transformer(**settings["transformer"], batch_first=True)
        self.transformer.encoder.enable_nested_tensor = False
        if not settings["final_norm"]:
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        width = settings["transformer"]["d_model"]
        self.scale = settings["embedding_scale"]
        self.src_embedding = nn.Embedding(settings["src_vocab_size"], width)
        self.tgt_embedding = nn.Embedding(settings["tgt_vocab_size"], width)
        self.src_positions = nn.Embedding(settings["longest"], width)
        self.tgt_positions = nn.Embedding(settings["longest"], width)
        self.generator = nn.Linear(width, settings["tgt_vocab_size"], settings["generator_bias"])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor
    ) -> Tensor:
        """Logits of the next target tokens, `[B, T, V]`.

        Args:
            input_ids: Sources, `[B, S]`, padded on the right.
            attention_mask: 1 = real token, `[B, S]`.
            decoder_input_ids: Targets after the start token, `[B, T]`.

        Raises:
            ValueError: If S or T is more than `longest` of `config.json`.
        """
        is_padding = attention_mask == 0
        length = decoder_input_ids.shape[1]
        hidden_states = self.transformer(
            self._embed(input_ids, self.src_embedding, self.src_positions),
            self._embed(decoder_input_ids, self.tgt_embedding, self.tgt_positions),
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1),
            src_key_padding_mask=is_padding,
            memory_key_padding_mask=is_padding,
        )
        logits: Tensor = self.generator(hidden_states)
        return logits

    def _embed(self, tokens: Tensor, table: nn.Embedding, positions: nn.Embedding) -> Tensor:
        length, longest = tokens.shape[1], len(positions.weight)
        if length > longest:
            raise ValueError(f"Sequences must have at most {longest} tokens, got {length}.")
        embedded: Tensor = table(tokens) * self.scale + positions.weight[:length]
        return embedded


def load(folder: str | Path) -> Model:
    """The model of a folder, in evaluation mode and in the dtype of its file."""
    settings = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = Model(settings)
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"), assign=True)
    return model.eval()
