"""The transformers pipeline behind plain FastAPI: one process, each request by itself in the threadpool.

    python app.py MODEL --port N

The checkpoint's architecture says which of the two tasks is served.
"""

import argparse

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoConfig, Pipeline, pipeline


class Question(BaseModel):
    inputs: str


class Label(BaseModel):
    label: str
    score: float


class Entity(BaseModel):
    entity_group: str
    score: float
    word: str
    start: int
    end: int


def classify_app(classifier: Pipeline) -> FastAPI:
    app = new_app()

    @app.post("/classify")
    def classify(question: Question) -> list[Label]:
        return classifier(question.inputs, top_k=None, truncation=True)

    return app


def ner_app(tagger: Pipeline) -> FastAPI:
    app = new_app()

    @app.post("/ner")
    def ner(question: Question) -> list[Entity]:
        return tagger(question.inputs)

    return app


def new_app() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> str:
        return "ready"

    return app


def create_app(model: str) -> FastAPI:
    (architecture,) = AutoConfig.from_pretrained(model).architectures
    if architecture.endswith("ForTokenClassification"):
        return ner_app(
            pipeline(
                "token-classification", model=model, aggregation_strategy="simple", device="cpu"
            )
        )
    return classify_app(pipeline("text-classification", model=model, device="cpu"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    uvicorn.run(create_app(given.model), port=given.port, log_level="warning")
