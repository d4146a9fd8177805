"""Namespaces: every field that makes bytes interpretable changes the digest, nothing else does."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from helpers.storage_cases import GQA, MLA, MTP, digest, toy_namespace, toy_spec
from hypothesis import given
from hypothesis import strategies as st

from fastkv.core.dtype import ScaleGranularity
from fastkv.errors import ConfigError, InvariantError
from fastkv.storage.namespace import StorageNamespace, digest_scales

BASE = {
    "model": "toy",
    "revision": "r1",
    "weights_version": "w1",
    "mtp_weights_version": "m1",
    "rope": {"theta": 10000.0, "scaling": None},
}
QUANT = {"kv_cache_quant_type": "int8"}

DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what differs: (CacheSpec.build options, from_spec options)
    "model": ({}, {"model": "toy2"}),
    "revision": ({}, {"revision": "r2"}),
    "weights_version": ({}, {"weights_version": "w2"}),
    "mtp_weights_version": ({}, {"mtp_weights_version": "m2"}),
    "rope value": ({}, {"rope": {"theta": 20000.0, "scaling": None}}),
    "rope key": ({}, {"rope": {"theta": 10000.0, "scaling": None, "factor": 1.0}}),
    "logical dtype": ({"model_dtype": "float16"}, {}),
    "wider dtype": ({"model_dtype": "float32"}, {}),
    "quant type": (QUANT, {"scales_digest": "s1"}),
    "static scales": (QUANT, {"scales_digest": "s2"}),
    "scale granularity": ({**QUANT, "scale_granularity": ScaleGranularity.HEAD}, {"scales_digest": "s1"}),
    "same size, other type": ({"kv_cache_quant_type": "float8_e4m3fn"}, {"scales_digest": "s1"}),
    "block size": ({"block_size": 8}, {}),
    "layer count": ({"main": replace(GQA, num_layers=3)}, {}),
    "mtp layers": ({"mtp": MTP}, {}),
    "kv heads": ({"main": replace(GQA, num_kv_heads=4)}, {}),
    "head dim": ({"main": replace(GQA, head_dim=16)}, {}),
    "heads and dim swapped": ({"main": replace(GQA, num_kv_heads=4, head_dim=4)}, {}),
    "tp size": ({"tp_size": 2}, {}),
    "attention": ({"main": MLA}, {}),
}


def namespace(spec_options: dict[str, Any], options: dict[str, Any]) -> StorageNamespace:
    return StorageNamespace.from_spec(toy_spec(**spec_options), **{**BASE, **options})


def test_namespaces_that_differ_in_anything_have_different_digests() -> None:
    everything = {"same": ({}, {}), **DIFFERENT}
    found = {what: namespace(*options).digest for what, options in everything.items()}
    assert len(set(found.values())) == len(found)
    assert namespace({}, {}).digest == found["same"]


def test_namespace_fields_all_take_part_in_the_digest() -> None:
    """A field added later and left out of the encoding would mix bytes of two meanings."""
    base = namespace({}, {})
    changed: dict[str, object] = {
        "groups": base.groups[:0],
        "rope": (("theta", 1.0),),
        "is_replicated": True,
    }
    for field in fields(StorageNamespace):
        value = getattr(base, field.name)
        if field.name in changed:
            other = changed[field.name]
        else:
            other = f"{value}x" if isinstance(value, str) else value + 1
        assert replace(base, **{field.name: other}).digest != base.digest, field.name


def test_namespace_digest_is_recomputable_from_its_documentation() -> None:
    def u64(count: int) -> bytes:
        return struct.pack(">Q", count)

    def encode(value: Any) -> bytes:
        if isinstance(value, bool):
            return b"T" if value else b"F"
        if isinstance(value, int):
            return b"i" + u64(len(str(value))) + str(value).encode()
        if isinstance(value, float):
            return b"f" + struct.pack(">d", value)
        if isinstance(value, str):
            return b"s" + u64(len(value.encode())) + value.encode()
        if value is None:
            return b"N"
        items = value if isinstance(value, (list, tuple)) else [[f.name, getattr(value, f.name)] for f in fields(value)]
        return b"l" + u64(len(items)) + b"".join(encode(item) for item in items)

    space = namespace({"mtp": MTP}, {})
    assert space.digest == hashlib.sha256(b"fastkv.storage.namespace\x00" + encode(space)).digest()


@given(st.text(min_size=1), st.text(), st.text(min_size=1), st.text())
def test_namespace_strings_cannot_flow_into_each_other(model: str, revision: str, model2: str, revision2: str) -> None:
    """The classic collision: model "ab" revision "c" against model "a" revision "bc"."""
    base = toy_namespace()
    one, two = replace(base, model=model, revision=revision), replace(base, model=model2, revision=revision2)
    assert (one.digest == two.digest) == ((model, revision) == (model2, revision2))


def test_namespace_rope_numbers_of_two_types_are_one_value() -> None:
    rope = {"scaling": None, "theta": 10000}
    assert namespace({}, {"rope": rope}).digest == namespace({}, {}).digest


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0], {"a": 1}])
def test_namespace_rope_that_is_no_finite_scalar_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="theta"):
        namespace({}, {"rope": {"theta": value}})


def test_namespace_without_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model"):
        namespace({}, {"model": ""})


@pytest.mark.parametrize(("spec_options", "scales"), [(QUANT, ""), ({}, "s1")])
def test_namespace_scales_digest_must_fit_the_quantisation(spec_options: dict[str, Any], scales: str) -> None:
    with pytest.raises(ConfigError, match="scales digest"):
        namespace(spec_options, {"scales_digest": scales})


def test_namespace_new_weights_version_is_another_namespace() -> None:
    base = namespace({}, {})
    assert base.with_weights_version("w2").digest == namespace({}, {"weights_version": "w2"}).digest
    assert base.with_weights_version("w1", mtp_version=2).digest != base.digest


def test_namespace_json_round_trip_keeps_the_digest() -> None:
    space = namespace({"mtp": MTP, **QUANT}, {"scales_digest": "s1"})
    assert StorageNamespace.from_json(space.to_json()) == space
    assert StorageNamespace.from_json(space.to_json()).digest == space.digest


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"model": 3}', b"\xff"])
def test_namespace_from_broken_json_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="storage namespace"):
        StorageNamespace.from_json(data)


def test_record_key_has_a_rank_exactly_where_ranks_differ() -> None:
    sharded, replicated = toy_namespace(tp_size=2), toy_namespace(MLA, tp_size=2)
    name = digest("block")
    assert sharded.record_key(name, 0) != sharded.record_key(name, 1)
    assert sharded.record_key(name, 1) == sharded.digest + name + b"\x00\x00\x00\x01"
    assert replicated.record_key(name, 0) == replicated.record_key(name, 1) == replicated.digest + name
    assert (sharded.num_writers, replicated.num_writers) == (2, 1)


def test_record_key_of_a_bad_rank_or_digest_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        toy_namespace(tp_size=2).record_key(digest("block"), 2)
    with pytest.raises(InvariantError, match="32 bytes"):
        toy_namespace().record_key(b"short", 0)


def test_digest_scales_sees_names_shapes_dtypes_and_values() -> None:
    scale = np.arange(1, 5, dtype=np.float32)
    variants = [
        {"a": scale},
        {"b": scale},
        {"a": scale.reshape(2, 2)},
        {"a": scale.astype(np.float64)},
        {"a": scale + 1},
        {"a": scale, "b": scale},
        {},
    ]
    assert len({digest_scales(scales) for scales in variants}) == len(variants)
    assert digest_scales({"a": scale, "b": scale}) == digest_scales({"b": scale.copy(), "a": scale[::1]})
