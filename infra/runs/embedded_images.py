"""Puts images into tables in place of their digests, as the package `datasets` and the hub's viewer read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from ratchet.infra.store.images import Images
from ratchet.rlhf.schema import IMAGES

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
"""Type of an image in a file; `path` is its digest."""
FEATURE = {"feature": {"_type": "Image"}, "_type": "List"}
METADATA = b"huggingface"
"""The key in a Parquet file's metadata that `datasets` reads."""
PART_BYTES = 2**30
"""Size of a part of a column. Arrow's offsets end at twice as much."""


def with_images(table: pa.Table, images: Images | Sequence[Images]) -> pa.Table:
    """Replaces the digests in the column `images` by the images; a table without the column stays as it is.

    Args:
        images: the images of the run, or those of the run of each row.

    Raises:
        UserError: an image is missing or damaged.
    """
    if IMAGES not in table.column_names:
        return table
    stores = [images] * len(table) if isinstance(images, Images) else images
    parts = list(_parts(table[IMAGES].to_pylist(), stores))
    column = pa.chunked_array(parts, pa.list_(IMAGE))
    schema = embedded(table.schema)
    return pa.table([column if name == IMAGES else table[name] for name in schema.names], schema=schema)


def embedded(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of `with_images`, whose metadata say that the column `images` holds images."""
    if IMAGES not in schema.names:
        return schema
    features = json.dumps({"info": {"features": {IMAGES: FEATURE}}})
    there = {**(schema.metadata or {}), METADATA: features.encode()}
    return schema.set(schema.get_field_index(IMAGES), pa.field(IMAGES, pa.list_(IMAGE))).with_metadata(there)


@dataclass(frozen=True)
class _Encoded:
    digest: str
    data: bytes


def _parts(cells: Sequence[Sequence[str] | None], stores: Sequence[Images]) -> Iterator[pa.Array]:
    known: dict[str, _Encoded] = {}
    part: list[list[dict[str, object]] | None] = []
    size = 0
    for cell, images in zip(cells, stores, strict=True):
        known |= {digest: _Encoded(digest, images.get(digest)) for digest in cell or () if digest not in known}
        row = None if cell is None else [known[digest] for digest in cell]
        more = sum(len(image.data) for image in row or ())
        if part and size + more > PART_BYTES:
            yield pa.array(part, pa.list_(IMAGE))
            part, size = [], 0
        size += more
        part.append(None if row is None else [{"bytes": image.data, "path": image.digest} for image in row])
    yield pa.array(part, pa.list_(IMAGE))
