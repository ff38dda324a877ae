"""Models of a page: small, with random weights."""

import pytest

from vanilla_transformer_tools.page.page import Page
from vanilla_transformer_tools.page.served_model import ServedModel
from vanilla_transformer_tools.translation import Translator

from ..models import build_variant


@pytest.fixture
def model(tokenizer):
    return ServedModel("runs/one", Translator(build_variant(), tokenizer))


@pytest.fixture
def page(tokenizer, model):
    """Two models with other weights."""
    other = ServedModel("runs/two", Translator(build_variant(pre_norm=False), tokenizer))
    return Page({"one": model, "two": other}, {"one": ["ja", "nein"], "two": []})
