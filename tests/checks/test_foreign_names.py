"""`checks/foreign_names.py`: names of other libraries that the plug-in touches."""

import sys

import pytest

from foreign_names import touched_names
from private_names import REASONS


def test_each_private_name_has_a_reason():
    private = {touched.name for touched in touched_names() if touched.door == "private"}

    assert private == REASONS.keys()
    assert all(REASONS.values())


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that touches names in every way that is looked for."""
    code = '''
import torch
from torch import nn
from transformers import PreTrainedModel, initialization as init
from transformers.generation import GenerationMixin, LogitsProcessor
from transformers.masking_utils import create_causal_mask

class Own(PreTrainedModel, GenerationMixin):
    _no_split_modules = []
    own_attribute = 1

    def _sample(self, config, cache):
        self._own_private = cache.get_seq_length()
        self._auto_class = torch._dynamo.maybe_mark_dynamic
        torch.cuda.is_available()
        nn.Linear(2, 3)
        init.copy_(self.own_attribute)
        return GenerationMixin._beam_search(self, getattr(config, "_attn_implementation"))

    def _reorder_cache(self):
        """Transformers calls it and has none."""
'''
    folder = tmp_path / "touching"
    folder.mkdir()
    (folder / "__init__.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "touching"
    sys.modules.pop("touching", None)


def test_names_are_found_however_they_are_touched(package):
    private = {
        (touched.name, touched.how)
        for touched in touched_names(package)
        if touched.door == "private"
    }

    assert private == {
        ("*._attn_implementation", "used"),
        ("GenerationMixin._reorder_cache", "overridden"),
        ("GenerationMixin._sample", "overridden"),
        ("PreTrainedModel._auto_class", "used"),
        ("PreTrainedModel._no_split_modules", "overridden"),
        ("torch._dynamo.maybe_mark_dynamic", "imported"),
        ("transformers.generation.GenerationMixin._beam_search", "imported"),
    }
