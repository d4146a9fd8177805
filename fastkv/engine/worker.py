"""The worker: a model and its caches. Carries out StepPlans; decides nothing.

Owns the model's weights and, under v0, the device caches (RunnerCache); under v1 the CacheController owns them, and
TierWorker moves blocks between its levels. Called through a transport, one message at a time.

A step's copies start before its first layer. Attention of a layer waits until the step's loads have landed in that
layer; later layers still move meanwhile. If a load fails, the step ends at once and its result says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor

from fastkv import CacheController, Config, RunnerCache, load_static_scales
from fastkv.core.messages import (
    INT64,
    AnyMessage,
    Done,
    Failure,
    Poll,
    ResetCache,
    SetWeightsVersion,
    Shutdown,
    Sleep,
    StepPlan,
    StepResult,
    Wake,
    WorkerReady,
    unpack,
)
from fastkv.core.transfers import TransferAck
from fastkv.engine.interrupts import interruptible
from fastkv.engine.model import AnyAttend, CausalModel, load_model
from fastkv.engine.sampler import sample_rows
from fastkv.engine.tier_worker import TierWorker
from fastkv.errors import ConfigError, FastKVError, InvariantError, TransferError
from fastkv.ops import AttentionBatch, LayerCache
from fastkv.worker.storage_access import open_storage, storage_namespace
from fastkv.worker.tensors import check_device, device_capacity_bytes
from fastkv.worker.ticket import Ticket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StepTensors:
    """A StepPlan's arrays as tensors."""

    token_ids: Tensor
    positions: Tensor
    batch: AttentionBatch
    last_rows: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan) -> _StepTensors:
        starts, contexts = unpack(plan.query_start), unpack(plan.context_lens)
        lengths = np.diff(starts)
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1] - contexts, lengths)
        tables = unpack(plan.block_tables).reshape(-1, plan.max_blocks)
        batch = AttentionBatch.from_numpy(tables, starts, contexts, unpack(plan.slot_mapping, INT64))
        return cls(
            paddle.to_tensor(unpack(plan.token_ids).astype(np.int64)),
            paddle.to_tensor(positions.astype(np.int64)),
            batch,
            starts[1:] - 1,
        )


class ModelWorker:
    """One rank's model and caches.

    Args:
        config: decides everything.
        rank: tensor-parallel rank.

    Raises:
        ConfigError: model, scales or memory do not fit the config; nothing is left allocated.
        StorageError: another process stores under the same names, or the disk failed.
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        self.config = config
        self.device = check_device(config.device.type)
        self.model: CausalModel = load_model(config)
        scales = load_static_scales(config, rank, self.model.revision)
        plan = config.capacity_plan(device_capacity_bytes(self.device))
        self.caches: RunnerCache | CacheController
        if config.cache.manager == "v0":
            self.caches = RunnerCache(config.cache_spec(), plan.num_device_blocks, self.device, scales)
        else:
            self.caches = CacheController(config, rank, self.device, scales)
            self.caches.initialize_all(plan.num_device_blocks)
        self._tiers = TierWorker(self.caches) if isinstance(self.caches, CacheController) else None
        spec = self.caches.spec
        self._layers: list[LayerCache] = [self.caches.layer_cache(layer) for layer in spec.group("main").layers]
        self.ready = WorkerReady(
            num_device_blocks=self.caches.num_blocks,
            num_host_blocks=plan.num_host_blocks,
            storage_dtype=str(self._layers[0].key.dtype).removeprefix("paddle."),
            device_cache_bytes=self.caches.group_bytes("main"),
            mtp_cache_bytes=self.caches.group_bytes("mtp"),
            host_cache_bytes=self.caches.host_bytes,
            vocab_size=self.model.vocab_size,
            weights_fingerprint=self.model.revision,
            storage_namespace=self._open_storage(rank),
        )

    def _open_storage(self, rank: int) -> bytes:
        """Attach the storage that the config names; what its records belong to, b"" without."""
        if self.config.storage is None or not isinstance(self.caches, CacheController):
            return b""
        geometry = getattr(self.model, "geometry", None)
        rope = {"theta": float(getattr(geometry, "rope_theta", 0.0))}
        namespace = storage_namespace(self.config, self.model.revision, rope)
        access = open_storage(self.config, namespace, rank)
        try:
            self.caches.attach_storage(access)
        except BaseException:
            access.close()  # or this process would own the store for good
            raise
        return namespace.to_json()

    def handle(self, message: AnyMessage) -> AnyMessage:
        """Carry out one message. Every error becomes a Failure, so that the engine hears of it."""
        plan_id = getattr(message, "plan_id", 0)
        try:
            if isinstance(message, StepPlan):
                return self._step(message)
            if isinstance(message, ResetCache):
                self.caches.reset_cache()
                return Done(plan_id)
            if isinstance(message, Shutdown):
                self._shut_down()
                return Done(plan_id)
            if isinstance(message, (Poll, SetWeightsVersion, Sleep, Wake)):
                return self._tier_worker().handle(message)
            raise InvariantError(f"a worker does not take a {type(message).__name__}")
        except FastKVError as error:
            return Failure(plan_id, type(error).__name__, str(error))
        except Exception as error:  # the top of the worker: nothing may get lost between two processes
            return Failure(plan_id, "WorkerError", f"step {plan_id} failed: {type(error).__name__}: {error}")

    def _step(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        # First of all: whatever fails later, these copies are under way and will be acknowledged.
        loads = self._tier_worker().start(plan.transfers, plan.loads) if plan.transfers else []
        try:
            with interruptible():  # nothing is half done: the caches are written again when the step is
                tokens = self._forward(plan, loads)
        except TransferError as error:
            log.warning("step %d is discarded: %s", plan.plan_id, error)
            return StepResult(plan.plan_id, b"", time.perf_counter() - start, self._acks(), is_discarded=True)
        return StepResult(plan.plan_id, tokens.tobytes(), time.perf_counter() - start, self._acks())

    def _forward(self, plan: StepPlan, loads: Sequence[Ticket]) -> np.ndarray:
        """Sampled tokens, int32 [batch]. Raises TransferError when a load did not land."""
        if isinstance(self.caches, CacheController) and self.caches.is_asleep:
            raise ConfigError("the caches are asleep; wake the engine before it runs")
        step = _StepTensors.of(plan)
        attend = self.model.paged_attend(self._layers, step.batch, self.config.model.dtype)
        hidden = self.model.forward(step.token_ids, step.positions, self._after_loads(attend, loads))
        if self._tiers is not None:
            self._tiers.wait_for(loads)  # layers that no attention of this step reads, MTP's, have landed too
        tokens = np.full(len(plan.sampling), -1, dtype=np.int32)
        rows = [row for row, params in enumerate(plan.sampling) if params is not None]
        if rows:
            logits = self.model.logits(hidden[paddle.to_tensor(step.last_rows[rows].astype(np.int64))])
            indices = unpack(plan.sampled_positions)[rows]
            params = [p for p in plan.sampling if p is not None]
            tokens[rows] = sample_rows(logits, params, indices.tolist())
        return tokens

    def _after_loads(self, attend: AnyAttend, loads: Sequence[Ticket]) -> AnyAttend:
        """Attention that waits, in each layer, for what the step's loads bring there."""
        controller = self.caches
        if not loads or not isinstance(controller, CacheController):
            return attend

        def waiting(layer: int, *tensors: Tensor) -> Tensor:
            for ticket in loads:
                controller.wait_for_layer(ticket, layer)
            return attend(layer, *tensors)

        return waiting

    def _acks(self) -> tuple[TransferAck, ...]:
        return () if self._tiers is None else self._tiers.acks()

    def _tier_worker(self) -> TierWorker:
        if self._tiers is None:
            raise InvariantError("cache.manager v0 has no levels below the device")
        return self._tiers

    def _shut_down(self) -> None:
        if self._tiers is None:
            self.caches.free_cache()
        else:
            self._tiers.close()
        self._layers = []
