"""sentence-transformers behind plain FastAPI: one process, each request encoded by itself in the threadpool.

python app.py MODEL --port N
"""

import argparse

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class Question(BaseModel):
    inputs: str


class Answer(BaseModel):
    embeddings: list[list[float]]


def create_app(model: SentenceTransformer) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ready"

    @app.post("/embed")
    def embed(question: Question) -> Answer:
        vectors = model.encode(
            [question.inputs], normalize_embeddings=True, show_progress_bar=False
        )
        return Answer(embeddings=vectors.tolist())

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    uvicorn.run(
        create_app(SentenceTransformer(given.model, device="cpu")),
        port=given.port,
        log_level="warning",
    )
