"""What names a block besides its place: tokens, identity, and the chained SHA-256 digest of both.

Owns the border conversion of token ids, `Identity`, and the byte encoding that everything outside this process agrees
on (storage keys, KV events). Called by the scheduler and by storage; anybody can recompute a digest with hashlib.

Encoding, version 1 (all integers little-endian):

    digest(-1) = SHA-256(b"fastkv-prefix-1")
    digest(i)  = SHA-256(digest(i-1) | u32 len(extra(i)) | extra(i) | block_size int32 tokens of block i)

`extra(i)` is the identity that first applies in block i, as a row of fields, each `tag byte | u32 length | bytes`:

    block 0 only     S salt (utf-8)   L LoRA name (utf-8)   I LoRA id (i64)   W weights version (utf-8)
                     in this order, a field that has its default value is left out
    any block        M one for each image that starts in block i, in token order:
                     u32 (start - first token of the block) | u32 (end - start) | the image's digest bytes

Most blocks have an empty extra. The chain carries identity onward: an image or a salt changes every later block and no
earlier one. Lengths before bytes make the encoding injective: two different (tokens, identity) never encode alike.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fastkv.errors import RequestError

TokenArray: TypeAlias = npt.NDArray[np.int32]

DIGEST_BYTES = 32
ROOT_DIGEST = hashlib.sha256(b"fastkv-prefix-1").digest()
"""What block 0's digest is chained to."""

_MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image (or any embedded object) and the token positions that its placeholders fill.

    Attributes:
        digest: names the image's content, for instance a SHA-256 of its pixels; not empty.
        start: first position, in tokens of the request.
        end: one past the last position.
    """

    digest: bytes
    start: int
    end: int

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes) or not self.digest:
            raise RequestError(f"image digest {self.digest!r} must be non-empty bytes that name the image's content")
        if not 0 <= self.start < self.end <= _MAX_TOKEN:
            raise RequestError(f"image tokens [{self.start}, {self.end}) are no range; need 0 <= start < end")


@dataclass(frozen=True, slots=True)
class Identity:
    """What besides tokens makes a request's KV what it is. Two requests share a block only if all of it agrees.

    Attributes:
        salt: keeps tenants apart; "" for the shared namespace.
        lora: name of the adapter; "" for the base model.
        lora_id: tells apart adapters of one name (a reloaded or replaced adapter gets another id).
        images: in token order, not overlapping.
        weights_version: of the base model; usually left to the manager's own counter.
    """

    salt: str = ""
    lora: str = ""
    lora_id: int = 0
    images: tuple[ImageSpan, ...] = ()
    weights_version: str = ""

    def __post_init__(self) -> None:
        for name in ("salt", "lora", "weights_version"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise RequestError(f"identity {name} {value!r} must be a str")
        if not isinstance(self.lora_id, int) or not -(2**63) <= self.lora_id < 2**63:
            raise RequestError(f"identity lora_id {self.lora_id!r} must be an integer of 64 bits")
        for before, after in zip(self.images, self.images[1:], strict=False):
            if after.start < before.end:
                raise RequestError(
                    f"images [{before.start}, {before.end}) and [{after.start}, {after.end}) overlap or are out of "
                    "token order; sort them by start"
                )

    def block_extras(self, block_size: int) -> dict[int, bytes]:
        """The non-empty extras of this identity: block index -> bytes as the module's header describes."""
        extras: dict[int, bytes] = {}
        root = b"".join(
            _field(tag, text.encode("utf-8", "surrogatepass"))
            for tag, text in ((b"S", self.salt), (b"L", self.lora))
            if text
        )
        if self.lora_id:
            root += _field(b"I", struct.pack("<q", self.lora_id))
        if self.weights_version:
            root += _field(b"W", self.weights_version.encode("utf-8", "surrogatepass"))
        if root:
            extras[0] = root
        for image in self.images:
            block, offset = divmod(image.start, block_size)
            span = struct.pack("<II", offset, image.end - image.start)
            extras[block] = extras.get(block, b"") + _field(b"M", span + image.digest)
        return extras


NO_IDENTITY = Identity()
"""The shared namespace of the base model, text only."""


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<I", len(value)) + value


def decode_extra(extra: bytes) -> Identity:
    """The identity that a block's extra bytes stand for, without its images: what `Identity.block_extras` encoded."""
    fields: dict[bytes, bytes] = {}
    at = 0
    while at < len(extra):
        (size,) = struct.unpack_from("<I", extra, at + 1)
        fields.setdefault(extra[at : at + 1], extra[at + 5 : at + 5 + size])
        at += 5 + size
    return Identity(
        salt=fields.get(b"S", b"").decode("utf-8", "surrogatepass"),
        lora=fields.get(b"L", b"").decode("utf-8", "surrogatepass"),
        lora_id=struct.unpack("<q", fields[b"I"])[0] if b"I" in fields else 0,
        weights_version=fields.get(b"W", b"").decode("utf-8", "surrogatepass"),
    )


def as_token_array(tokens: object) -> TokenArray:
    """Token ids as a contiguous int32 array; the caller's own array when it is one already.

    Args:
        tokens: list, tuple, range, array.array, NumPy array of any integer width, or a tensor with `numpy()`;
            one-dimensional, every id in [0, 2**31).

    Raises:
        RequestError: not one-dimensional, not integers, or an id out of range.
    """
    if isinstance(tokens, np.ndarray):
        array = tokens
    elif isinstance(tokens, (str, bytes, bytearray)):
        raise RequestError(
            f"tokens are a {type(tokens).__name__}; give token ids as integers, text goes to a tokenizer"
        )
    else:
        convert = getattr(tokens, "numpy", None)
        try:
            array = np.asarray(convert() if callable(convert) else tokens)
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"tokens are no one-dimensional row of integers: {error}") from error
        if array.size == 0 and isinstance(tokens, (list, tuple, range)):
            array = array.astype(np.int32)
    if array.ndim != 1:
        raise RequestError(f"tokens have shape {array.shape}; give one dimension, one request at a time")
    if array.dtype.kind not in "iu":
        raise RequestError(f"tokens have dtype {array.dtype}; give integers in [0, 2**31)")
    if array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > _MAX_TOKEN:
            raise RequestError(f"token id {low if low < 0 else high} is out of range; allowed: 0 to {_MAX_TOKEN}")
    return np.ascontiguousarray(array, dtype=np.int32)


def block_digest(parent: bytes, tokens: object, extra: bytes = b"") -> bytes:
    """Digest of one block.

    Args:
        parent: the previous block's digest, ROOT_DIGEST for block 0.
        tokens: the block's block_size token ids.
        extra: the block's identity bytes.
    """
    row = as_token_array(tokens).astype("<i4", copy=False)
    return hashlib.sha256(parent + struct.pack("<I", len(extra)) + extra + row.tobytes()).digest()


def prefix_digests(
    tokens: object, block_size: int, identity: Identity = NO_IDENTITY, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Digests of all full blocks of a request, in order.

    Args:
        tokens: the request's token ids from position 0.
        block_size: tokens of a block.
        identity: the request's.
        known: digests of the leading blocks, computed earlier; they are returned as they are.

    Cost: one SHA-256 over each block that `known` does not cover.
    """
    if block_size < 1:
        raise RequestError(f"block_size {block_size} must be at least 1 token")
    row = as_token_array(tokens)
    extras = identity.block_extras(block_size)
    digests = list(known[: len(row) // block_size])
    for block in range(len(digests), len(row) // block_size):
        parent = digests[-1] if digests else ROOT_DIGEST
        piece = row[block * block_size : (block + 1) * block_size]
        digests.append(block_digest(parent, piece, extras.get(block, b"")))
    return digests
