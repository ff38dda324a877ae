"""Scores a model on a test set, with metrics of the library evaluate.

    python examples/evaluate_model.py --model runs/demo --test test.de test.en

BLEU and chrF are those of `score`, a function of this package that downloads nothing.
"""

import argparse
import json

import evaluate
import torch
from datasets import load_dataset
from tqdm import trange
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import vanilla_transformer  # noqa: F401  (registers the model with the Auto classes)
from vanilla_transformer_tools.evaluation.metrics import score


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or Hub name.")
    parser.add_argument("--test", nargs=2, required=True, metavar=("SOURCES", "REFERENCES"))
    parser.add_argument("--batch_size", type=int, default=32, help="Sentences of a batch.")
    parser.add_argument("--num_beams", type=int, help="Default: as the model says.")
    parser.add_argument(
        "--metrics",
        nargs="*",
        default=[],
        help="Others: a file with an `evaluate.Metric`, or a name on the Hub, such as ter, whose "
        "code is downloaded and run.",
    )
    return parser.parse_args()


def read_lines(file: str) -> list[str]:
    """Lines of a text file, plain or gzipped."""
    return load_dataset("text", data_files=file, split="train")["text"][:]


@torch.inference_mode()
def translate(model_name: str, sources: list[str], batch_size: int, **search: int) -> list[str]:
    """Translations in the order of their sources."""
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_name, device_map="auto").eval()
    # Sentences of similar length share a batch, so that there is little padding.
    order = sorted(range(len(sources)), key=lambda place: -len(sources[place]))
    translations = [""] * len(sources)
    for start in trange(0, len(sources), batch_size, desc="batches"):
        places = order[start : start + batch_size]
        texts = [sources[place] for place in places]
        batch = tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
        outputs = model.generate(**batch, **search)
        decoded = tokenizer.batch_decode(outputs, skip_special_tokens=True)
        for place, translation in zip(places, decoded, strict=True):
            translations[place] = translation
    return translations


def main() -> None:
    """Prints the scores as JSON."""
    given = parse()
    sources, references = map(read_lines, given.test)
    search = {"num_beams": given.num_beams} if given.num_beams else {}
    translations = translate(given.model, sources, given.batch_size, **search)
    lines = {"predictions": translations, "references": references}
    scores = score(**lines, metrics=["bleu", "chrf"], bootstrap=1000)
    for name in given.metrics:
        scores[name] = evaluate.load(name).compute(**lines)
    print(json.dumps(scores, indent=2))


if __name__ == "__main__":
    main()
