"""The same attention in other libraries: Paddle's own operations, and torch's SDPA where torch is installed.

A peer gets its keys and values contiguous and in its own favourite shape, queries of one kv head grouped, no paging and
no quantisation: what it can do at best. Layers are not rotated; the sizes of the grid do not fit a cache but for the
smallest.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import paddle
from attention_cases import MODEL_DTYPES, Shape

MAX_BYTES = 1 << 30  # a peer's keys and values, beside our own


@dataclass(frozen=True, slots=True)
class Rival:
    """One library's way to compute a row."""

    name: str
    call: Callable[[], object]

    def sample(self) -> list[float]:
        """Seconds of one call."""
        start = perf_counter()
        self.call()
        return [perf_counter() - start]


def installed() -> list[str]:
    """Names of the peers that can be measured."""
    return ["paddle", *(["torch"] if importlib.util.find_spec("torch") else [])]


def attention(kind: str, batch: int, context: int, queries: int, shape: Shape) -> list[Rival]:
    """Rivals for one row; none for quantised types and latent caches, which nobody here has."""
    if kind not in MODEL_DTYPES or shape.is_latent:
        return []
    keys = context + queries
    if 8 * batch * keys * shape.kv_heads * shape.head_dim > MAX_BYTES or queries > 2048:
        return []
    rivals = []
    if kind == "f32":  # Paddle has no CPU kernels of the half types
        rivals.append(Rival("paddle", _paddle(batch, keys, queries, shape)))
    if "torch" in installed():
        rivals.append(Rival("torch", _torch(MODEL_DTYPES[kind], batch, keys, queries, shape)))
    return rivals


def _paddle(batch: int, keys: int, queries: int, shape: Shape) -> Callable[[], object]:
    group = shape.num_heads // shape.kv_heads
    q = paddle.randn([batch * shape.kv_heads, group * queries, shape.head_dim]) * shape.head_dim**-0.5
    k = paddle.randn([batch * shape.kv_heads, keys, shape.head_dim])
    v = paddle.randn([batch * shape.kv_heads, keys, shape.value_dim])
    mask = None
    if queries > 1:
        mask = paddle.tril(paddle.ones([queries, keys]), keys - queries).log().tile([group, 1])

    def call() -> object:
        scores = paddle.matmul(q, k, transpose_y=True)
        return paddle.matmul(paddle.nn.functional.softmax(scores if mask is None else scores + mask), v)

    return call


def _torch(dtype: str, batch: int, keys: int, queries: int, shape: Shape) -> Callable[[], object]:
    import torch

    torch_dtype: Any = getattr(torch, dtype)
    k, v = (torch.randn(batch, shape.kv_heads, keys, shape.head_dim).to(torch_dtype) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    if queries == 1:  # the query heads of one kv head are rows of one product
        q = torch.randn(batch, shape.kv_heads, shape.num_heads // shape.kv_heads, shape.head_dim).to(torch_dtype)
        return lambda: attend(q, k, v)
    q = torch.randn(batch, shape.num_heads, queries, shape.head_dim).to(torch_dtype)
    k, v = (x.repeat_interleave(shape.num_heads // shape.kv_heads, 1) for x in (k, v))
    return lambda: attend(q, k, v, is_causal=True)
