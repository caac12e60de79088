"""sentence-transformers' CrossEncoder behind plain FastAPI: one process, a thread for each request.

python rerank_app.py MODEL --port N
"""

import argparse

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import CrossEncoder


class Question(BaseModel):
    query: str
    documents: list[str]


class Ranked(BaseModel):
    index: int
    score: float


class Answer(BaseModel):
    results: list[Ranked]


def create_app(model: CrossEncoder) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ready"

    @app.post("/rerank")
    def rerank(question: Question) -> Answer:
        found = model.rank(question.query, question.documents, show_progress_bar=False)
        results = [Ranked(index=one["corpus_id"], score=float(one["score"])) for one in found]
        return Answer(results=results)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    uvicorn.run(
        create_app(CrossEncoder(given.model, device="cpu")),
        port=given.port,
        log_level="warning",
    )
