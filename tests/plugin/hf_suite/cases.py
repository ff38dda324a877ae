"""Transformers' common tests on our classes; `tests/plugin/test_hf_suite.py` runs this file.

The common tests lie in `$HF_TESTS`, the folder `tests` of Transformers' source distribution. It
leaves out three modules that they import, and empty ones stand in for those: what they test,
decoding and export, is tested by ourselves.
"""

import os
import sys
import tempfile
import unittest
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from transformers import set_seed
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
)

TESTS = Path(os.environ["HF_TESTS"])
MISSING = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    # Fields of every config, with values that are nobody's default.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "architectures": ["Anything"],
            "chunk_size_feed_forward": 2,
            "dtype": "float16",
            "id2label": {0: "yes", 1: "no", 2: "maybe"},
            "label2id": {"yes": 0, "no": 1, "maybe": 2},
            "output_attentions": True,
            "output_hidden_states": True,
            "problem_type": "multi_label_classification",
            "return_dict": False,
        }
    },
}
CORPUS = [
    "This is a test of the tokenizer, with words, 12 numbers and signs!",
    "The lower, the newer, the wider: he is very happy and running.",
    "Ein kleiner Test für die Welt, in der wir leben.",
] * 20


def import_common_tests(name: str) -> ModuleType:
    """Imports a module of `TESTS`, as one of a package of another name than our own tests have."""
    if "hf_tests" not in sys.modules:
        package = sys.modules["hf_tests"] = ModuleType("hf_tests")
        package.__path__ = [str(TESTS)]
        for missing, names in MISSING.items():
            module = sys.modules[f"hf_tests.{missing}"] = ModuleType(f"hf_tests.{missing}")
            vars(module).update(names)
    return import_module(f"hf_tests.{name}")


modeling = import_common_tests("test_modeling_common")
configuration = import_common_tests("test_configuration_common")
tokenization = import_common_tests("test_tokenization_common")

# The tests look up the kind of a class by its name in these tables, registered or not.
modeling_auto.MODEL_MAPPING_NAMES["vanilla_transformer"] = "VanillaTransformerModel"
modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["vanilla_transformer"] = (
    "VanillaTransformerForConditionalGeneration"
)


class TinyInputs:
    """What the common tests ask for: a config, inputs that fit it, and their sizes."""

    is_training = True
    batch_size = 3
    encoder_seq_length = 7
    decoder_seq_length = seq_length = 5
    hidden_size = 16
    num_hidden_layers = 2
    num_attention_heads = 4
    sizes = {  # noqa: RUF012
        "vocab_size": 99,
        "d_model": hidden_size,
        "encoder_layers": num_hidden_layers,
        "decoder_layers": num_hidden_layers,
        "encoder_attention_heads": num_attention_heads,
        "decoder_attention_heads": num_attention_heads,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 20,
    }

    def get_config(self) -> VanillaTransformerConfig:
        return VanillaTransformerConfig(**self.sizes)

    def prepare_config_and_inputs_for_common(
        self,
    ) -> tuple[VanillaTransformerConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        inputs = {}
        for prefix, length in (
            ("", self.encoder_seq_length),
            ("decoder_", self.decoder_seq_length),
        ):
            # No special tokens: ids 0 to 3.
            shape = (self.batch_size, length)
            input_ids = torch.randint(4, config.vocab_size, shape, device=torch_device)
            inputs[f"{prefix}input_ids"] = input_ids
            inputs[f"{prefix}attention_mask"] = torch.ones_like(input_ids)
        return config, inputs


class ModelTest(modeling.ModelTesterMixin, modeling.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (VanillaTransformerModel, VanillaTransformerForConditionalGeneration)
    is_encoder_decoder = True
    # Left out, as for a model of before 2023, unless it is asked for.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        set_seed(0)
        self.model_tester = TinyInputs()

    def test_config(self) -> None:
        configuration.ConfigTester(
            self, VanillaTransformerConfig, **TinyInputs.sizes
        ).run_common_tests()

    @unittest.skip("either name of the cache is taken, without a warning")
    def test_bc_cache_name_forward(self) -> None: ...


class TrainedTokenizer:
    """Gives the tokenizer tests a folder to load from."""

    tokenizer_class = VanillaTransformerTokenizer

    @classmethod
    def setUpClass(cls) -> None:
        cls.from_pretrained_id = cls.enterClassContext(tempfile.TemporaryDirectory())
        tokenizer = VanillaTransformerTokenizer.train(CORPUS, vocab_size=400)
        tokenizer.save_pretrained(cls.from_pretrained_id)
        super().setUpClass()


class TokenizerTest(TrainedTokenizer, tokenization.TokenizerTesterMixin, unittest.TestCase):
    # It asks for a class that builds its pipeline from a vocabulary; ours has no `__init__`.
    test_tokenizer_from_extractor = False

    @unittest.skip("text that spells a special token is plain text to us")
    def test_tokenize_special_tokens(self) -> None: ...


class TokenizersBackendTest(
    TrainedTokenizer, tokenization.TokenizersBackendTesterMixin, unittest.TestCase
):
    pass
