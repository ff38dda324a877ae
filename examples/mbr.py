"""Minimum Bayes risk: of sampled translations, the one most similar to all others (by chrF).

Eikema and Aziz 2020 (arXiv 2005.10283). python examples/mbr.py --model runs/de-en < in.de > out.en
"""

import argparse
import sys
from collections import Counter

from sacrebleu.metrics import CHRF

from vanilla_transformer_tools.translation import Translator


def choose(candidates: list[str]) -> str:
    """The candidate with the highest expected chrF, with all candidates as references."""
    counts, chrf = Counter(candidates), CHRF()

    def utility(candidate: str) -> float:
        return sum(
            count * (100 if one == candidate else chrf.sentence_score(candidate, [one]).score)
            for one, count in counts.items()
        )

    return max(counts, key=utility)


def main() -> None:
    """Reads lines from standard input and writes a translation of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder or Hub name of a model.")
    parser.add_argument("--samples", type=int, default=32, help="Samples of each line.")
    given = parser.parse_args()
    search = {"do_sample": True, "num_beams": 1, "num_hypotheses": given.samples}
    translator = Translator.from_pretrained(given.model, **search)
    for found in translator.translate(line.rstrip("\n") for line in sys.stdin):
        print(choose([one.text for one in found.ranked]), flush=True)


if __name__ == "__main__":
    main()
