"""The decoder step by step computes what the model computes at once."""

import torch

from vanilla_transformer.decoding_vanilla_transformer import IncrementalDecoder

from ..conftest import Batch, Model, build_variant, each_variant

PROMPT = [[1, 6], [1, 25], [1, 9]]
FIRST = [[7, 8], [3, 4], [5, 33]]
SECOND = [[9, 5], [6, 6], [8, 4]]


def logits_at_once(model: Model, batch: Batch, targets: torch.Tensor) -> torch.Tensor:
    source = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**source, decoder_input_ids=targets, use_cache=False).logits[:, -1]


@each_variant
@torch.no_grad()
def test_steps_have_the_logits_of_the_model(batch, changes):
    model = build_variant(**changes)
    encoded = model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    decoding = IncrementalDecoder(model, encoded, batch["attention_mask"])
    prompt, first, second = (torch.tensor(tokens) for tokens in (PROMPT, FIRST, SECOND))

    logits = decoding.first_logits(prompt)
    both = decoding.next_logits(first, torch.zeros_like(first))
    # Each hypothesis continues from the other one.
    swapped = decoding.next_logits(second, torch.tensor([[1, 0]] * 3))

    torch.testing.assert_close(logits, logits_at_once(model, batch, prompt))
    for hypothesis in range(2):
        past = torch.cat((prompt, first[:, [hypothesis]]), dim=1)
        torch.testing.assert_close(both[:, hypothesis], logits_at_once(model, batch, past))
        continued = torch.cat((past, second[:, [1 - hypothesis]]), dim=1)
        expected = logits_at_once(model, batch, continued)
        torch.testing.assert_close(swapped[:, 1 - hypothesis], expected)
