"""v1: CacheController owns the main, MTP and host caches of one rank.

It carries out and never decides: dtypes and shapes come from the config's CacheSpec, block counts from its capacity
plan (or from the caller, once profiled). It also owns the static scales.

    made -> initialize_kv_cache -> [initialize_mtp_kv_cache] -> [initialize_host_cache] -> in use
      ^                                                                                      |
      +------------------------------------- free_cache -------------------------------------+
"""

from __future__ import annotations

import paddle

from fastkv.config import Config
from fastkv.core.spec import Level, Role
from fastkv.errors import ConfigError
from fastkv.ops import LayerCache
from fastkv.worker.device_caches import DeviceCaches
from fastkv.worker.static_scales import LayerScales, load_static_scales
from fastkv.worker.tensors import ByteArray, allocate_host_records

_NAMES = {
    Role.KEY: "key_caches",
    Role.VALUE: "value_caches",
    Role.KEY_SCALE: "key_cache_scales",
    Role.VALUE_SCALE: "value_cache_scales",
    Role.LATENT: "latent_caches",
    Role.INDEXER: "indexer_caches",
}


class CacheController:
    """Caches of one rank.

    Args:
        config: decides everything; its cache.manager must be v1.
        rank: tensor-parallel rank.
        device: "cpu", "gpu" or "gpu:N".
        static_scales: of this rank; None loads config.cache.scales_file when one is named.

    Raises:
        ConfigError: v0 config, unknown rank or device, a scales file that does not fit.
    """

    def __init__(
        self, config: Config, rank: int = 0, device: str = "cpu", static_scales: LayerScales | None = None
    ) -> None:
        if config.cache.manager != "v1":
            raise ConfigError(
                f"cache.manager is {config.cache.manager}: there the model runner owns its caches (RunnerCache); "
                "set cache.manager: v1 for a CacheController"
            )
        if not 0 <= rank < config.parallel.tensor_parallel_size:
            raise ConfigError(f"rank {rank} is not in [0, {config.parallel.tensor_parallel_size})")
        self.config = config
        self.rank = rank
        self.spec = config.cache_spec()
        self._plan = config.capacity_plan()
        if static_scales is None and config.cache.scales_file is not None:
            static_scales = load_static_scales(config, rank)
        self._caches = DeviceCaches(self.spec, device, static_scales)
        self._num_blocks = 0
        self._host: ByteArray | None = None

    @property
    def num_blocks(self) -> int:
        """Device blocks of the pool; 0 before initialize_kv_cache."""
        return self._num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Records of the host pool; 0 without one."""
        return 0 if self._host is None else len(self._host)

    @property
    def host_records(self) -> ByteArray:
        """uint8 [num_host_blocks, record_stride_bytes]: a block is one contiguous record.

        Raises:
            ConfigError: there is no host cache.
        """
        if self._host is None:
            raise ConfigError("there is no host cache; set cache.host_memory and call initialize_host_cache")
        return self._host

    def initialize_kv_cache(self, num_blocks: int | None = None) -> None:
        """Allocate the main model's device caches, zero-filled.

        Args:
            num_blocks: blocks of the pool (for example the minimum over ranks); None takes the capacity plan's.

        Raises:
            ConfigError: initialised already, or not enough memory.
        """
        blocks = self._plan.num_device_blocks if num_blocks is None else num_blocks
        self._caches.allocate("main", blocks)
        self._num_blocks = blocks

    def initialize_mtp_kv_cache(self) -> None:
        """Allocate the MTP layers' device caches for the same pool (times the group's expand ratio).

        Raises:
            ConfigError: no speculation configured, no main cache yet, initialised already, or not enough memory.
        """
        self.spec.group("mtp")
        if not self._num_blocks:
            raise ConfigError("call initialize_kv_cache first: main and MTP caches share block ids")
        self._caches.allocate("mtp", self._num_blocks)

    def initialize_host_cache(self, num_blocks: int | None = None) -> None:
        """Allocate the host pool that blocks are swapped to: main and MTP layers in one record a block.

        Args:
            num_blocks: records; None takes the capacity plan's. 0 allocates nothing.

        Raises:
            ConfigError: initialised already, a negative count, or not enough memory.
        """
        blocks = self._plan.num_host_blocks if num_blocks is None else num_blocks
        if blocks < 0:
            raise ConfigError(f"num_host_blocks must not be negative, got {blocks}")
        if self._host is not None:
            raise ConfigError("the host cache is initialised already; call free_cache before initialising again")
        if blocks:
            self._host = allocate_host_records(self.spec, blocks, pinned=self._caches.device != "cpu")

    def initialize_all(self, num_blocks: int | None = None) -> None:
        """Allocate everything that the config asks for: main, MTP if it speculates, host if it has memory."""
        self.initialize_kv_cache(num_blocks)
        if self.spec.has_mtp:
            self.initialize_mtp_kv_cache()
        self.initialize_host_cache()

    def get_kv_caches(self) -> dict[str, paddle.Tensor]:
        """Every allocated device tensor by its name, for example "key_caches_0_rank0.device0".

        Raises:
            ConfigError: the main caches are not initialised.
        """
        index = self._caches.device.partition(":")[2] or "0"
        main = self._caches.tensors("main")
        mtp = self._caches.tensors("mtp") if self._caches.group_bytes("mtp") else {}
        return {
            f"{_NAMES[role]}_{layer}_rank{self.rank}.device{index}": tensor
            for (layer, role), tensor in (main | mtp).items()
        }

    def layer_cache(self, layer: int) -> LayerCache:
        """What attention needs of one layer (global id; MTP layers follow the main model's)."""
        return self._caches.layer_cache(layer)

    def group_bytes(self, group: str) -> int:
        """Device bytes that a group's tensors hold; 0 while it is not allocated."""
        return self._caches.group_bytes(group)

    @property
    def host_bytes(self) -> int:
        """Payload bytes of the host pool (allocated bytes are host_records.nbytes)."""
        return self.spec.payload_bytes(Level.HOST, self.num_host_blocks)

    def reset_cache(self) -> None:
        """Zero device and host caches, in place: addresses stay."""
        self._caches.zero()
        if self._host is not None:
            self._host[:] = 0

    def free_cache(self) -> None:
        """Drop device and host caches; static scales stay. Afterwards they can be initialised again."""
        self._caches.free()
        self._host = None
        self._num_blocks = 0
