"""Whole host records through the file backend: every (group, layer, role) of every legal storage type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.storage_cases import GQA, MLA, MTP, Record, digest, pattern, poisoned, store_config

from fastkv.core.dtype import STORAGE_DTYPES, AttentionKind, ScaleKind
from fastkv.core.geometry import AttentionGeometry
from fastkv.core.spec import CacheSpec
from fastkv.storage import StorageNamespace, open_connector
from fastkv.storage.base import NO_DEADLINE, PutOutcome

DSA = AttentionGeometry(AttentionKind.DSA, num_layers=2, kv_lora_rank=128, qk_rope_head_dim=16, index_head_dim=128)
CASES = [
    (geometry, row.name)
    for geometry in (GQA, MLA, DSA)
    for row in STORAGE_DTYPES.values()
    if row.is_legal_with(geometry.kind)
]


def filled(spec: CacheSpec, block: int, rank: int) -> Record:
    """A record in which every part holds its own bytes, and the padding between them zeros."""
    record = np.zeros(spec.record_stride_bytes, np.uint8)
    for part in spec.record_parts:
        name = (part.group, part.layer, part.role.role.value, block, rank)
        record[part.offset : part.offset + part.nbytes] = pattern(name, part.nbytes)
    return record


@pytest.mark.parametrize(("geometry", "quant_type"), CASES, ids=[f"{g.kind.value}-{name}" for g, name in CASES])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_part_of_every_storage_type_survives_a_restart(
    tmp_path: Path, geometry: AttentionGeometry, quant_type: str, tp_size: int
) -> None:
    mtp = MTP if geometry is GQA else None
    spec = CacheSpec.build(
        geometry, model_dtype="bfloat16", kv_cache_quant_type=quant_type, block_size=4, mtp=mtp, tp_size=tp_size
    )
    scales = "digest" if spec.storage.scales is ScaleKind.STATIC else ""
    space = StorageNamespace.from_spec(spec, model="toy", scales_digest=scales)
    config = store_config(tmp_path, space, records=4)
    blocks = [digest(block) for block in range(4)]
    writers = range(space.num_writers)
    for rank in writers:
        connector = open_connector(config, space, rank)
        records = [filled(spec, block, rank) for block in range(4)]
        assert connector.put(blocks, records, NO_DEADLINE) == (PutOutcome.STORED,) * 4
        connector.close()
    for rank in range(tp_size):
        connector = open_connector(config, space, rank)
        buffers = poisoned(4, space.record_bytes)
        assert all(outcome.is_hit for outcome in connector.get_into(blocks, buffers, NO_DEADLINE))
        for block, buffer in enumerate(buffers):
            np.testing.assert_array_equal(buffer, filled(spec, block, rank if rank in writers else 0))
        connector.close()
