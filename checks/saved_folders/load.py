"""Loads folders of `save.py`, and prints as JSON Transformers' release and what each computes.

`load.py package FOLDER...` uses the package, `load.py remote FOLDER...` the code in each folder.
"""

import json
import sys
from typing import Any

from save import results

way, *folders = sys.argv[1:]
if way == "package":
    import vanilla_transformer  # noqa: F401  (registers the classes)
else:
    hidden: dict[str, Any] = dict.fromkeys(("vanilla_transformer", "vanilla_transformer_tools"))
    sys.modules.update(hidden)

import transformers  # noqa: E402
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402

options = {} if way == "package" else {"trust_remote_code": True}
found: list[Any] = [transformers.__version__]
for folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, **options).eval()
    found.append(results(model, tokenizer))
print(json.dumps(found))
