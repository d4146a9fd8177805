"""v0: the model runner owns its device caches.

A runner that manages its own memory asks for the flat list of tensors that engines of this family hand to their
attention layers. What it gets is byte for byte what the v1 controller would have allocated: both allocate from one
CacheSpec through DeviceCaches. v0 has device caches only: no host level, no storage. The memory may also be another
process's: then it is checked against the spec before anything runs on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from fastkv.core.spec import CacheSpec
from fastkv.errors import ConfigError
from fastkv.ops import LayerCache
from fastkv.worker.device_caches import DeviceCaches
from fastkv.worker.shared_caches import SharedCaches
from fastkv.worker.static_scales import LayerScales


class RunnerCache:
    """Device caches of one rank, main and MTP, owned by its model runner.

    Args:
        spec: what to allocate.
        num_blocks: blocks of the pool.
        device: "cpu", "gpu" or "gpu:N".
        static_scales: of this rank, as `load_static_scales` returns them; None when the type has none.
        share_as: name under which other processes may attach; "": memory of this process alone. CPU only.

    Raises:
        ConfigError: a device that this Paddle cannot use, not enough memory, or the name is taken.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        device: str = "cpu",
        static_scales: LayerScales | None = None,
        share_as: str = "",
    ) -> None:
        self._describe(spec, num_blocks, device, static_scales)
        if not share_as:
            for group in spec.groups:
                self._caches.allocate(group.name, num_blocks)
            return
        if device != "cpu":
            raise ConfigError(
                f"share_as works for caches on a CPU, not on {device}; pass the tensors on by Paddle's own means and "
                "take them with RunnerCache.attach_tensors"
            )
        self._adopt_shared(SharedCaches(share_as, spec, num_blocks, static_scales, owner=True))

    @classmethod
    def attach(
        cls, spec: CacheSpec, num_blocks: int, name: str, static_scales: LayerScales | None = None
    ) -> RunnerCache:
        """The caches that another process made with share_as=name, in CPU memory; both see each other's writes.

        Raises:
            ConfigError: nobody owns the name, or its caches differ from what this spec needs (both are named).
        """
        caches = cls.__new__(cls)
        caches._describe(spec, num_blocks, "cpu", static_scales)
        caches._adopt_shared(SharedCaches(name, spec, num_blocks, static_scales, owner=False))
        return caches

    @classmethod
    def attach_tensors(
        cls,
        spec: CacheSpec,
        num_blocks: int,
        tensors: Mapping[str, Sequence[paddle.Tensor]],
        device: str = "cpu",
        static_scales: LayerScales | None = None,
    ) -> RunnerCache:
        """Caches over tensors that somebody else allocated, for example received from another process on a GPU.

        Args:
            spec, num_blocks, device, static_scales: as for RunnerCache.
            tensors: for each group its tensors in the order of flat_list.

        Raises:
            ConfigError: a group or tensor is missing, or has another dtype, shape or place than the spec says.
        """
        caches = cls.__new__(cls)
        caches._describe(spec, num_blocks, device, static_scales)
        for group in spec.groups:
            names = [(layer, role.role) for layer in group.layers for role in group.roles]
            given = tensors.get(group.name, ())
            if len(given) != len(names):
                raise ConfigError(f"the {group.name} caches are {len(names)} tensors, {len(given)} were given")
            caches._caches.adopt(group.name, num_blocks, dict(zip(names, given, strict=True)))
        return caches

    def _describe(self, spec: CacheSpec, num_blocks: int, device: str, static_scales: LayerScales | None) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self._caches = DeviceCaches(spec, device, static_scales)
        self._shared: SharedCaches | None = None

    def _adopt_shared(self, shared: SharedCaches) -> None:
        self._shared = shared
        for group in self.spec.groups:
            self._caches.adopt(group.name, self.num_blocks, shared.tensors(group.name))

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
        """Drop the tensors, and the name that they are shared under; who is attached keeps the memory."""
        self._caches.free()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
