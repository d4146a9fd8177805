"""CacheController and RunnerCache: order of calls, names, reset, free, memory, static scales."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.toy import toy_config, toy_data

from fastkv import CacheController, Config, ConfigError, RunnerCache, load_static_scales, parse_config
from fastkv.core.scales import CalibrationRanges, ValueRange
from fastkv.core.spec import Role
from fastkv.worker.static_scales import read_scales_file, write_scales_file


def scales_file(folder: Path, *, layers: int = 3, heads: int = 2, model: str = "toy") -> Path:
    rng = np.random.default_rng(1)

    def one() -> ValueRange:
        shape = (heads, 8)
        return ValueRange(-rng.uniform(1, 2, shape).astype(np.float32), rng.uniform(1, 2, shape).astype(np.float32))

    ranges = {layer: {Role.KEY: one(), Role.VALUE: one()} for layer in range(layers)}
    path = folder / "scales.json"
    write_scales_file(path, CalibrationRanges(model, "abc", "max", 10, ranges))
    return path


def scaled_config(path: Path, **options: object) -> Config:
    return toy_config(quant_type="int8", scales_file=str(path), **options)  # type: ignore[arg-type]


def test_controller_names_carry_role_layer_rank_and_device() -> None:
    config = toy_config(quant_type="block_wise_fp8", tp_size=2)
    controller = CacheController(config, rank=1)
    controller.initialize_all()
    assert list(controller.get_kv_caches())[:5] == [
        "key_caches_0_rank1.device0",
        "value_caches_0_rank1.device0",
        "key_cache_scales_0_rank1.device0",
        "value_cache_scales_0_rank1.device0",
        "key_caches_1_rank1.device0",
    ]
    assert "key_caches_2_rank1.device0" in controller.get_kv_caches()  # the MTP layer follows the main model's


def test_runner_cache_flat_list_is_what_engines_of_this_family_expect() -> None:
    plain = RunnerCache(toy_config(manager="v0").cache_spec(), 4).flat_list()
    assert [list(t.shape) for t in plain] == [[4, 2, 4, 8]] * 4
    scaled = RunnerCache(toy_config(manager="v0", quant_type="block_wise_fp8").cache_spec(), 4).flat_list()
    assert [list(t.shape) for t in scaled] == [[4, 2, 4, 8], [4, 2, 4, 8], [4, 2, 4], [4, 2, 4]] * 2
    latent = RunnerCache(toy_config("mla", manager="v0").cache_spec(), 4).flat_list()
    assert [list(t.shape) for t in latent] == [[4, 1, 4, 24]] * 2
    with pytest.raises(ConfigError, match="no layer group 'draft'"):
        RunnerCache(toy_config(manager="v0").cache_spec(), 4).flat_list("draft")


def test_controller_calls_out_of_order_are_refused_and_change_nothing() -> None:
    controller = CacheController(toy_config())
    with pytest.raises(ConfigError, match="initialize_kv_cache first"):
        controller.initialize_mtp_kv_cache()
    with pytest.raises(ConfigError, match="not initialised"):
        controller.get_kv_caches()
    with pytest.raises(ConfigError, match="no host cache"):
        _ = controller.host_records
    controller.initialize_all()
    before = {name: tensor.data_ptr() for name, tensor in controller.get_kv_caches().items()}
    for again in (controller.initialize_kv_cache, controller.initialize_mtp_kv_cache, controller.initialize_host_cache):
        with pytest.raises(ConfigError, match="initialised already"):
            again()
    assert {name: tensor.data_ptr() for name, tensor in controller.get_kv_caches().items()} == before


@pytest.mark.parametrize(
    ("options", "rank", "device", "message"),
    [
        ({"manager": "v0"}, 0, "cpu", "set cache.manager: v1"),
        ({}, 1, "cpu", r"rank 1 is not in \[0, 1\)"),
        ({}, -1, "cpu", "rank -1"),
        ({}, 0, "tpu", "unknown device 'tpu'"),
        ({}, 0, "gpu:x", "unknown device 'gpu:x'"),
    ],
)
def test_controller_that_cannot_be_made_says_why(options: dict[str, str], rank: int, device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheController(toy_config(**options), rank, device)  # type: ignore[arg-type]


def test_controller_without_mtp_or_host_has_none() -> None:
    controller = CacheController(toy_config(mtp=False, num_host_blocks=0))
    controller.initialize_all()
    assert (controller.group_bytes("mtp"), controller.host_bytes, controller.num_host_blocks) == (0, 0, 0)
    with pytest.raises(ConfigError, match="no layer group 'mtp'"):
        controller.initialize_mtp_kv_cache()


def test_controller_reset_zeroes_in_place() -> None:
    controller = CacheController(toy_config(quant_type="block_wise_fp8"))
    controller.initialize_all()
    tensors = controller.get_kv_caches()
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor[...] = 1
    controller.host_records[:] = 1
    controller.reset_cache()
    assert all(not tensor.numpy().any() for tensor in controller.get_kv_caches().values())
    assert not controller.host_records.any()
    assert {name: tensor.data_ptr() for name, tensor in controller.get_kv_caches().items()} == addresses


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_initialise_and_free_ten_times_leaves_memory_flat() -> None:
    """FastDeploy#4212, kvcached#407: rebuilt caches leaked or ran into the old ones."""
    controller = CacheController(toy_config(num_device_blocks=40_000, num_host_blocks=20_000))

    def cycle() -> None:
        controller.initialize_all()
        for tensor in controller.get_kv_caches().values():
            tensor.zero_()  # touches every page
        controller.host_records[:] = 1
        controller.free_cache()
        gc.collect()

    cycle()
    before = resident_bytes()
    for _ in range(10):
        cycle()
    assert resident_bytes() - before < 16 << 20  # a leak of one cycle alone is 46 MB


def test_controller_too_large_for_the_machine_is_refused_before_a_crash() -> None:
    """Pages appear when they are touched, so the system would promise far more than there is, and kill us later."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    spec = toy_config(mtp=False).cache_spec()
    blocks = physical // spec.block_bytes + 1
    with pytest.raises(ConfigError, match="cannot give"):
        RunnerCache(spec, blocks)
    controller = CacheController(toy_config(mtp=False))
    with pytest.raises(ConfigError, match="cannot give"):
        controller.initialize_kv_cache(blocks)
    with pytest.raises(ConfigError, match="cannot give"):
        controller.initialize_host_cache(physical // spec.record_stride_bytes + 1)
    # Each alone would fit, both together do not.
    controller.initialize_kv_cache(int(0.6 * blocks))
    with pytest.raises(ConfigError, match="with the device caches"):
        controller.initialize_host_cache(int(0.6 * blocks))


def test_memory_of_a_kernel_without_huge_pages_is_only_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """madvise(MADV_HUGEPAGE) is EINVAL there, and every cache of 2 MiB was "more than this machine can give"."""

    class Plain(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    cache = RunnerCache(toy_config(mtp=False, manager="v0").cache_spec(), 40_000)
    assert cache.group_bytes("main") == 40_000 * cache.spec.block_bytes


def test_controller_that_could_not_initialise_everything_holds_nothing_and_can_try_again() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    config = toy_config(num_host_blocks=5)
    spec = config.cache_spec()
    controller = CacheController(config)
    fits_alone = int(0.9 * physical / spec.group("main").block_bytes)  # and MTP has half as many layers
    with pytest.raises(ConfigError, match="beside .* of the other caches"):
        controller.initialize_all(fits_alone)
    with pytest.raises(ConfigError, match="with the device caches"):
        controller.initialize_all(int(physical / spec.pool_block_bytes))
    assert (controller.num_blocks, controller.num_host_blocks) == (0, 0)
    assert controller.group_bytes("main") == controller.group_bytes("mtp") == 0
    controller.initialize_all()
    with pytest.raises(ConfigError, match="initialised already"):
        controller.initialize_all()
    assert (controller.num_blocks, controller.num_host_blocks) == (4, 5)


def test_controller_fraction_is_of_the_machines_memory() -> None:
    config = parse_config(
        {**toy_data(mtp=False, num_host_blocks=0), "cache": {"block_size": 4, "device_memory": 0.001}}
    )
    controller = CacheController(config)
    controller.initialize_all()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < controller.group_bytes("main") <= 0.001 * physical


def test_static_scales_reach_the_layers_sharded_by_rank(tmp_path: Path) -> None:
    path = scales_file(tmp_path)
    ranges = read_scales_file(path)
    for rank in range(2):
        controller = CacheController(scaled_config(path, tp_size=2), rank)
        controller.initialize_all()
        for layer in range(3):
            static = controller.layer_cache(layer).static
            assert static is not None
            entry = ranges.layers[layer][Role.VALUE]
            expected = np.maximum(-entry.minimum, entry.maximum)[rank] / np.float32(127)
            np.testing.assert_array_equal(static.value_scale.numpy(), expected)


def test_static_scales_survive_free_and_initialise(tmp_path: Path) -> None:
    controller = CacheController(scaled_config(scales_file(tmp_path)))
    controller.initialize_all()
    before = controller.layer_cache(0).static
    controller.free_cache()
    controller.initialize_all()
    after = controller.layer_cache(0).static
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(before.key_scale.numpy(), after.key_scale.numpy())


def test_static_scales_missing_are_an_error_at_start_never_a_default() -> None:
    """vLLM#25800, SGLang#18818: without a scales file the scale silently was 1."""
    config = toy_config(quant_type="int8")
    with pytest.raises(ConfigError, match="needs static scales"):
        load_static_scales(config, 0)
    controller = CacheController(config)
    controller.initialize_all()
    with pytest.raises(ConfigError, match="needs static scales"):
        controller.layer_cache(0)
    runner = RunnerCache(config.cache_spec(), 4)
    with pytest.raises(ConfigError, match="needs static scales"):
        runner.layer_cache(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "cannot be read"),
        ("[]", "no scales file of this version"),
        ('{"format": "fastkv.kv_cache_scale", "version": 99}', "no scales file of this version"),
        ('{"format": "fastkv.kv_cache_scale", "version": 1, "layers": [{"layer": 0, "key": 3}]}', "damaged"),
        ('{"format": "fastkv.kv_cache_scale", "version": 1, "model": "toy"}', "damaged"),
    ],
)
def test_static_scales_broken_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "scales.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        CacheController(scaled_config(path))


def test_static_scales_of_another_model_or_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibrated for model 'other'"):
        CacheController(scaled_config(scales_file(tmp_path, model="other")))
    config = scaled_config(scales_file(tmp_path))
    assert load_static_scales(config, 0, "abc") is not None
    with pytest.raises(ConfigError, match="calibrated on weights abc"):
        load_static_scales(config, 0, "xyz")
    anonymous = tmp_path / "scales.json"
    anonymous.write_text(anonymous.read_text().replace('"abc"', '""'))
    with pytest.raises(ConfigError, match="calibrated on weights .unknown."):
        load_static_scales(config, 0, "xyz")


def test_static_scales_written_and_read_are_the_same(tmp_path: Path) -> None:
    first = scales_file(tmp_path)
    second = tmp_path / "again.json"
    write_scales_file(second, read_scales_file(first))
    assert first.read_text() == second.read_text()
