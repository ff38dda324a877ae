"""A folder saved with one release of Transformers is read by another; `make test-all` runs this.

`$OTHER_PYTHON` names the interpreter of an environment that has the other release.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TEXTS = ["Ein Hund rennt.", "Zwei alte Männer schlafen im Garten.", "Ja"]

SAVE = """
import json
import sys
from pathlib import Path

import torch

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)

folder, *texts = sys.argv[1:]
tokenizer = VanillaTransformerTokenizer.train(texts, vocab_size=300)
config = VanillaTransformerConfig(
    vocab_size=len(tokenizer),
    d_model=24,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=4,
    encoder_ffn_dim=28,
    decoder_ffn_dim=36,
)
torch.manual_seed(0)
model = VanillaTransformerForConditionalGeneration(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
model.generation_config.num_beams = 3
model.save_pretrained(folder, max_shard_size="20KB")
tokenizer.save_pretrained(folder)
"""

# `absent` hides the package, so that the code in the folder is all there is.
READ = """
import json
import sys

way, folder, *texts = sys.argv[1:]
if way == "absent":
    sys.modules["vanilla_transformer"] = sys.modules["vanilla_transformer_tools"] = None
else:
    import vanilla_transformer

import transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

trust = way == "absent"
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=trust)
inputs = tokenizer(texts, return_tensors="pt", padding=True)
generated = model.generate(**inputs, max_new_tokens=9)
print(
    json.dumps(
        {
            "release": transformers.__version__,
            "config": {
                name: value
                for name, value in model.config.to_dict().items()
                if name not in ("transformers_version", "_name_or_path")
            },
            "input_ids": inputs["input_ids"].tolist(),
            "generated": generated.tolist(),
            "text": tokenizer.batch_decode(generated, skip_special_tokens=True),
            "loss": model(**inputs, labels=inputs["input_ids"]).loss.item(),
        }
    )
)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "OTHER_PYTHON" not in os.environ, reason="$OTHER_PYTHON names no second environment"
    ),
]


def run(python: str, code: str, *arguments: str | Path) -> str:
    finished = subprocess.run(
        [python, "-c", code, *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.parametrize("way", ["imported", "absent"])
@pytest.mark.parametrize("saver", ["this", "other"])
def test_folder_reads_the_same_in_both_releases(tmp_path, saver, way):
    this, other = sys.executable, os.environ["OTHER_PYTHON"]
    folder = tmp_path / "saved"
    run(this if saver == "this" else other, SAVE, folder, *TEXTS)

    of_this, of_other = (
        json.loads(run(python, READ, way, folder, *TEXTS)) for python in (this, other)
    )

    assert of_this.pop("release") != of_other.pop("release")
    assert of_this.pop("loss") == pytest.approx(of_other.pop("loss"), rel=1e-5)
    assert of_this == of_other
