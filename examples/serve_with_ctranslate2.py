"""Serves a model over HTTP with CTranslate2. It needs neither torch nor Transformers.

vanilla-transformer export --format ctranslate2 --quantization int8 runs/demo runs/demo-int8
python examples/serve_with_ctranslate2.py --model runs/demo-int8
curl localhost:8000/translate --json '{"texts": ["zweihundertfünfundvierzig"]}'
"""

import argparse
import json
from pathlib import Path
from typing import Annotated

import ctranslate2
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

MOST_TEXTS, MOST_CHARACTERS = 64, 1000


class Request(BaseModel):
    """Sentences to translate, and how wide to search."""

    texts: Annotated[
        list[Annotated[str, Field(max_length=MOST_CHARACTERS)]], Field(max_length=MOST_TEXTS)
    ]
    num_beams: Annotated[int, Field(ge=1, le=16)] | None = None


class Response(BaseModel):
    """Translations, in the order of the sentences."""

    translations: list[str]


def build_app(folder: Path, **options: int | str) -> FastAPI:
    """The service.

    Args:
        folder: Of an exported model.
        options: Of `ctranslate2.Translator`.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    defaults = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    translator = ctranslate2.Translator(str(folder), **options)
    app = FastAPI(title="Translation")

    # Not a coroutine, so requests run in threads; CTranslate2 shares its workers among them.
    @app.post("/translate")
    def translate(request: Request) -> Response:
        """Translates sentences."""
        beams = request.num_beams or defaults["num_beams"]
        results = translator.translate_batch(
            [encoding.tokens for encoding in tokenizer.encode_batch(request.texts)],
            beam_size=beams,
            length_penalty=defaults["length_penalty"],
            # Transformers' search does not end with the first `beams` hypotheses.
            patience=1 if beams == 1 or defaults["early_stopping"] is True else 2,
            max_batch_size=4096,
            batch_type="tokens",
            max_input_length=0,
            max_decoding_length=256,
        )
        ids = [[tokenizer.token_to_id(t) for t in result.hypotheses[0]] for result in results]
        return Response(translations=tokenizer.decode_batch(ids))

    @app.get("/health")
    def health() -> dict[str, str]:
        """Answers once the model is loaded."""
        return {"status": "ok"}

    return app


def main() -> None:
    """Reads the options and serves until Ctrl-C."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Folder of an exported model.")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen on.")
    parser.add_argument("--port", type=int, default=8000, help="Port to listen on.")
    parser.add_argument("--workers", type=int, default=1, help="Batches translated at once.")
    parser.add_argument("--threads", type=int, default=0, help="Of each worker; 0: a default.")
    given = parser.parse_args()
    app = build_app(given.model, inter_threads=given.workers, intra_threads=given.threads)
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
