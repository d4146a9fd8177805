"""v0 attaches to caches that another process allocated: the same bytes, or a clear error at start-up."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import paddle
import pytest
from helpers.toy import toy_config

from fastkv import ConfigError, RunnerCache
from fastkv.core.scales import RoleScales
from fastkv.core.spec import CacheSpec, Role
from fastkv.worker.shared_caches import SHARED_MEMORY

OWNER = """
import sys
from helpers.toy import toy_config
from fastkv import RunnerCache
spec = toy_config(sys.argv[2], quant_type=sys.argv[3] or None, manager="v0").cache_spec()
cache = RunnerCache(spec, 4, share_as=sys.argv[1])
for group in spec.groups:
    for i, tensor in enumerate(cache.flat_list(group.name)):
        tensor.view("uint8")[...] = 10 * (group.name == "mtp") + i + 1
print("ready", flush=True)
sys.stdin.readline()
print(cache.flat_list()[0].view("uint8").numpy().max(), flush=True)
"""


@pytest.fixture
def name() -> Iterator[str]:
    yield (own := f"test-{os.getpid()}")
    (SHARED_MEMORY / f"fastkv-{own}").unlink(missing_ok=True)


@contextmanager
def owner(name: str, attention: str, quant_type: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER, name, attention, quant_type]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def spec_of(attention: str, quant_type: str) -> CacheSpec:
    return toy_config(attention, quant_type=quant_type or None, manager="v0").cache_spec()


@pytest.mark.parametrize(("attention", "quant_type"), [("gqa", "block_wise_fp8"), ("mla", "")])
def test_attach_sees_the_owners_bytes_and_the_owner_those_of_who_attached(
    name: str, attention: str, quant_type: str
) -> None:
    spec = spec_of(attention, quant_type)
    with owner(name, attention, quant_type) as process:
        cache = RunnerCache.attach(spec, 4, name)
        plain = RunnerCache(spec, 4)
        for group in spec.groups:
            for i, (tensor, own) in enumerate(
                zip(cache.flat_list(group.name), plain.flat_list(group.name), strict=True)
            ):
                assert (tensor.dtype, tensor.shape) == (own.dtype, own.shape)
                assert (tensor.view("uint8").numpy() == 10 * (group.name == "mtp") + i + 1).all()
        assert [cache.group_bytes(g.name) for g in spec.groups] == [plain.group_bytes(g.name) for g in spec.groups]
        cache.flat_list()[0].view("uint8")[...] = 200
        with pytest.raises(ConfigError, match="another process owns"):
            RunnerCache(spec, 4, share_as=name)
        output, _ = process.communicate("\n", timeout=60)
        assert output == "200\n"
    assert cache.flat_list()[0].view("uint8").numpy().min() == 200  # the memory outlives its owner
    with pytest.raises(ConfigError, match="start their owner first"):
        RunnerCache.attach(spec, 4, name)


def test_attach_with_another_config_is_refused_with_both_values(name: str) -> None:
    """The founding fault, between processes: one allocates in the model's dtype, the other reads uint8 codes."""
    with owner(name, "gqa", "int8"):
        for quant_type in ("", "int8_zp", "float8_e4m3fn"):  # the latter two store the same shapes of uint8
            with pytest.raises(ConfigError, match=f"kv_cache_quant_type int8 where this config has {quant_type}"):
                RunnerCache.attach(spec_of("gqa", quant_type), 4, name)
        with pytest.raises(ConfigError, match=r"\[4, .* where this config has .*\[5, .*same config"):
            RunnerCache.attach(spec_of("gqa", "int8"), 5, name)
        with pytest.raises(ConfigError, match="number of tensors 6 where this config has 4"):
            RunnerCache.attach(toy_config(quant_type="int8", manager="v0", mtp=False).cache_spec(), 4, name)


def test_attach_with_other_static_scales_is_refused(name: str) -> None:
    spec = spec_of("gqa", "int8")
    scales = {0: {Role.KEY: RoleScales(np.ones(2, dtype=np.float32), None)}}
    made = RunnerCache(spec, 4, static_scales=scales, share_as=name)
    RunnerCache.attach(spec, 4, name, scales)
    with pytest.raises(ConfigError, match="static scales [0-9a-f]{64} where this config has None"):
        RunnerCache.attach(spec, 4, name)
    other = {0: {Role.KEY: RoleScales(np.full(2, 2, dtype=np.float32), None)}}
    with pytest.raises(ConfigError, match="static scales"):
        RunnerCache.attach(spec, 4, name, other)
    made.free_cache()


def test_name_of_a_killed_owner_is_free_and_who_is_attached_keeps_the_old_memory(name: str) -> None:
    spec = spec_of("gqa", "int8")
    with owner(name, "gqa", "int8") as process:
        attached = RunnerCache.attach(spec, 4, name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(ConfigError, match="is gone"):
            RunnerCache.attach(spec, 4, name)
    again = RunnerCache(spec, 4, share_as=name)
    attached.flat_list()[0][...] = 77
    assert not any(tensor.numpy().any() for tensor in again.flat_list())
    smaller = RunnerCache(spec, 1, share_as=f"{name}-b")
    assert attached.flat_list()[-1].numpy().any()
    for cache in (again, smaller):
        cache.free_cache()


def test_attach_while_the_owner_starts_says_so(name: str) -> None:
    made = RunnerCache(spec_of("gqa", "int8"), 4, share_as=name)
    for page in (bytes(1 << 20), b'{"kv_cache'.ljust(1 << 20)):  # nothing yet; half a page
        with (SHARED_MEMORY / f"fastkv-{name}").open("r+b") as file:
            file.write(page)
        with pytest.raises(ConfigError, match="are not ready"):
            RunnerCache.attach(spec_of("gqa", "int8"), 4, name)
    made.free_cache()


def test_owner_that_ends_or_fails_leaves_nothing_behind(name: str) -> None:
    spec, path = spec_of("gqa", "int8"), SHARED_MEMORY / f"fastkv-{name}"
    with pytest.raises(ConfigError, match="at least 1 block, got 0"):
        RunnerCache(spec, 0, share_as=name)
    assert not path.exists()
    with owner(name, "gqa", "int8") as process:
        assert path.exists()
        process.communicate("\n", timeout=60)  # without free_cache
    assert not path.exists()
    made = RunnerCache(spec, 4, share_as=name)
    del made
    gc.collect()
    assert not path.exists()


@pytest.mark.parametrize("bad", ["", "a/b", "x" * 300])
def test_attach_by_a_name_that_is_no_file_name_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="is no file name"):
        RunnerCache.attach(spec_of("gqa", ""), 4, bad)


def test_share_as_on_a_gpu_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.device, "is_compiled_with_cuda", lambda: True)
    with pytest.raises(ConfigError, match="attach_tensors"):
        RunnerCache(spec_of("gqa", ""), 4, "gpu:0", share_as="x")


def test_attach_tensors_takes_what_the_spec_says_and_refuses_the_rest() -> None:
    spec = spec_of("gqa", "int8")
    made = RunnerCache(spec, 4)
    tensors = {group.name: made.flat_list(group.name) for group in spec.groups}
    cache = RunnerCache.attach_tensors(spec, 4, tensors)
    assert [t.data_ptr() for t in cache.flat_list("mtp")] == [t.data_ptr() for t in tensors["mtp"]]
    main = tensors["main"]
    with pytest.raises(ConfigError, match=r"layer 1 value is bfloat16 .* needs contiguous uint8"):
        RunnerCache.attach_tensors(spec, 4, tensors | {"main": [*main[:3], main[3].astype("bfloat16")]})
    with pytest.raises(ConfigError, match=r"layer 0 key is uint8 \[3, .* needs contiguous uint8 \[4, "):
        RunnerCache.attach_tensors(spec, 4, tensors | {"main": [main[0][:3], *main[1:]]})
    with pytest.raises(ConfigError, match="the mtp caches are 2 tensors, 0 were given"):
        RunnerCache.attach_tensors(spec, 4, {"main": main})
