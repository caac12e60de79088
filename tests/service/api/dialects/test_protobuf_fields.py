import pytest

from service.api.request_body import VALUES
from service.errors import BadRequest, TooLarge

pytest.importorskip("google.protobuf")

from service.api.dialects import open_inference_pb2 as messages
from service.api.dialects.protobuf_fields import check_fields

INFER = messages.ModelInferRequest
TENSOR = {
    "name": "text",
    "datatype": "BYTES",
    "shape": [3],
    "contents": {"bytes_contents": [b"a", b"\0" * 300, b""]},
    "parameters": {"a": {"int64_param": -1}, "b": {"double_param": 0.5}},
}
# inputs; name, datatype, shape, contents; texts; parameters, each with a key, a value and its number
FIELDS = 1 + 4 + 3 + 2 * 4


def check(message: bytes, most: int) -> None:
    check_fields(message, INFER.DESCRIPTOR, most)


def test_fields_are_counted():
    """A message may have as many fields as are allowed, in all of its submessages together."""
    message = INFER(model_name="a", inputs=[TENSOR]).SerializeToString()
    check(message, FIELDS + 2)  # model_name, and the number in shape
    with pytest.raises(TooLarge, match=str(FIELDS)):
        check(message, FIELDS)


@pytest.mark.parametrize("tag", [b"\x22", b"\x2a", b"\x32", b"\x3a"])
def test_empty_submessages_are_not_parsed(tag):
    """Two bytes make a parameter, an input, an output or raw contents; also inside another message."""
    with pytest.raises(TooLarge):
        check((tag + b"\0") * 101, 100)
    with pytest.raises(TooLarge):
        check(b"\x2a\xca\x01" + b"\x22\0" * 101, 100)


@pytest.mark.parametrize(
    ("field", "kind"), [("int64_contents", -1), ("fp32_contents", 0.5), ("bool_contents", True)]
)
def test_numbers_are_counted(field, kind):
    """Elements of packed fields count less than fields, whatever their width."""

    def message(count):
        tensor = {"contents": {field: [kind] * count}}
        return bytes(INFER(inputs=[tensor]).SerializeToString())

    check(message(VALUES * 6), 9)
    with pytest.raises(TooLarge):
        check(message(VALUES * 7), 9)


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_message_that_is_cut_off_is_refused(cut):
    """Without its end, a message is not valid, or has fewer fields."""
    message = INFER(model_name="a", inputs=[TENSOR]).SerializeToString()
    try:
        check(message[:-cut], FIELDS + 2)
    except BadRequest:
        return
    INFER.FromString(message[:-cut])
