"""Serves a model over HTTP with the API of LibreTranslate; requests that wait share a batch."""

import argparse
import asyncio
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import parse_qsl

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field, ValidationError

from vanilla_transformer_tools.translation import Translator

MOST_BYTES = 200_000
# Lines, number of translations of each, and the list that gets them.
Job = tuple[list[str], int, list[list[str]]]


class Wanted(BaseModel):
    """A request; LibreTranslate's other fields are ignored."""

    q: str | Annotated[list[str], Field(min_length=1)]
    source: str
    target: str
    alternatives: int = Field(default=0, ge=0, le=10)


def build_app(translator: Translator, source: str, target: str) -> FastAPI:
    """The service; `source` and `target` are languages as clients name them."""
    app, lock, pending = FastAPI(title="Translation"), asyncio.Lock(), list[Job]()

    def translate(jobs: list[Job]) -> None:
        count, search = jobs[0][1], translator.search
        search = replace(search, num_hypotheses=count, num_beams=max(search.num_beams, count))
        found = translator.changed(search=search).translate([one for job in jobs for one in job[0]])
        for lines, _, rows in jobs:
            rows[:] = [[one.text for one in next(found).ranked] for _ in lines]

    async def answered(job: Job) -> list[list[str]]:
        """Whoever gets the lock translates all that has come meanwhile."""
        pending.append(job)
        async with lock:
            if not job[2]:
                # One whose batch has failed is no longer among them, and is translated alone.
                alike = [one for one in pending if one[1] == job[1]]
                batch = alike if any(one is job for one in alike) else [job]
                pending[:] = [one for one in pending if one not in batch]
                try:
                    await asyncio.to_thread(translate, batch)
                except Exception:
                    await asyncio.to_thread(translate, [job])
        return job[2]

    @app.post("/translate")
    async def translation(request: Request) -> dict[str, Any]:
        body, kind = await request.body(), request.headers.get("content-type", "")
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"A request has at most {MOST_BYTES} bytes, got {len(body)}.")
        try:
            form = {} if "json" in kind else dict(parse_qsl(body.decode(), True))
            wanted = Wanted.model_validate(form) if form else Wanted.model_validate_json(body)
        except (ValidationError, UnicodeDecodeError) as error:
            raise HTTPException(400, f"Send q, source and target: {error}") from error
        if wanted.source not in (source, "auto") or wanted.target != target:
            raise HTTPException(400, f"The model translates {source} to {target} only.")
        texts = wanted.q if isinstance(wanted.q, list) else [wanted.q]
        parts = [text.split("\n") for text in texts]
        job: Job = ([line for part in parts for line in part], 1 + wanted.alternatives, [])
        rows = iter(await answered(job))
        # The n-th translation of a text is that of all its lines.
        found = [["\n".join(n) for n in zip(*[next(rows) for _ in p], strict=True)] for p in parts]
        which: Any = slice(None) if texts is wanted.q else 0
        best, others = [one[0] for one in found][which], [one[1:] for one in found][which]
        return {"translatedText": best, "alternatives": others}

    names = [{"code": source, "name": source, "targets": [target]}]
    app.get("/languages")(lambda: names)
    app.get("/health")(lambda: {"status": "ok"})
    return app


def main() -> None:
    """Reads the options and serves until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder or Hub name of a model.")
    parser.add_argument("--languages", nargs=2, required=True, help="Of both sides, such as de en.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="Address to listen on; default: this machine."
    )
    parser.add_argument("--port", type=int, default=5000, help="Port to listen on.")
    given = parser.parse_args()
    app = build_app(Translator.from_pretrained(given.model, split_sentences=True), *given.languages)
    uvicorn.run(app, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
