"""AttentionGeometry: what the attention of one layer group looks like, before any storage is decided.

Made from the config, read by CacheSpec (spec.py) alone. Also says how many KV heads a tensor-parallel rank keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fastkv.core.dtype import AttentionKind
from fastkv.errors import ConfigError

DSA_SCALE_GROUP = 128  # DSA stores one float32 scale for each 128 fp8 values


def kv_heads_per_rank(num_kv_heads: int, tp_size: int) -> int:
    """KV heads that one tensor-parallel rank keeps: a share, or one replicated head.

    Raises:
        ConfigError: neither number divides the other.
    """
    if num_kv_heads < 1 or tp_size < 1:
        raise ConfigError(f"num_kv_heads {num_kv_heads} and tensor_parallel_size {tp_size} must be at least 1")
    if num_kv_heads % tp_size == 0:
        return num_kv_heads // tp_size
    if tp_size % num_kv_heads == 0:
        return 1
    raise ConfigError(
        f"num_kv_heads {num_kv_heads} and tensor_parallel_size {tp_size}: one must divide the other, "
        "or heads would be lost; choose another tensor_parallel_size"
    )


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The attention of one layer group, of the whole model (before tensor parallelism).

    Attributes:
        kind: decides which of the other fields matter.
        num_layers: layers in the group.
        num_kv_heads, head_dim: MHA and GQA.
        v_head_dim: MHA and GQA, when values are narrower or wider than keys; 0 means head_dim.
        kv_lora_rank, qk_rope_head_dim: MLA and DSA.
        index_head_dim: DSA's indexer.
    """

    kind: AttentionKind
    num_layers: int
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    index_head_dim: int = 0

    def __post_init__(self) -> None:
        needed = {
            AttentionKind.MHA: ("num_kv_heads", "head_dim"),
            AttentionKind.GQA: ("num_kv_heads", "head_dim"),
            AttentionKind.MLA: ("kv_lora_rank", "qk_rope_head_dim"),
            AttentionKind.DSA: ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"),
        }[self.kind]
        for name in ("num_layers", *needed):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.kind.value} attention needs {name} of at least 1, got {getattr(self, name)}")
        has_values = self.kind in (AttentionKind.MHA, AttentionKind.GQA)
        used = {"kind", "num_layers", *needed, *(("v_head_dim",) if has_values else ())}
        for given in fields(self):
            if given.name not in used and getattr(self, given.name):
                raise ConfigError(
                    f"{self.kind.value} attention has no {given.name}, got {getattr(self, given.name)}; "
                    "remove it or choose the attention that it belongs to"
                )
        if self.kind is AttentionKind.DSA:
            for name in ("kv_lora_rank", "index_head_dim"):
                if getattr(self, name) % DSA_SCALE_GROUP:
                    raise ConfigError(
                        f"dsa attention scales groups of {DSA_SCALE_GROUP} values; {name} {getattr(self, name)} "
                        f"must be a multiple of {DSA_SCALE_GROUP}"
                    )

    @property
    def value_dim(self) -> int:
        """head_dim of values."""
        return self.v_head_dim or self.head_dim

    @property
    def latent_dim(self) -> int:
        """Width of MLA's latent: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim
