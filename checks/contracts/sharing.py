"""Saved folders, configs and tokenizers."""

import logging
import os
import subprocess
import sys
import warnings
from logging.handlers import BufferingHandler
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_warning

from neighbours import FAMILIES

from .candidate import Candidate, assert_close, contract, labels, pairs


@contract("Saving")
def saves_tied_tensors_once(candidate: Candidate) -> None:
    """The table that embeddings and projection share is in the file once, and loads tied."""
    loaded = candidate.reload(candidate.build())
    shapes = [
        tuple(saved.shape) for saved in load_file(candidate.folder / "model.safetensors").values()
    ]
    assert shapes.count((37, 24)) == 1, f"{shapes.count((37, 24))} times"
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight, "untied"


@contract("Saving")
def untied_projection_survives(candidate: Candidate) -> None:
    """`tie_word_embeddings=False` frees the projection; encoder and decoder still share."""
    model = candidate.build(tie_word_embeddings=False)
    loaded = candidate.reload(model)
    assert_close(loaded(**pairs()).logits, model(**pairs()).logits)
    source_table, target_table, projection = (
        module.weight
        for module in (
            loaded.get_encoder().get_input_embeddings(),
            loaded.get_decoder().get_input_embeddings(),
            loaded.get_output_embeddings(),
        )
    )
    assert projection is not source_table, "the projection is tied"
    assert target_table is source_table, "encoder and decoder get a table each"


@contract("Saving")
def resizes(candidate: Candidate) -> None:
    """`resize_token_embeddings(41, pad_to_multiple_of=8)` keeps ties, loss and old logits."""
    model = candidate.build()
    before = model(**pairs()).logits
    model.resize_token_embeddings(41, pad_to_multiple_of=8)
    assert_close(model(**pairs(), labels=labels()).logits[..., :37], before)
    loaded = candidate.reload(model)
    assert loaded.config.vocab_size == 48, f"the config says {loaded.config.vocab_size}"
    assert_close(loaded(**pairs()).logits[..., :37], before)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight, "untied"


LOAD = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
torch.save(model(**torch.load(sys.argv[1] + "/pairs.pt")).logits, sys.argv[1] + "/logits.pt")
"""


@contract("Saving")
def loads_elsewhere(candidate: Candidate) -> None:
    """A saved folder loads with `AutoModelForSeq2SeqLM` where only Transformers is imported."""
    model = candidate.build()
    model.save_pretrained(candidate.folder)
    torch.save(pairs(), candidate.folder / "pairs.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(candidate.folder)}
    command = [sys.executable, "-c", LOAD, str(candidate.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip().split("\n")[-1]
    assert_close(torch.load(candidate.folder / "logits.pt"), model(**pairs()).logits)


def fault_of(candidate: Candidate, **fields: Any) -> str:
    """What building a model says of these fields; empty if it takes them."""
    try:
        candidate.build(**fields)
    except Exception as error:
        return str(error)
    return ""


@contract("Config")
def refuses_wrong_types(candidate: Candidate) -> None:
    """A field of the wrong type is refused by name."""
    for field, value in (("vocab_size", "37"), ("d_model", 24.5), ("dropout", "much")):
        assert field in fault_of(candidate, **{field: value}), f"{field}={value!r} is taken"


@contract("Config")
def lists_all_faults(candidate: Candidate) -> None:
    """Values that cannot work are refused, all of them in one message."""
    wrong = {"encoder_attention_heads": 5, "dropout": 1.5, "pad_token_id": 99, "encoder_layers": -1}
    message = fault_of(candidate, **wrong)
    named = sum(field in message for field in wrong)
    assert named == len(wrong), f"names {named} of {len(wrong)}, says {message!r}"


@contract("Config")
def reports_misspelt_fields(candidate: Candidate) -> None:
    """A misspelt field is reported."""
    records = BufferingHandler(capacity=1000)
    loggers = logging.getLogger(), logging.getLogger("transformers")
    verbosity = get_verbosity()
    set_verbosity_warning()
    for logger in loggers:
        logger.addHandler(records)
    try:
        with warnings.catch_warnings(record=True) as caught:
            said = [fault_of(candidate, droput=0.3), *map(str, caught)]
    finally:
        set_verbosity(verbosity)
        for logger in loggers:
            logger.removeHandler(records)
    said += [record.getMessage() for record in records.buffer]
    assert "droput" in " ".join(said), "droput=0.3 is accepted silently"


@contract("Tokenizer")
def trains_a_tokenizer(candidate: Candidate) -> None:
    """The family's tokenizer learns from text in one call and loads with `AutoTokenizer`."""
    tokenizer_class = TOKENIZER_MAPPING[FAMILIES[candidate.family][0]]
    assert hasattr(tokenizer_class, "train"), "its class has no method that trains it"
    lines = ["Ein Hund rennt.", "Zwei Hunde rennen."]
    tokenizer_class.train(lines, vocab_size=300).save_pretrained(candidate.folder)
    tokenizer = AutoTokenizer.from_pretrained(candidate.folder)
    ids = tokenizer(lines[0]).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == lines[0], "text is altered"
