"""Digests and identity: the documented bytes, from every input type and every process."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastkv.core.digest import Identity, ImageSpan, as_token_array, prefix_digests
from fastkv.errors import RequestError

TOKENS = [1, 2, 3, 4, 5, 6, 7, 70_000, 9]


def test_prefix_digests_recomputed_with_hashlib_agree():
    identity = Identity(salt="s", lora="ad", lora_id=-7, images=(ImageSpan(b"pic", 5, 7),), weights_version="v2")
    parent = hashlib.sha256(b"fastkv-prefix-1").digest()
    root = b"S\x01\0\0\0s" + b"L\x02\0\0\0ad" + b"I\x08\0\0\0" + struct.pack("<q", -7) + b"W\x02\0\0\0v2"
    image = b"M" + struct.pack("<I", 11) + struct.pack("<II", 1, 2) + b"pic"
    want = []
    for extra, tokens in ((root, TOKENS[:4]), (image, TOKENS[4:8])):
        parent = hashlib.sha256(parent + struct.pack("<I", len(extra)) + extra + struct.pack("<4i", *tokens)).digest()
        want.append(parent)
    assert prefix_digests(TOKENS, 4, identity) == want


def test_prefix_digests_extended_keep_what_is_known():
    whole = prefix_digests(TOKENS, 2)
    assert prefix_digests(TOKENS, 2, known=whole[:2]) == whole
    assert prefix_digests(TOKENS[:5], 2) == whole[:2]
    assert prefix_digests(TOKENS, 2, known=[b"\1" * 32])[0] == b"\1" * 32


class _Tensor:
    def numpy(self) -> np.ndarray:
        return np.array(TOKENS, dtype=np.int64)


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        array("i", TOKENS),
        array("Q", TOKENS),
        _Tensor(),
        *(np.array(TOKENS, dtype=d) for d in ("int32", "int64", "uint32", "uint64", ">i4", ">i8")),
        np.array([x for t in TOKENS for x in (t, 0)])[::2],
    ],
)
def test_prefix_digests_do_not_depend_on_the_input_type(tokens):
    assert prefix_digests(tokens, 4) == prefix_digests(TOKENS, 4)


def test_prefix_digests_do_not_depend_on_the_process():
    code = f"from fastkv.core.digest import *; print(prefix_digests({TOKENS}, 4, Identity(salt='x'))[-1].hex())"
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert out.stdout.strip() == prefix_digests(TOKENS, 4, Identity(salt="x"))[-1].hex(), out.stderr


_TEXT = st.sampled_from(["", "S", "L", "a", "ab", "b", "\0"])
_IDENTITIES = st.builds(
    Identity,
    salt=_TEXT,
    lora=_TEXT,
    lora_id=st.integers(-1, 1),
    weights_version=_TEXT,
    images=st.sampled_from([(), (ImageSpan(b"M", 0, 1),), (ImageSpan(b"MM", 0, 1),), (ImageSpan(b"M", 1, 3),)]),
)


@given(_IDENTITIES, _IDENTITIES)
def test_identity_encoding_is_injective(first, second):
    assert (first == second) == (first.block_extras(4) == second.block_extras(4))


def test_identity_touches_only_the_blocks_it_concerns():
    plain = prefix_digests(range(16), 4)
    image = prefix_digests(range(16), 4, Identity(images=(ImageSpan(b"p", 9, 11),)))
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, True, False, False]
    salted = prefix_digests(range(16), 4, Identity(salt="s"))
    assert not set(plain) & set(salted)


@pytest.mark.parametrize(
    "build",
    [
        lambda: ImageSpan(b"", 0, 1),
        lambda: ImageSpan(b"x", 3, 3),
        lambda: ImageSpan(b"x", -1, 3),
        lambda: Identity(images=(ImageSpan(b"x", 0, 3), ImageSpan(b"y", 2, 4))),
        lambda: Identity(images=(ImageSpan(b"x", 5, 6), ImageSpan(b"y", 2, 4))),
        lambda: Identity(salt=3),
        lambda: Identity(lora_id=2**63),
    ],
)
def test_identity_that_makes_no_sense_is_refused(build):
    with pytest.raises(RequestError):
        build()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], "shape"),
        ([1.0], "dtype"),
        (np.array([True]), "dtype"),
        ([-5], "-5"),
        (np.array([2**31], dtype=np.uint64), "2147483648"),
        ([2**70], "row of integers|dtype"),
        ("abc", "tokenizer"),
        ([[1], [2, 3]], "row of integers"),
    ],
)
def test_as_token_array_bad_input_names_what_is_wrong(tokens, message):
    with pytest.raises(RequestError, match=message):
        as_token_array(tokens)


def test_as_token_array_contiguous_int32_is_not_copied():
    row = np.arange(5, dtype=np.int32)
    assert as_token_array(row) is row
    assert as_token_array([]).dtype == np.int32
