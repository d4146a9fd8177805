"""v1: CacheController owns the main, MTP and host caches of one rank, and the copies between them and storage.

It carries out and never decides: dtypes and shapes come from the config's CacheSpec, block counts from its capacity
plan (or from the caller, once profiled), copies from the scheduler's transfer plans. It also owns the static scales.

    made -> initialize_kv_cache -> [initialize_mtp_kv_cache] -> [initialize_host_cache] -> in use <--wake-- asleep
      ^                                                                                    |  '---sleep------^
      +------------------------------------- free_cache -----------------------------------+

Memory never goes away under a copy: whatever zeroes, frees or releases it waits for copies in flight first, and raises
TransferError if they do not end.
"""

from __future__ import annotations

from collections.abc import Callable

import paddle

from fastkv.config import Config
from fastkv.core.spec import Level, Role
from fastkv.core.transfers import TransferAck, TransferPlan
from fastkv.errors import ConfigError, TransferError
from fastkv.ops import LayerCache
from fastkv.worker.copy_engine import CopyEngine
from fastkv.worker.device_caches import DeviceCaches
from fastkv.worker.memory import release_array, release_tensors
from fastkv.worker.records import BlockCopier, RecordCopier
from fastkv.worker.static_scales import LayerScales, load_static_scales
from fastkv.worker.storage_access import StorageAccess
from fastkv.worker.tensors import (
    ByteArray,
    allocate_host_records,
    check_device,
    check_fits,
    device_capacity_bytes,
)
from fastkv.worker.ticket import Ticket

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
        wrap_copier: puts something around what copies blocks, to measure it or to make it fail.

    Raises:
        ConfigError: v0 config, unknown rank or device, a scales file that does not fit.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        device: str = "cpu",
        static_scales: LayerScales | None = None,
        wrap_copier: Callable[[BlockCopier], BlockCopier] | None = None,
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
        self._plan = config.capacity_plan(device_capacity_bytes(check_device(device)))
        if static_scales is None and config.cache.scales_file is not None:
            static_scales = load_static_scales(config, rank)
        self._caches = DeviceCaches(self.spec, device, static_scales)
        self._num_blocks = 0
        self._host: ByteArray | None = None
        self._storage: StorageAccess | None = None
        self._copier: RecordCopier | None = None
        self._engine: CopyEngine | None = None
        self._wrap_copier = wrap_copier
        self._is_asleep = False

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
            nbytes = blocks * self.spec.record_stride_bytes
            if self._caches.device == "cpu":
                nbytes += self.spec.payload_bytes(Level.DEVICE, self._num_blocks)
            what, remedy = (
                f"{blocks} host blocks, with the device caches,",
                "lower cache.host_memory or num_host_blocks",
            )
            check_fits(nbytes, device_capacity_bytes("cpu"), what, remedy)
            self._host = allocate_host_records(self.spec, blocks, pinned=self._caches.device != "cpu")

    def initialize_all(self, num_blocks: int | None = None) -> None:
        """Allocate everything that the config asks for: main, MTP if it speculates, host if it has memory. All or none.

        Raises:
            ConfigError: initialised already, or not enough memory for all of them together.
        """
        if self._host is not None:
            self.initialize_host_cache()  # refuses
        self.initialize_kv_cache(num_blocks)
        try:
            if self.spec.has_mtp:
                self.initialize_mtp_kv_cache()
            self.initialize_host_cache()
        except BaseException:
            self.free_cache()  # it holds nothing but what was allocated here
            raise

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

    # -- copies between levels ----------------------------------------------------------------------------------

    def attach_storage(self, storage: StorageAccess) -> None:
        """Let plans move records to and from storage. Whoever made the access closes it, after free_cache.

        Raises:
            ConfigError: no host cache, or plans were submitted already.
        """
        if self._host is None:
            raise ConfigError(
                f"storage: records pass through the host cache, and it has no block of {self.spec.record_stride_bytes} "
                "bytes; raise cache.host_memory or remove the storage section (call initialize_host_cache first)"
            )
        if self._engine is not None:
            raise ConfigError("attach storage before the first submit")
        self._storage = storage

    @property
    def storage(self) -> StorageAccess | None:
        """The attached storage."""
        return self._storage

    def submit(self, plan: TransferPlan) -> Ticket:
        """Start a transfer plan; it runs beside whatever else runs.

        Raises:
            ConfigError: no host cache, or a group's device caches are not initialised.
            InvariantError: a plan that cannot be carried out (levels, ids).
            TransferError: the caches are asleep, or the plan needs storage and there is none.
        """
        if self._is_asleep:
            raise TransferError(f"transfer plan {plan.plan_id}: the caches are asleep; wake them first")
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine.submit(plan)

    def wait_for_layer(self, ticket: Ticket, layer: int) -> None:
        """Return when a load has landed in this layer (global id; MTP layers follow the main model's).

        Raises:
            TransferError: the load failed or stalls past cache.transfer_timeout_s: discard the step.
        """
        ticket.wait_for_layer(layer, self.config.cache.transfer_timeout_s)

    def take_acks(self, wait_s: float = 0.0) -> list[TransferAck]:
        """Acknowledgements of plans that ended since the last call; waits up to wait_s for the first."""
        return [] if self._engine is None else self._engine.take_acks(wait_s)

    @property
    def num_unfinished(self) -> int:
        """Plans under way."""
        return 0 if self._engine is None else self._engine.num_unfinished

    def reset_cache(self) -> None:
        """Zero device and host caches, in place: addresses stay.

        Raises:
            TransferError: copies in flight do not end; nothing was zeroed.
        """
        self._drain("reset")
        self._caches.zero()
        if self._host is not None:
            self._host[:] = 0

    def sleep(self, *, release_host: bool = False) -> None:
        """Give the device caches' memory back to the system, and the host cache's if asked. Static scales stay.

        What the caches held is lost; tensors keep their addresses. Legal twice.

        Raises:
            ConfigError: a GPU's memory cannot be given back and keep its address.
            TransferError: copies in flight do not end; nothing was released.
        """
        if self._caches.device != "cpu":
            raise ConfigError(
                f"sleep is for device cpu; {self._caches.device} memory can only be freed: use free_cache"
            )
        self._drain("sleep")
        for group in self.spec.groups:
            if self._caches.group_bytes(group.name):
                release_tensors(self._caches.tensors(group.name).values())
        if release_host and self._host is not None:
            release_array(self._host)
        self._is_asleep = True

    def wake(self) -> None:
        """Use the caches again; those that were released are zero-filled, at the addresses that they had."""
        self._is_asleep = False

    @property
    def is_asleep(self) -> bool:
        """Between sleep and wake: nothing may be copied or computed."""
        return self._is_asleep

    def free_cache(self) -> None:
        """Drop device and host caches; static scales stay. Afterwards they can be initialised again.

        Raises:
            TransferError: copies in flight do not end; nothing was dropped.
        """
        self._drain("free")
        if self._engine is not None and not self._engine.close(self.config.cache.transfer_timeout_s):
            raise TransferError("cannot free the caches: the threads that copy do not end")
        if self._copier is not None:
            self._copier.close()
        self._engine = self._copier = self._storage = self._host = None
        self._caches.free()
        self._num_blocks = 0
        self._is_asleep = False

    def _make_engine(self) -> CopyEngine:
        host = self.host_records
        tensors = {key: value for group in self.spec.groups for key, value in self._caches.tensors(group.name).items()}
        self._copier = RecordCopier(self.spec, tensors, self._num_blocks, host, self.config.cache.copy_threads)
        copier: BlockCopier = self._copier if self._wrap_copier is None else self._wrap_copier(self._copier)
        return CopyEngine(copier, host, self._num_blocks, self.rank, self._storage)

    def _drain(self, what: str) -> None:
        if self._engine is not None and not self._engine.drain(self.config.cache.transfer_timeout_s):
            raise TransferError(
                f"cannot {what} the caches: {self._engine.num_unfinished} transfers do not end within "
                f"{self.config.cache.transfer_timeout_s:g} s"
            )
