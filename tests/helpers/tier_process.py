"""Run as `python -m helpers.tier_process FOLDER`: another process that takes records out of FOLDER and checks them.

For every case of CASES it opens the store that its parent filled, brings the records through the host to poisoned
device blocks and prints what is wrong; the last line is "checked N".
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from fastkv.engine.runtime_env import prepare_runtime

prepare_runtime()

from helpers.copies import legal_pairs, poison, wrong_pieces  # noqa: E402 - after the environment is set
from helpers.toy import toy_data  # noqa: E402

from fastkv import CacheController, Config, parse_config  # noqa: E402
from fastkv.core.spec import Level  # noqa: E402
from fastkv.core.transfers import TransferPlan, stage_of  # noqa: E402
from fastkv.storage.namespace import StorageNamespace  # noqa: E402
from fastkv.worker.storage_access import open_storage  # noqa: E402

CASES = [(*pair, tp_size, rank) for pair in legal_pairs() for tp_size, rank in ((1, 0), (2, 0), (2, 1))]
"""(attention, kv_cache_quant_type, ranks, rank)."""
DIGESTS = [hashlib.sha256(bytes([block])).digest() for block in range(4)]


def case_config(folder: Path, attention: str, quant_type: str, tp_size: int) -> Config:
    """The toy with MTP on that many ranks, storing into folder."""
    data = toy_data(attention, quant_type=quant_type, tp_size=tp_size)
    data["storage"] = {"path": str(folder), "max_bytes": "64MiB", "segment_bytes": "1MiB", "get_timeout_s": 20}
    return parse_config(data)


def case_namespace(config: Config) -> StorageNamespace:
    """As storage_namespace, with a made-up digest where static scales would be needed."""
    spec = config.cache_spec()
    scales = "made-up" if spec.storage.scales.value == "static" else ""
    return StorageNamespace.from_spec(spec, model=config.model.name, revision="r", scales_digest=scales)


def opened(config: Config, rank: int) -> CacheController:
    """A controller of the case with storage attached."""
    controller = CacheController(config, rank)
    controller.initialize_all()
    controller.attach_storage(open_storage(config, case_namespace(config), rank))
    return controller


def main(folder: Path) -> int:
    """Check all cases."""
    for *case, rank in CASES:
        controller = opened(case_config(folder, *case), rank)
        poison(controller)
        fetch = stage_of(Level.STORAGE, Level.HOST, destination_ids=[2, 0], digests=DIGESTS[1:3])
        load = stage_of(Level.HOST, Level.DEVICE, [2, 0], [0, 3])
        ack = controller.submit(TransferPlan(1, (fetch, load))).wait(30)
        wrong = wrong_pieces(controller, {0: 1, 3: 2, 1: None, 2: None})
        if ack.failure is not None or wrong:
            print(*case, rank, ack, wrong)
        storage = controller.storage
        controller.free_cache()
        assert storage is not None
        storage.close()
    print(f"checked {len(CASES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
