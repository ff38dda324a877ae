"""A page that translates in the reader's browser: its own files, and transformers.js.

Tokenizers get a form to which transformers.js gives the ids of Python.
"""

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE, TOKENIZER_CONFIG_FILE

from vanilla_transformer_tools.files import (
    names_below,
    scratch_folder,
    write_lines,
)
from vanilla_transformer_tools.interop.to_transformers import name_general_tokenizers
from vanilla_transformer_tools.saved_folder import RESULTS_FILE, read_object, read_run
from vanilla_transformer_tools.settings import MAX_EXTRA_TOKENS
from vanilla_transformer_tools.text.tokenizer_pair import TokenizerPair, target_tags

MODEL_FOLDER, RUNTIME_FOLDER, FACTS_FILE = "model", "runtime", "page.json"
_PAGE = Path(__file__).with_name("web_page")
_TRANSFORMERS = "@huggingface/transformers@4.3.2"
# The release that this transformers.js is built with. Its smallest build computes on CPUs only.
_ONNXRUNTIME = "onnxruntime-web@1.31.0-dev.20260914-8d85527a0"
# Files in each package, and their SHA-256.
_RUNTIME = {
    _TRANSFORMERS: {
        "dist/transformers.web.min.js": (
            "ecaf2c7dce4bcbe882d1ec6e67c2f537720e0e47169e5f7e60f2c019fba91682"
        ),
        "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
    },
    _ONNXRUNTIME: {
        "dist/ort.wasm.bundle.min.mjs": (
            "17b52c1ac62b421dc508b4c28b9a9675251c6e25dd512ef54b83a5e2c4242869"
        ),
        "dist/ort-wasm-simd-threaded.wasm": (
            "06ba057753da3847e4c24f02d91ab133455b0817c69a44993a9a53a2146df9e3"
        ),
    },
}
_NPM_SECONDS = 600
# Of each part of a pipeline: the name of several steps, and the steps that transformers.js computes
# as the library does; others are left out there or approximate.
_STEPS = {
    "normalizer": ("normalizers", {"Replace", "NFC", "NFD", "NFKC", "NFKD"}),
    "pre_tokenizer": ("pretokenizers", {"Metaspace", "Split"}),
    "post_processor": ("processors", {"TemplateProcessing"}),
    "decoder": ("decoders", {"ByteFallback", "Fuse", "Strip"}),
}
_MODELS = ("BPE", "WordLevel")


def runtime(folder: Path) -> None:
    """Puts transformers.js and ONNX Runtime into `runtime/`, from npm or its cache.

    Raises:
        OSError: If npm is missing or fails.
        ValueError: If a package holds another file than the pinned release.
    """
    target = folder / RUNTIME_FOLDER
    target.mkdir()
    for package, pinned in _RUNTIME.items():
        with (
            scratch_folder(target, ".npm-") as scratch,
            tarfile.open(_npm_pack(package, scratch)) as archive,
        ):
            for path, digest in pinned.items():
                content = archive.extractfile(f"package/{path}").read()  # type: ignore[union-attr]
                if (found := sha256(content).hexdigest()) != digest:
                    raise ValueError(
                        f"{path} of {package} must have the SHA-256 {digest}, got {found}. Check "
                        "the registry that npm uses."
                    )
                (target / Path(path).name).write_bytes(content)


def _npm_pack(package: str, folder: Path) -> Path:
    """The archive of a package, which npm has compared with the registry's checksum."""
    needs = f"The page needs the npm package {package}"
    npm = shutil.which("npm")
    if npm is None:
        raise OSError(f"{needs}, and npm is not installed. Install Node.js, which brings it.")
    command = [npm, "pack", "--loglevel=error", "--ignore-scripts", "--prefer-offline"]
    command += ["--pack-destination", ".", package]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_NPM_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{needs}, and npm took more than {_NPM_SECONDS} seconds.") from error
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        said = " ".join(done.stderr.split()) or f"npm ended with status {done.returncode}"
        raise OSError(
            f"{needs}, and npm cannot download it: {said:.300}. Once it has been downloaded, npm "
            "keeps it."
        )
    return archives[0]


def write_page(folder: Path, name: str, model: PreTrainedModel, tokenizers: TokenizerPair) -> None:
    """Writes the page, and `page.json` with its texts and limits.

    Args:
        folder: Of the page, with the exported model.
        name: Name of the model.
        model: The exported one, as Python has it.
        tokenizers: Of the model.
    """
    shutil.copytree(_PAGE, folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
    run = read_run(model.name_or_path)
    settings = run.get("settings", {})
    weights = sum(file.stat().st_size for file in (folder / MODEL_FOLDER).rglob("*.onnx*"))
    numbers = sum(one.numel() for one in model.parameters())
    positions = model.config.max_position_embeddings
    form = tokenizers.target.init_kwargs.get("unicode_form")
    results_file = Path(model.name_or_path) / RESULTS_FILE
    results = read_object(results_file) if results_file.is_file() else {}
    content: dict[str, Any] = {
        "title": name,
        "languages": target_tags(tokenizers.source),
        "targetTokenizer": not tokenizers.is_joint,
        "composes": form in ("NFD", "NFKD"),
        "extraTokens": MAX_EXTRA_TOKENS,
        # The end and the start token take a place, too.
        "longestSource": min(settings.get("max_length") or positions, positions),
        "longestOutput": positions - 1,
        "facts": {
            "Languages": " → ".join(settings.get("language") or []),
            "Model": f"{numbers / 1e6:.1f} million parameters, {weights / 1e6:.1f} MB",
            **{
                # Of each test set that the folder of the model has results of.
                f"BLEU, {test}": f"{one['bleu']:.1f} ({one.get('search', '')}, before the export)"
                for test, one in results.items()
                if "bleu" in one
            },
            "Licence": settings.get("license"),
        },
        "exported": names_below(folder),
    }
    content["facts"] = {label: text for label, text in content["facts"].items() if text}
    write_lines(folder / FACTS_FILE, [json.dumps(content, indent=2, ensure_ascii=False)])


def fit_transformers_js(folder: Path) -> None:
    """Rewrites the tokenizers of a folder; Python still gets the same ids from them.

    transformers.js takes text that spells a special token for the token, and has no
    `split_special_tokens`. So special tokens leave the list that it searches text for: they remain
    in the vocabulary, where the pipeline keeps text from becoming one.

    Raises:
        ValueError: If transformers.js gives other ids; the files then stay as they are.
    """
    if not (folder / FULL_TOKENIZER_FILE).is_file():
        raise ValueError(
            f"transformers.js needs a fast tokenizer, got none: {FULL_TOKENIZER_FILE}."
        )
    rewritten: dict[Path, dict[str, Any]] = {}
    for file in sorted(folder.rglob(FULL_TOKENIZER_FILE)):
        pipeline = read_object(file)
        config_file = file.with_name(TOKENIZER_CONFIG_FILE)
        config = read_object(config_file)
        faults = list(_faults(pipeline, config))
        if faults:
            raise ValueError(
                f"transformers.js would give other ids than the tokenizer {file.name}:\n"
                + "\n".join(faults)
            )
        for step in _steps(pipeline, "pre_tokenizer"):
            # There, splitting at a string would keep the string.
            if "String" in step.get("pattern", {}):
                step["pattern"] = {"Regex": re.escape(step["pattern"]["String"])}
        special = {token["content"]: token["id"] for token in pipeline["added_tokens"]}
        pipeline["model"]["vocab"] |= special
        pipeline["added_tokens"] = []
        # What decoding leaves out.
        config["additional_special_tokens"] = list(special)
        rewritten |= {file: pipeline, config_file: config}
    for file, content in rewritten.items():
        write_lines(file, [json.dumps(content, ensure_ascii=False)])
    name_general_tokenizers(folder)


def _steps(pipeline: dict[str, Any], part: str) -> list[dict[str, Any]]:
    step = pipeline.get(part)
    name, _ = _STEPS[part]
    steps: list[dict[str, Any]] = step.get(name, [step]) if step else []
    return steps


def _faults(pipeline: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    model = pipeline["model"]
    if model["type"] not in _MODELS:
        yield (
            f"The model must be one of {', '.join(_MODELS)}, got {model['type']}, which has no "
            "byte fallback there. Train with --tokenizer_kind bpe, word or char."
        )
    for part, (_, known) in _STEPS.items():
        if others := sorted({step["type"] for step in _steps(pipeline, part)} - known):
            yield f"The {part} must consist of {', '.join(sorted(known))}, got {', '.join(others)}."
    if not config.get("split_special_tokens"):
        yield "It must be one that this package trained, with `split_special_tokens`."
    if added := [one["content"] for one in pipeline["added_tokens"] if not one["special"]]:
        yield (
            f"It must have no added tokens that are not special, got {', '.join(added[:3])}: text "
            "after them would begin with a blank."
        )
