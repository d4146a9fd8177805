"""v0: the model runner owns its device caches.

A runner that manages its own memory asks for the flat list of tensors that engines of this family hand to their
attention layers. What it gets is byte for byte what the v1 controller would have allocated: both allocate from one
CacheSpec through DeviceCaches. v0 has device caches only: no host level, no storage.
"""

from __future__ import annotations

import paddle

from fastkv.core.spec import CacheSpec
from fastkv.ops import LayerCache
from fastkv.worker.device_caches import DeviceCaches
from fastkv.worker.static_scales import LayerScales


class RunnerCache:
    """Device caches of one rank, main and MTP, owned by its model runner.

    Args:
        spec: what to allocate.
        num_blocks: blocks of the pool.
        device: "cpu", "gpu" or "gpu:N".
        static_scales: of this rank, as `load_static_scales` returns them; None when the type has none.

    Raises:
        ConfigError: a device that this Paddle cannot use, or not enough memory.
    """

    def __init__(
        self, spec: CacheSpec, num_blocks: int, device: str = "cpu", static_scales: LayerScales | None = None
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self._caches = DeviceCaches(spec, device, static_scales)
        for group in spec.groups:
            self._caches.allocate(group.name, num_blocks)

    def flat_list(self, group: str = "main") -> list[paddle.Tensor]:
        """Cache tensors of a group, layer after layer, each [num_blocks, ...] in its storage dtype.

        K, V at 2l, 2l+1; with dynamic scales K, V, K scale, V scale at 4l..4l+3; under MLA one latent a layer; under
        DSA key and indexer.

        Raises:
            ConfigError: the model has no such group.
        """
        return list(self._caches.tensors(group).values())

    def layer_cache(self, layer: int) -> LayerCache:
        """What attention needs of one layer (global id; MTP layers follow the main model's)."""
        return self._caches.layer_cache(layer)

    def group_bytes(self, group: str) -> int:
        """Bytes that the group's tensors hold; 0 for a group that this model has not."""
        return self._caches.group_bytes(group)

    @property
    def host_bytes(self) -> int:
        """Payload bytes of the host pool: v0 has none."""
        return 0

    def reset_cache(self) -> None:
        """Zero every cache tensor."""
        self._caches.zero()

    def free_cache(self) -> None:
        """Drop the tensors."""
        self._caches.free()
