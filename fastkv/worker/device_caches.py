"""Device caches of one rank: the tensors of each layer group, and the view of one layer that attention takes.

The part that v0 (RunnerCache) and v1 (CacheController) have in common, so that they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import paddle

from fastkv.core.dtype import AttentionKind, ScaleKind
from fastkv.core.scales import RoleScales
from fastkv.core.spec import CacheSpec, LayerGroup, Role
from fastkv.errors import ConfigError
from fastkv.ops import LayerCache, StaticScales
from fastkv.worker.static_scales import LayerScales
from fastkv.worker.tensors import CacheTensors, allocate_group, check_device, total_bytes, zero_tensors


class DeviceCaches:
    """Tensors of the layer groups that were allocated so far.

    Args:
        spec: what a block is.
        device: "cpu", "gpu" or "gpu:N".
        static_scales: of this rank; None when the type has none or attention does not run here.

    Raises:
        ConfigError: a device that this Paddle cannot use.
    """

    def __init__(self, spec: CacheSpec, device: str, static_scales: LayerScales | None) -> None:
        self.spec = spec
        self.device = check_device(device)
        self._scales = static_scales
        self._groups: dict[str, CacheTensors] = {}

    def allocate(self, group: str, pool_blocks: int) -> CacheTensors:
        """Allocate one group for a pool of pool_blocks.

        Raises:
            ConfigError: no such group, allocated already, or not enough memory.
        """
        layers = self._new_group(group)
        held_bytes = sum(self.group_bytes(name) for name in self._groups)
        self._groups[group] = allocate_group(layers, pool_blocks, self.device, held_bytes)
        return self._groups[group]

    def adopt(self, group: str, pool_blocks: int, tensors: CacheTensors) -> None:
        """Take tensors that somebody else allocated as the caches of one group.

        Args:
            group: which.
            pool_blocks: blocks of the pool.
            tensors: exactly the group's (layer, role) names; contiguous, in storage dtype and shape, on this device.

        Raises:
            ConfigError: no such group, allocated already, or a tensor is not what the spec says.
        """
        layers = self._new_group(group)
        wanted = {(layer, role.role): role for layer in layers.layers for role in layers.roles}
        if tensors.keys() != wanted.keys():
            raise ConfigError(f"the {group} caches have {len(wanted)} tensors, {len(tensors)} others were given")
        for (layer, name), role in wanted.items():
            tensor = tensors[layer, name]
            given = (str(tensor.dtype).removeprefix("paddle."), list(tensor.shape), _kind(tensor))
            needed = (role.dtype, list(role.shape(layers.num_blocks(pool_blocks))), self.device.partition(":")[0])
            if given != needed or not tensor.is_contiguous():
                raise ConfigError(
                    f"{group} layer {layer} {name.value} is {given[0]} {given[1]} on {given[2]}; kv_cache_quant_type "
                    f"{self.spec.storage.name} needs contiguous {needed[0]} {needed[1]} on {needed[2]}"
                )
        self._groups[group] = dict(tensors)

    def _new_group(self, group: str) -> LayerGroup:
        """The group, which has no tensors yet. Raises ConfigError otherwise."""
        layers = self.spec.group(group)
        if group in self._groups:
            raise ConfigError(f"the {group} caches are initialised already; free them before initialising again")
        return layers

    def tensors(self, group: str) -> CacheTensors:
        """(layer, role) -> tensor of an allocated group.

        Raises:
            ConfigError: no such group, or not allocated.
        """
        self.spec.group(group)
        if group not in self._groups:
            raise ConfigError(f"the {group} caches are not initialised")
        return self._groups[group]

    def layer_cache(self, layer: int) -> LayerCache:
        """What attention needs of one layer.

        Args:
            layer: global layer id; MTP layers follow the main model's.

        Raises:
            ConfigError: the layer is not allocated, or its type needs static scales and there are none.
        """
        group = next((g for g in self.spec.groups if layer in g.layers and g.name in self._groups), None)
        if group is None:
            raise ConfigError(f"layer {layer} has no allocated cache; initialise the group that it belongs to first")
        if self.spec.storage.scales is ScaleKind.STATIC and self._scales is None:
            raise ConfigError(
                f"kv_cache_quant_type {self.spec.storage.name} needs static scales before attention can run; set "
                "cache.scales_file (made by `fastkv calibrate`)"
            )
        if group.geometry.kind is AttentionKind.DSA:
            raise ConfigError(
                "dsa caches are allocated, sized and moved, but fastkv has no attention op for their format; "
                "take the tensors by name and run your own"
            )
        own = self._groups[group.name]
        return LayerCache(
            storage=self.spec.storage,
            key=own[(layer, Role.LATENT if (layer, Role.LATENT) in own else Role.KEY)],
            value=own.get((layer, Role.VALUE)),
            key_scale=own.get((layer, Role.KEY_SCALE)),
            value_scale=own.get((layer, Role.VALUE_SCALE)),
            static=_static_scales(self._scales[layer]) if self._scales is not None else None,
        )

    def group_bytes(self, group: str) -> int:
        """Bytes that the group's tensors hold, asked of the tensors; 0 while it is not allocated."""
        return total_bytes(self._groups.get(group, {}).values())

    def zero(self) -> None:
        """Fill every allocated tensor with zero bytes, in place."""
        for tensors in self._groups.values():
            zero_tensors(tensors.values())

    def free(self) -> None:
        """Drop all tensors; their memory goes when nobody else holds a view."""
        self._groups.clear()
        if self.device != "cpu":
            paddle.device.cuda.empty_cache()


def _kind(tensor: paddle.Tensor) -> str:
    return "cpu" if tensor.place.is_cpu_place() else "gpu"


def _static_scales(roles: Mapping[Role, RoleScales]) -> StaticScales:
    key = roles[Role.LATENT] if Role.LATENT in roles else roles[Role.KEY]
    value = roles.get(Role.VALUE)
    return StaticScales(
        key_scale=key.scale,
        value_scale=value.scale if value else None,
        key_zero_point=key.zero_point,
        value_zero_point=value.zero_point if value else None,
    )
