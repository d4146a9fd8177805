"""Caches, batches and queries for benchmarks/attention.py, in memory that the floor can read as bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from fastkv.core.dtype import STORAGE_DTYPES, ScaleKind, StorageDtype, parse_quant_type
from fastkv.ops import AttentionBatch, LayerCache, StaticScales

MODEL_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
BLOCK_SIZE = 64
COLD_BYTES = 64 << 20  # what must lie between two reads of the same bytes, for no cache to remember them
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an attention layer."""

    num_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int = 128  # of MLA: the first elements of a key row, which no tensor of its own holds
    is_latent: bool = False


GQA = Shape()
MLA = Shape(num_heads=16, kv_heads=1, head_dim=576, value_dim=512, is_latent=True)


def to_tensor(data: Bytes, dtype: str, shape: list[int]) -> Tensor:
    """A tensor over data's memory, not a copy."""
    return paddle.utils.dlpack.from_dlpack(data).view(dtype).reshape(shape)


def random_rows(shape: list[int], dtype: str) -> Tensor:
    """Normal random numbers in a model dtype."""
    return paddle.randn(shape, dtype="float32").astype(dtype)


def _fill(data: Bytes, pattern: Bytes) -> None:
    for start in range(0, len(data), len(pattern)):
        part = data[start : start + len(pattern)]
        part[:] = pattern[: len(part)]


def _pattern(storage: StorageDtype, dtype: str, rng: np.random.Generator) -> Bytes:
    """About a megabyte that decodes to numbers of ordinary size."""
    if storage.quant_type is None:
        values = paddle.to_tensor(rng.standard_normal(1 << 18).astype(np.float32)).astype(dtype)
        return values.view("uint8").numpy()
    codes = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
    if storage.bound == 448.0:  # float8: no NaN, and magnitudes around 1
        codes &= 0xBF
    return codes


@dataclass(slots=True)
class Layers:
    """Enough layers of one cache that reading one finds nothing of it in the CPU's caches.

    Attributes:
        dtype: the model's: what the name says, bfloat16 for quantised types.
        bytes_read: what one attention call has to read of a layer.
        memory: every layer's key (or latent) bytes, for the floor to read.
    """

    name: str
    shape: Shape
    num_blocks: int
    tokens: int
    dtype: str = field(init=False)
    layers: list[LayerCache] = field(init=False)
    memory: list[Bytes] = field(init=False)
    bytes_read: int = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        storage = STORAGE_DTYPES[None if self.name in MODEL_DTYPES else parse_quant_type(self.name)]
        self.dtype = MODEL_DTYPES.get(self.name, "bfloat16")
        stored = self.dtype if storage.quant_type is None else "uint8"
        item = {"float32": 4, "uint8": 1}.get(stored, 2)
        heads = self.shape.kv_heads
        dims = [self.shape.head_dim] if self.shape.is_latent else [self.shape.head_dim, self.shape.value_dim]
        row_bytes = [dim // storage.elements_per_byte * item for dim in dims]
        self.bytes_read = self.tokens * heads * sum(row_bytes)
        if storage.scales is ScaleKind.DYNAMIC:
            self.bytes_read += self.tokens * heads * 4 * len(dims)
        count = 1 + COLD_BYTES // self.bytes_read
        rng = np.random.default_rng(0)
        pattern = _pattern(storage, self.dtype, rng)
        self.layers, self.memory = [], []
        for _ in range(count):
            tensors = []
            for size in row_bytes:
                data = np.empty(self.num_blocks * heads * BLOCK_SIZE * size, np.uint8)
                _fill(data, pattern)
                tensors.append(to_tensor(data, stored, [self.num_blocks, heads, BLOCK_SIZE, size // item]))
                if len(tensors) == 1:
                    self.memory.append(data)
            value = tensors[1] if len(tensors) == 2 else None
            self.layers.append(LayerCache(storage, tensors[0], value, *self._scales(storage, dims, rng)))

    def _scales(
        self, storage: StorageDtype, dims: list[int], rng: np.random.Generator
    ) -> tuple[Tensor | None, Tensor | None, StaticScales | None]:
        heads = self.shape.kv_heads
        if storage.scales is ScaleKind.NONE:
            return None, None, None
        if storage.scales is ScaleKind.DYNAMIC:
            scale = rng.uniform(0.005, 0.01, (self.num_blocks, heads, BLOCK_SIZE)).astype(np.float32)
            return paddle.to_tensor(scale), paddle.to_tensor(scale), None
        sizes = [1] if self.shape.is_latent else [heads * dim for dim in dims]
        scales = [(rng.uniform(2.0, 4.0, size) / storage.bound).astype(np.float32) for size in sizes]
        zeros = [rng.uniform(-1.0, 1.0, size).astype(np.float32) for size in sizes] if storage.has_zero_point else []
        pairs = [*scales, *[None] * (2 - len(scales)), *zeros]
        return None, None, StaticScales(*pairs)

    def take(self) -> LayerCache:
        """The layer that was read longest ago."""
        self._next = (self._next + 1) % len(self.layers)
        return self.layers[self._next]

    def take_memory(self) -> Bytes:
        """Key bytes of the layer that is read last of all."""
        return self.memory[self._next - 1]


def make_batch(batch: int, context: int, queries: int) -> tuple[AttentionBatch, int]:
    """`batch` requests of `context` cached tokens and `queries` new ones, in blocks scattered over the cache.

    Returns:
        The batch, and the number of blocks that it needs.
    """
    per_request = -(-(context + queries) // BLOCK_SIZE)
    num_blocks = per_request * batch
    tables = np.random.default_rng(1).permutation(num_blocks).astype(np.int32).reshape(batch, per_request)
    positions = np.arange(context, context + queries)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(batch + 1, dtype=np.int32) * queries
    lengths = np.full(batch, context, np.int32)
    return AttentionBatch.from_numpy(tables, starts, lengths, slots.reshape(-1)), num_blocks
