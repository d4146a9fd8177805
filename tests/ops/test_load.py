"""Loading the compiled ops: what is said when they are missing, foreign, or no library at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastkv.errors import ConfigError
from fastkv.ops import _load


def test_load_without_a_library_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"_paddle_ops\) are missing; build it again with `pip install"):
        _load.find_library()


def test_load_for_another_paddle_names_both(tmp_path: Path) -> None:
    library = tmp_path / "_paddle_ops.so"
    library.write_bytes(b"\x7fELF...fastkv-built-for:2.6.2 cuda 11.8\0...")
    with pytest.raises(
        ConfigError, match=r"was built for Paddle 2.6.2 cuda 11.8, but Paddle 3.3.1 cuda False is running"
    ):
        _load.check_built_for(library, "3.3.1 cuda False")
    _load.check_built_for(library, "2.6.2 cuda 11.8")


def test_load_of_something_else_is_refused(tmp_path: Path) -> None:
    library = tmp_path / "_paddle_ops.so"
    library.write_bytes(b"\x7fELF")
    with pytest.raises(ConfigError, match="is no library of fastkv ops"):
        _load.check_built_for(library, "3.3.1 cuda False")


def test_installed_library_fits_the_running_paddle() -> None:
    _load.check_built_for(_load.find_library(), _load.running_paddle())


def test_load_twice_and_from_threads_registers_once() -> None:
    """Registering an op twice is an error in Paddle: eight threads race for it in a fresh process."""
    code = (
        "import threading; from fastkv.ops import _load\n"
        "done = []\n"
        "work = [threading.Thread(target=lambda: done.append(_load.load_ops())) for _ in range(8)]\n"
        "[t.start() for t in work]; [t.join() for t in work]\n"
        "assert len(done) == 8 and len(set(map(id, done))) == 1\n"
        "_load.load_ops()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_force_isa_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match="unknown instruction set 'sse9'; allowed: best, portable, avx2"):
        _load.force_isa("sse9")


def test_supported_isas_are_those_of_the_cpu() -> None:
    """Tests of kernels run once for each of these: one that went missing would go untested in silence."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = ["portable"]
    if {"avx2", "fma", "f16c"} <= flags:
        expected += ["avx2", "avx2_normal"]
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            expected += ["avx512", "avx512_vnni"] if "avx512_vnni" in flags else ["avx512"]
    assert _load.supported_isas() == expected
    assert _load.current_isa() in expected


def test_force_isa_refuses_what_the_machine_lacks() -> None:
    supported = _load.supported_isas()
    missing = [name for name in ("avx2", "avx2_normal", "avx512", "avx512_vnni") if name not in supported]
    for name in missing:
        with pytest.raises(ConfigError, match=f"instruction set {name} is not available .*one of: portable"):
            _load.force_isa(name)
    assert _load.current_isa() in supported


def test_force_isa_switches_and_returns() -> None:
    best = _load.current_isa()
    _load.force_isa("portable")
    assert _load.current_isa() == "portable"
    _load.force_isa("best")
    assert _load.current_isa() == best


def test_ops_from_several_threads_at_once_agree() -> None:
    """The GIL is released inside an op, so two threads may really run one: scratch memory is a thread's own."""
    import numpy as np
    from helpers.ops_cases import make_batch, make_twin, paddle_batch, to_paddle

    from fastkv.ops import append_attention

    def run(seed: int, outputs: dict[int, np.ndarray], repeat: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(repeat):
            batch = make_batch(rng, [30, 1], [0, 0], block_size=16, num_blocks=8)
            layer = make_twin(rng, block_size=16, dim=64).layer
            rows = [to_paddle(rng.standard_normal((31, heads, 64)).astype(np.float32)) for heads in (4, 2, 2)]
            outputs[seed] = append_attention(*rows, layer, paddle_batch(batch), softmax_scale=0.125).numpy()

    alone: dict[int, np.ndarray] = {}
    together: dict[int, np.ndarray] = {}
    for seed in range(4):
        run(seed, alone, 20)
    work = [threading.Thread(target=run, args=(seed, together, 20)) for seed in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    for seed in range(4):
        np.testing.assert_array_equal(alone[seed], together[seed])
