"""Counts the fields of a serialized protobuf message before it is parsed.

Parsing 10 MB of empty submessages makes five million objects, which take gigabytes and seconds.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from service.api.request_body import VALUES
from service.errors import BadRequest, TooLarge

# Wire types, https://protobuf.dev/programming-guides/encoding
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64), 8),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32), 4),
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_SFIXED32: 4,
}  # bytes of an element; other numbers are varints
NOT_LAST = bytes(range(128, 256))  # of a varint's bytes


def check_fields(message: bytes, kind: Any, most: int) -> None:
    """Check that a message has at most `most` fields, including the fields of its submessages.

    Elements of packed fields, which cost little, count as `VALUES` to a field. kind: the message's descriptor. Raises
    TooLarge, and BadRequest for a message that is not valid.
    """
    if len(message) <= most:
        return  # a field has at least one byte
    left = VALUES * most
    rest = [(0, len(message), kind)]
    try:
        while rest:
            at, end, kind = rest.pop()
            parts = parts_of(kind)
            while at < end:
                left -= VALUES
                tag, at = read_varint(message, at)
                wire_type = tag & 7
                if wire_type == BYTES:
                    size, at = read_varint(message, at)
                    part = parts.get(tag >> 3)
                    if isinstance(part, int):
                        left -= count_elements(message[at : at + size], part)
                    elif part is not None:
                        rest.append((at, at + size, part))
                    at += size
                elif wire_type == VARINT:
                    _, at = read_varint(message, at)
                elif wire_type in (FIXED64, FIXED32):
                    at += 8 if wire_type == FIXED64 else 4
                if left < 0:
                    raise TooLarge(
                        f"the message has more than {most} fields, or {VALUES * most} numbers: send"
                        " fewer, or tensors in raw_input_contents"
                    )
            if at > end:
                raise IndexError
    except IndexError:
        raise BadRequest("the message is not valid: a field continues after its end") from None


@cache
def parts_of(kind: Any) -> Mapping[int, Any]:
    """Return, by their numbers, the descriptors of submessages, and the bytes per element of numbers (0: varints)."""
    return {
        field.number: field.message_type or WIDTHS.get(field.type, 0)
        for field in kind.fields
        if field.type not in TEXTS
    }


def count_elements(packed: bytes, width: int) -> int:
    return len(packed) // width if width else len(packed.translate(None, NOT_LAST))


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at an index, and the index after it. Raises IndexError."""
    number = shift = 0
    while (byte := message[at]) >= 128:
        number |= (byte & 127) << shift
        shift += 7
        at += 1
    return number | byte << shift, at + 1
