import pytest

from service.api.dialects.tei_dialect import TeiRerankRequest
from service.api.schemas import (
    ClassifyRequest,
    EmbedRequest,
    NerRequest,
    QaRequest,
    Request,
    RerankRequest,
    SimilarityRequest,
    ZeroShotRequest,
    parse,
    refuse_long,
    validate,
)
from service.errors import InvalidInput, TooLarge

PAIR = {"question": "Who?", "context": "Marta keeps bees."}


def refused(schema: type[Request], body: object) -> tuple[str, str | None]:
    with pytest.raises(InvalidInput) as caught:
        parse(schema, body, 8)
    return caught.value.message, caught.value.param


@pytest.mark.parametrize("inputs", ["a text", ["a text"]])
def test_one_text_is_a_list_of_one(inputs):
    """A string and a list of one string are the same request."""
    assert parse(ClassifyRequest, {"inputs": inputs}, 8).inputs == ["a text"]


def test_an_empty_text_is_a_text():
    """Nothing is too short to be classified."""
    assert parse(ClassifyRequest, {"inputs": ["", "a"]}, 8).inputs == ["", "a"]


def test_defaults_are_those_of_the_task():
    """Windows where every token counts, one cut where a text is read as a whole."""
    texts = {"inputs": "a"}
    truncate = {
        schema: parse(schema, body, 8).truncate
        for schema, body in {
            ClassifyRequest: texts,
            NerRequest: texts,
            QaRequest: PAIR,
            EmbedRequest: texts,
        }.items()
    }
    assert truncate == {
        ClassifyRequest: True,
        NerRequest: "window",
        QaRequest: "window",
        EmbedRequest: True,
    }
    assert parse(NerRequest, texts, 8).aggregation_strategy == "first"
    assert parse(QaRequest, PAIR, 8).top_k == 1
    assert parse(EmbedRequest, texts, 8).normalize is None


def test_every_bad_index_is_named():
    """All bad inputs are listed; `param` is the first."""
    message, param = refused(ClassifyRequest, {"inputs": ["a", 1, "b", None]})
    assert (message, param) == ("inputs[1], inputs[3]: must be a string", "inputs[1]")


def test_every_fault_of_a_body_is_reported_at_once():
    """One answer says all that is wrong."""
    message, _ = refused(ClassifyRequest, {"inputs": [7], "top_k": 0, "topk": 1})
    assert message == (
        "inputs[0]: must be a string; top_k: must be at least 1;"
        " topk: unknown field (did you mean top_k?)"
    )


def test_of_many_unknown_fields_some_are_named():
    """A hundred thousand of them make a short answer, soon, and hide no bad input."""
    body = {**{f"field {index}": 1 for index in range(100_000)}, "inputs": ["a", 1, 2]}
    message, param = refused(ClassifyRequest, body)
    assert message.startswith("inputs[1], inputs[2]: must be a string; field 0")
    assert message.endswith("; and 99984 more unknown fields")
    assert len(message) < 1000
    assert param == "inputs[1]"


def test_a_question_has_so_many_answers():
    """A question has a limited number of answers, because each of them costs time."""
    message, _ = refused(QaRequest, {**PAIR, "top_k": 101})
    assert message == "top_k: must be at most 100"


@pytest.mark.parametrize(
    ("schema", "fault", "message"),
    [
        (ClassifyRequest, {"inputs": None}, "inputs: must be a string or a list of strings"),
        (ClassifyRequest, {"inputs": []}, "inputs: must not be empty"),
        (ClassifyRequest, {"top_k": "3"}, "top_k: must be an integer"),
        (ClassifyRequest, {"top_k": True}, "top_k: must be an integer"),
        (ClassifyRequest, {"top_k": 1.5}, "top_k: must be an integer"),
        (ClassifyRequest, {"top_k": 0.0}, "top_k: must be at least 1"),
        (ClassifyRequest, {"stride": -1}, "stride: must be at least 0"),
        (ClassifyRequest, {"model": 1}, "model: must be a string"),
        (ClassifyRequest, {"text_pair": 1}, "text_pair: must be a string or a list of strings"),
        (ClassifyRequest, {"truncate": 1}, 'truncate: must be true, false or "window"'),
        (ClassifyRequest, {"truncate": "yes"}, 'truncate: must be true, false or "window"'),
        (EmbedRequest, {"normalize": 0}, "normalize: must be true or false"),
        (EmbedRequest, {"dimensions": 0}, "dimensions: must be at least 1"),
        (EmbedRequest, {"encoding_format": "hex"}, "encoding_format: must be one of 'float' or 'base64'"),
        (
            NerRequest,
            {"aggregation_strategy": "last"},
            "aggregation_strategy: must be one of 'none', 'simple', 'first', 'average' or 'max'",
        ),
        (NerRequest, {"x" * 100: 1}, f"{'x' * 64}: unknown field"),
    ],
)  # fmt: skip
def test_nothing_is_coerced(schema, fault, message):
    """A value of another type or range is refused in plain words."""
    assert refused(schema, {"inputs": "a", **fault})[0] == message


@pytest.mark.parametrize(
    ("schema", "body", "field"),
    [
        (RerankRequest, {"query": "\n", "documents": ["a"]}, "query"),
        (SimilarityRequest, {"source": "", "inputs": ["a"]}, "source"),
        (TeiRerankRequest, {"query": " ", "texts": ["a"]}, "query"),
    ],
)
def test_blank_texts_are_refused(schema, body, field):
    """A text that others are compared with is not blank, as the document declares."""
    assert (f"{field}: must not be empty", field) == refused(schema, body)


def test_pairs_align_with_inputs():
    """A second text for every first, and none too many."""
    assert refused(ClassifyRequest, {"inputs": ["a"], "text_pair": ["b", "c"]}) == (
        "text_pair has 2 texts, inputs has 1; they must align",
        "text_pair",
    )


def test_a_question_comes_alone_or_in_a_list():
    """Both forms give questions and contexts in step."""
    alone, listed = (parse(QaRequest, body, 8) for body in (PAIR, {"inputs": [PAIR, PAIR]}))
    assert (alone.questions, alone.contexts, alone.size) == (["Who?"], [PAIR["context"]], 1)
    assert (listed.questions, listed.contexts, listed.size) == (
        ["Who?"] * 2,
        [PAIR["context"]] * 2,
        2,
    )
    assert ("context", "inputs[{}]") == (alone.place, listed.place)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "question and context: required", "question"),
        ({"question": "Who?"}, "context: required", "context"),
        ({**PAIR, "context": " \n"}, "context: must not be empty", "context"),
        ({"inputs": [PAIR], "question": "a"}, "send question and context, or inputs, not both", "inputs"),
        ({"inputs": []}, "inputs: must not be empty", "inputs"),
        ({"inputs": "a"}, "inputs: must be a list", "inputs"),
        ({"inputs": [PAIR, 1]}, "inputs[1]: must be an object", "inputs[1]"),
        ({"inputs": [{"question": "a"}]}, "inputs[0].context: required", "inputs[0].context"),
        ({"inputs": [{**PAIR, "id": 1}]}, "inputs[0].id: unknown field", "inputs[0].id"),
        (
            {"inputs": [{**PAIR, "question": ""}, PAIR, {**PAIR, "context": ""}]},
            "inputs[0].question, inputs[2].context: must not be empty",
            "inputs[0].question",
        ),
    ],
)  # fmt: skip
def test_bad_questions_are_named(body, message, param):
    """A question needs both its parts, in one form, and neither blank."""
    assert refused(QaRequest, body) == (message, param)


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_is_an_object(body):
    """Other JSON is refused."""
    assert refused(ClassifyRequest, body) == ("the body must be a JSON object", None)


@pytest.mark.parametrize("field", ["inputs", "text_pair"])
def test_too_many_inputs_are_refused_before_they_are_looked_at(field):
    """A list over the limit is too large, whatever is in it."""
    with pytest.raises(TooLarge) as caught:
        parse(ClassifyRequest, {"inputs": "a", field: [None] * 9}, 8)
    assert (caught.value.message, caught.value.param) == (
        f"{field} has 9 items; a request may have 8",
        field,
    )


@pytest.mark.parametrize(
    ("schema", "body", "named"),
    [
        (ClassifyRequest, {"inputs": "long!"}, ["inputs[0]"]),
        (ClassifyRequest, {"inputs": ["a", "long!", "long", "long!"]}, ["inputs[1]", "inputs[3]"]),
        (ClassifyRequest, {"inputs": ["a", "b"], "text_pair": ["a", "long!"]}, ["text_pair[1]"]),
        (NerRequest, {"inputs": ["\U0001f600" * 5]}, ["inputs[0]"]),
        (QaRequest, {"question": "long?", "context": "long!"}, ["question", "context"]),
        (
            QaRequest,
            {"inputs": [{"question": "a", "context": "long!"}, {"question": "b?", "context": "c"}]},
            ["inputs[0].context"],
        ),
    ],
)
def test_every_long_text_is_named(schema, body, named):
    """Texts are too long by their characters, whatever these take in bytes; `param` is the first."""
    request = parse(schema, body, 8)
    refuse_long(request, 5)
    with pytest.raises(TooLarge) as caught:
        refuse_long(request, 4)
    message = f"{', '.join(named)}: must have at most 4 characters"
    assert (message, named[0]) == (caught.value.message, caught.value.param)


@pytest.mark.parametrize("field", ["model", "head"])
def test_a_long_name_is_not_repeated(field):
    """No bundle and no head has so long a name, and the answer is short."""
    message, param = refused(EmbedRequest, {"inputs": "a", field: "x" * 1_000_000})
    assert (f"{field}: must have at most 386 characters", field) == (message, param)


@pytest.mark.parametrize(
    ("schema", "field"),
    [(ClassifyRequest, "top_k"), (NerRequest, "stride"), (EmbedRequest, "dimensions")],
)
def test_a_number_without_fraction_is_an_integer(schema, field):
    """JSON Schema calls 4.0 an integer, and some writers of JSON know no other number."""
    value = getattr(parse(schema, {"inputs": "a", field: 4.0}, 8), field)
    assert (4, int) == (value, type(value))


def test_a_template_without_a_place_for_the_label():
    """The message has the place as a template has it."""
    body = {"inputs": "a", "labels": ["b"], "hypothesis_template": "It is {{}."}
    assert validate(ZeroShotRequest, body).hypothesis_template == "It is {{}."
    with pytest.raises(InvalidInput, match=r"hypothesis_template: must contain \{\}, the place"):
        validate(ZeroShotRequest, {**body, "hypothesis_template": "It is."})
