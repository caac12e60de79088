"""Every call of the service by generated code: `calls.py URL CLIENT_KEY ADMIN_KEY`.

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
from quartet_client.api.cohere import (
    cohere_detokenize,
    cohere_embed_v1,
    cohere_embed_v2,
    cohere_model,
    cohere_models,
    cohere_rerank_v1,
    cohere_rerank_v2,
    cohere_tokenize,
)
from quartet_client.api.infinity import (
    infinity_classify,
    infinity_embeddings,
    infinity_health,
    infinity_models,
    infinity_rerank,
)
from quartet_client.api.jina import jina_rerank
from quartet_client.api.open_ai import openai_embeddings, openai_model, openai_models
from quartet_client.api.service import live, metrics, ready
from quartet_client.api.service import models as served
from quartet_client.api.tasks import (
    analyze,
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
from quartet_client.api.text_embeddings_inference import (
    tei_decode,
    tei_embed,
    tei_embed_all,
    tei_embed_sparse,
    tei_health,
    tei_info,
    tei_predict,
    tei_rerank,
    tei_similarity,
    tei_tokenize,
)
from quartet_client.api.v_llm import vllm_classify, vllm_pooling, vllm_rerank, vllm_score

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

TEXT = "Ada drew a comet near the harbour."
OTHER = "The ferry sails at nine."


def good(answer: models.ErrorResponse | T | None) -> T:
    """The answer, which must be no error."""
    assert answer is not None
    assert not isinstance(answer, models.ErrorResponse), answer
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


def call_dialects(client: AuthenticatedClient) -> None:
    body = models.OpenAIEmbeddingRequest(input_=[TEXT, OTHER], model="tiny", dimensions=4)
    found = openai_embeddings.sync(client=client, body=body)
    assert found is not None
    assert [0, 1] == [one.index for one in found.data]
    listed = openai_models.sync(client=client)
    assert listed is not None
    assert listed.data[0] == openai_model.sync(client=client, model="tiny")

    vectors = tei_embed.sync(client=client, body=models.TeiEmbedRequest(inputs=TEXT))
    assert vectors is not None
    assert 64 == len(vectors[0])
    assert tei_predict.sync(client=client, body=models.TeiPredictRequest(inputs=TEXT))
    sentences = models.TeiSentences(source_sentence=TEXT, sentences=[OTHER])
    asked = models.TeiSimilarityRequest(inputs=sentences)
    assert 1 == len(tei_similarity.sync(client=client, body=asked) or [])
    tokens = tei_tokenize.sync(client=client, body=models.TeiTokenizeRequest(inputs=TEXT))
    assert tokens is not None
    ids = models.TeiDecodeRequest(ids=[token.id for token in tokens[0]])
    assert tei_decode.sync(client=client, body=ids)
    assert tei_info.sync(client=client)
    assert tei_health.sync(client=client) is not None
    documents = models.TeiRerankRequest(query=TEXT, texts=[OTHER])
    assert tei_rerank.sync(client=client, body=documents) is None  # there is no cross-encoder
    assert tei_embed_all.sync(client=client, body=models.TeiEmbedAllRequest(inputs=TEXT)) is None
    sparse = models.TeiEmbedSparseRequest(inputs=TEXT)
    assert tei_embed_sparse.sync(client=client, body=sparse) is None


def call_cohere(client: AuthenticatedClient) -> None:
    body = models.CohereEmbedRequest(texts=[TEXT, OTHER], input_type="search_query")
    found = cohere_embed_v2.sync(client=client, body=body)
    assert found is not None
    plain = cohere_embed_v1.sync(client=client, body=body)
    assert plain is not None
    assert plain.embeddings == found.embeddings.float_
    documents = models.CohereRerankRequest(query=TEXT, documents=[OTHER])
    assert cohere_rerank_v1.sync(client=client, body=documents) is None
    assert cohere_rerank_v2.sync(client=client, body=documents) is None
    tokens = cohere_tokenize.sync(client=client, body=models.CohereTokenizeRequest(text=TEXT))
    assert tokens is not None
    ids = models.CohereDetokenizeRequest(tokens=tokens.tokens)
    assert cohere_detokenize.sync(client=client, body=ids)
    listed = cohere_models.sync(client=client)
    assert listed is not None
    assert listed.models[0] == cohere_model.sync(client=client, model="tiny")


def call_infinity_and_others(client: AuthenticatedClient) -> None:
    vectors = models.InfinityEmbeddingRequest(input_=TEXT, dimensions=4)
    assert infinity_embeddings.sync(client=client, body=vectors)
    labels = models.InfinityClassifyRequest(input_=TEXT)
    assert infinity_classify.sync(client=client, body=labels)
    documents = models.InfinityRerankRequest(query=TEXT, documents=[OTHER])
    assert infinity_rerank.sync(client=client, body=documents) is None
    assert infinity_models.sync(client=client)
    assert infinity_health.sync(client=client)

    others = models.JinaRerankRequest(query=TEXT, documents=[OTHER])
    assert jina_rerank.sync(client=client, body=others) is None

    assert vllm_classify.sync(client=client, body=models.VllmClassifyRequest(input_=TEXT))
    assert vllm_pooling.sync(client=client, body=models.VllmPoolingRequest(input_=[TEXT]))
    pairs = models.VllmScoreRequest(text_1=TEXT, text_2=[OTHER, TEXT])
    scores = vllm_score.sync(client=client, body=pairs)
    assert scores is not None
    assert 2 == len(scores.data)
    ranked = models.VllmRerankRequest(query=TEXT, documents=[OTHER, TEXT])
    best = vllm_rerank.sync(client=client, body=ranked)
    assert best is not None
    assert TEXT == best.results[0].document.text


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
        assert post("/ner", ours.NerRequest(inputs=texts), ours.NerResponse).results
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
    call_dialects(client)
    call_cohere(client)
    call_infinity_and_others(client)
    call_pages(url, client, admin)
    call_administration(admin)
    call_errors(client)
    call_with_models(url, client_key)


if __name__ == "__main__":
    main(*sys.argv[1:])
