"""Calls of the native API and of OpenAI's API by generated code: `calls.py URL CLIENT_KEY ADMIN_KEY`.

tests/e2e/test_generated_clients.py generates `quartet_client` and `quartet_models`, and runs this next to them.
"""

import base64
import struct
import sys
from typing import TypeVar

import httpx
import quartet_models
from pydantic import BaseModel
from quartet_client import AuthenticatedClient, Client, models
from quartet_client.api.administration import (
    list_models,
    load_model,
    promote_model,
    roll_back_model,
    unload_model,
)
from quartet_client.api.open_ai import openai_embeddings, openai_model, openai_models
from quartet_client.api.service import live, metrics, ready
from quartet_client.api.service import models as served
from quartet_client.api.tasks import (
    analyze,
    attention,
    classify,
    detokenize,
    embed,
    embed_sparse,
    embed_tokens,
    fill_mask,
    ner,
    qa,
    rerank,
    similarity,
    tokenize,
    zero_shot,
)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

TEXT = "Ada drew a comet near the harbour."
OTHER = "The ferry sails at nine."


Error = models.ErrorResponse | models.OpenAIErrorResponse


def good(answer: Error | T | None) -> T:
    """The answer, which must be no error."""
    assert answer is not None
    assert not isinstance(answer, Error), answer
    return answer


def call_tasks(client: AuthenticatedClient) -> None:
    labels = good(
        classify.sync(
            client=client,
            body=models.ClassifyRequest(
                inputs=[TEXT, OTHER], top_k=1, truncate=models.Truncate.WINDOW
            ),
            x_priority=models.Priority.BULK,
            x_request_timeout_ms=30_000,
        )
    )
    assert [1, 1] == [len(result or []) for result in labels.results]
    pairs = models.ClassifyRequest(inputs=TEXT, text_pair=OTHER, truncate=True)
    assert good(classify.sync(client=client, body=pairs)).usage.windows == 1

    entities = models.NerRequest(inputs=TEXT)
    good(ner.sync(client=client, body=entities))
    tokens = models.NerRequest(
        inputs=[TEXT], aggregation_strategy=models.AggregationStrategy.NONE, stride=4
    )
    assert 1 == len(good(ner.sync(client=client, body=tokens)).results)

    one = models.QaQuestionRequest(question="Who drew a comet?", context=TEXT, top_k=2)
    assert 1 == len(good(qa.sync(client=client, body=one)).results)
    several = models.QaInputsRequest(
        inputs=[models.QaInput(question="What sails?", context=OTHER)] * 2,
        on_error=models.OnError.NULL,
    )
    assert 2 == len(good(qa.sync(client=client, body=several)).results)

    numbers = good(embed.sync(client=client, body=models.EmbedRequest(inputs=TEXT, dimensions=4)))
    encoded = models.EmbedRequest(
        inputs=TEXT, dimensions=4, encoding_format=models.EncodingFormat.BASE64
    )
    (vector,) = numbers.embeddings
    (text,) = good(embed.sync(client=client, body=encoded)).embeddings
    assert isinstance(vector, list)
    assert isinstance(text, str)
    decoded = struct.unpack("<4f", base64.b64decode(text))
    assert all(abs(a - b) < 1e-6 for a, b in zip(vector, decoded, strict=True))

    masks = models.FillMaskRequest(
        inputs=["Ada drew a [MASK].", "[MASK] drew a [MASK]."], top_k=2, model="masked"
    )
    one_mask, two_masks = good(fill_mask.sync(client=client, body=masks)).results
    assert one_mask
    assert isinstance(one_mask[0], models.FilledToken)
    assert two_masks
    assert isinstance(two_masks[0], list)
    assert 2 == len(one_mask) == len(two_masks)
    drawn = models.AttentionRequest(inputs=[TEXT], model="masked")
    assert 1 == len(good(attention.sync(client=client, body=drawn)).results)


def call_more_tasks(client: AuthenticatedClient) -> None:
    documents = models.RerankRequest(
        query=TEXT, documents=[OTHER, TEXT], head="embeddings", top_n=1, return_text=True
    )
    (best,) = good(rerank.sync(client=client, body=documents)).results
    assert (1, TEXT) == (best.index, best.text)
    compared = models.SimilarityRequest(source=TEXT, inputs=[TEXT, OTHER])
    assert 2 == len(good(similarity.sync(client=client, body=compared)).results)
    analyzed = models.AnalyzeRequest(inputs=TEXT, heads=["sentiment", "entities"])
    assert ["sentiment", "entities"] == good(analyze.sync(client=client, body=analyzed)).heads
    texts = models.TokenizeRequest(inputs=TEXT)
    (tokens,) = good(tokenize.sync(client=client, body=texts)).results
    ids = models.DetokenizeRequest(ids=[token.id for token in tokens.tokens])
    assert 1 == len(good(detokenize.sync(client=client, body=ids)).results)

    # The model has no head for these.
    labels = models.ZeroShotRequest(inputs=TEXT, labels=["a", "b"])
    assert isinstance(zero_shot.sync(client=client, body=labels), models.ErrorResponse)
    queries = models.EmbedTokensRequest(inputs=TEXT)
    assert isinstance(embed_tokens.sync(client=client, body=queries), models.ErrorResponse)
    weighed = models.EmbedSparseRequest(inputs=TEXT, top_k=3)
    assert isinstance(embed_sparse.sync(client=client, body=weighed), models.ErrorResponse)


def call_openai(client: AuthenticatedClient) -> None:
    body = models.OpenAIEmbeddingRequest(input_=[TEXT, OTHER], model="tiny", dimensions=4)
    found = good(openai_embeddings.sync(client=client, body=body))
    assert [0, 1] == [one.index for one in found.data]
    listed = good(openai_models.sync(client=client))
    assert listed.data[0] == openai_model.sync(client=client, model="tiny")


def call_pages(url: str, client: AuthenticatedClient, admin: AuthenticatedClient) -> None:
    model, masked = good(served.sync(client=client)).models
    assert ["tiny@1", "masked@1"] == [model.id, masked.id]
    assert "[MASK]" == masked.heads.additional_properties["masks"].mask_token
    assert {"classification", "ner", "qa", "embedding"} == {
        head.task.value for head in model.heads.additional_properties.values()
    }
    anyone = Client(base_url=url)
    assert "live" == good(live.sync(client=anyone)).status
    assert "ready" == good(ready.sync(client=anyone)).status
    assert "quartet_ready 1.0" in good(metrics.sync(client=admin))


def call_administration(admin: AuthenticatedClient) -> None:
    listed = good(list_models.sync(client=admin)).models
    assert ["tiny@1", "masked@1"] == [model.id for model in listed]
    loaded = good(load_model.sync(client=admin, body=models.LoadRequest(path="2", promote=False)))
    assert ("tiny@2", "pinned") == (loaded.model.id, loaded.model.state)
    promoted = good(
        promote_model.sync(client=admin, model="tiny@2", body=models.PromoteRequest(keep_old=True))
    )
    assert promoted.previous is not None
    assert "tiny@1" == promoted.previous.id
    back = good(roll_back_model.sync(client=admin, name="tiny"))
    assert "tiny@1" == back.model.id
    assert "tiny@2" == good(unload_model.sync(client=admin, model="tiny@2")).unloaded


def call_errors(client: AuthenticatedClient) -> None:
    refused = embed.sync(client=client, body=models.EmbedRequest(inputs=TEXT, model="none"))
    assert isinstance(refused, models.ErrorResponse)
    assert "unknown_model" == refused.error.code


def call_with_models(url: str, key: str) -> None:
    """The same tasks, with bodies and answers of the generated models alone."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}) as client:

        def post(path: str, body: BaseModel, kind: type[M]) -> M:
            content = body.model_dump_json(exclude_unset=True)
            answer = client.post(
                path, content=content, headers={"Content-Type": "application/json"}
            )
            assert 200 == answer.status_code, answer.text
            return kind.model_validate(answer.json())

        ours = quartet_models
        texts = ours.Inputs([TEXT])
        classes = ours.ClassifyRequest(inputs=texts, truncate=ours.Truncate.window)
        assert post("/classify", classes, ours.ClassifyResponse).results
        assert post("/ner", ours.NerRequest(inputs=TEXT), ours.NerResponse).results
        question = ours.QaQuestionRequest(question="Who drew a comet?", context=TEXT)
        assert post("/qa", ours.QaRequest(question), ours.QaResponse).results
        vectors = ours.EmbedRequest(inputs=TEXT, dimensions=4)
        assert post("/embed", vectors, ours.EmbedResponse).embeddings
        masks = ours.FillMaskRequest(inputs=ours.Inputs(["a [MASK]"]), model="masked")
        assert post("/fill-mask", masks, ours.FillMaskResponse).results
        assert ours.ModelsResponse.model_validate(client.get("/models").json()).models


def main(url: str, client_key: str, admin_key: str) -> None:
    client = AuthenticatedClient(base_url=url, token=client_key)
    admin = AuthenticatedClient(base_url=url, token=admin_key)
    call_tasks(client)
    call_more_tasks(client)
    call_openai(client)
    call_pages(url, client, admin)
    call_administration(admin)
    call_errors(client)
    call_with_models(url, client_key)


if __name__ == "__main__":
    main(*sys.argv[1:])
