"""Reads the header of a safetensors file, byte by byte: names, formats, shapes, places. Loads no tensor.

The format: 8 bytes little-endian length, so many bytes of JSON, then the tensors' bytes. The JSON maps a
name to {dtype, shape, data_offsets: [begin, end]}, counted from the end of the header. Bytes are never
interpreted, so that every number format there is, or will be, can be digested.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from onlinerl.errors import WeightsError

HEADER_LIMIT = 100_000_000
"""The format's own limit, in bytes."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
    "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its file, and what it is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""
    end: int


def read_header(path: Path) -> list[Place]:
    """The tensors of a file in the order of their bytes.

    Raises WeightsError naming the fault: cut short, no safetensors, overlapping or missing bytes, a shape
    that does not fit its bytes.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise WeightsError(f"{path} is no safetensors file: it has {size} bytes")
            (length,) = struct.unpack("<Q", start)
            if length > min(size - 8, HEADER_LIMIT):
                raise WeightsError(
                    f"{path} is no safetensors file, or was cut short: its header is incomplete"
                )
            text = file.read(length)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text)
        places = [
            Place(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(int(extent) for extent in entry["shape"]),
                begin=8 + length + int(entry["data_offsets"][0]),
                end=8 + length + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise WeightsError(f"{path} is no safetensors file: its header cannot be understood") from None
    places.sort(key=lambda place: (place.begin, place.end))
    at = 8 + length
    for place in places:
        bits = _BITS.get(place.dtype)
        if place.begin != at or place.end < place.begin:
            raise WeightsError(
                f"{path} is broken: the bytes of tensor {place.name} are not where they should be"
            )
        if bits is not None and (place.end - place.begin) * 8 != math.prod(place.shape) * bits:
            raise WeightsError(f"{path} is broken: tensor {place.name} does not have the bytes of its shape")
        at = place.end
    if at != size:
        raise WeightsError(f"{path} was cut short or has grown: {size} bytes where its header says {at}")
    return places
