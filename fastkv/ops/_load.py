"""Finds, checks and registers the compiled ops, once a process; calls them by name.

The library is also a Python module, `native`: attention without Paddle's dispatch (custom_ops/paddle/direct.cc).

The library is tied to the Paddle it was built against. What it was built for stands in the file as plain text and is
read before loading: a library for another Paddle may fail to load with nothing but an undefined symbol.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import threading
from pathlib import Path
from typing import Any

import paddle

from fastkv.errors import ConfigError

_MARKER = b"fastkv-built-for:"
_REBUILD = "build it again with `pip install --no-build-isolation -e .` (or `pip install --no-build-isolation .`)"

# runs at once in dynamic mode; adds a node to the program while a static graph is traced
_run_custom_op: Any = getattr(paddle._C_ops, "_run_custom_op")  # noqa: B009 - unknown to Paddle's own annotations

_lock = threading.Lock()
_library: ctypes.CDLL | None = None

native: Any = None
"""The library's functions for Python: attention, and views of what does not change from call to call. None before
load_ops. Its errors are Paddle's: see own_error."""


def find_library() -> Path:
    """Where the compiled ops are.

    Raises:
        ConfigError: they were not built.
    """
    spec = importlib.util.find_spec("fastkv._paddle_ops")
    if spec is None or spec.origin is None:
        raise ConfigError(f"the compiled ops (fastkv/_paddle_ops) are missing; {_REBUILD}")
    return Path(spec.origin)


def check_built_for(library: Path, running: str) -> None:
    """Refuse a library that was built for another Paddle.

    Args:
        library: the compiled ops.
        running: Paddle's version and CUDA, as `running_paddle` gives it.

    Raises:
        ConfigError: naming both.
    """
    contents = library.read_bytes()
    at = contents.find(_MARKER)
    if at < 0:
        raise ConfigError(f"{library} is no library of fastkv ops; {_REBUILD}")
    start = at + len(_MARKER)
    built_for = contents[start : contents.index(b"\0", start)].decode("ascii", "replace")
    if built_for != running:
        raise ConfigError(f"{library} was built for Paddle {built_for}, but Paddle {running} is running; {_REBUILD}")


def running_paddle() -> str:
    """Version and CUDA of the imported Paddle, in the words that setup.py writes into the library."""
    return f"{paddle.version.full_version} cuda {paddle.version.cuda_version}"


def load_ops() -> ctypes.CDLL:
    """Register the ops with Paddle; later calls do nothing. Safe to call from several threads.

    Raises:
        ConfigError: the library is missing, or was built for another Paddle.
    """
    global _library, native
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            library = find_library()
            check_built_for(library, running_paddle())
            try:
                paddle.base.core.load_op_meta_info_and_register_op(str(library))
                loaded = ctypes.CDLL(str(library))
                native = importlib.import_module("fastkv._paddle_ops")
            except (ImportError, OSError, RuntimeError) as error:
                raise ConfigError(f"{library} cannot be loaded ({error}); {_REBUILD}") from error
            loaded.fastkv_isa_name.restype = ctypes.c_char_p
            _library = loaded
    return _library


def run_op(name: str, *args: Any) -> list[Any]:
    """Call an op with all its inputs (None for an absent optional one), then its attributes.

    Raises:
        ConfigError: the op refused a tensor's dtype, shape or presence.
        IndexError: a block id, slot or position is out of range.
    """
    if _library is None:
        load_ops()
    try:
        outputs: list[Any] = _run_custom_op(name, *args)
        return outputs
    except (ValueError, IndexError) as error:
        raise own_error(error) from None


def make_view(kind: str, *parts: Any) -> Any:
    """What does not change from call to call as the library's attention takes it: a capsule of addresses, so whoever
    asks keeps the tensors.

    Args:
        kind: "layer" of an op's cache inputs and the quantisation type's name, "batch" of its tensors, "rope" of cos,
            sin and style.
        parts: as said.

    Raises:
        ConfigError: what a registered op would refuse, in its words.
    """
    if _library is None:
        load_ops()
    try:
        return getattr(native, f"view_{kind}")(*parts)
    except ValueError as error:
        raise own_error(error) from None


def own_error(error: ValueError | IndexError) -> ConfigError | IndexError:
    """What to raise for a refusal of the library: our message, without the error class and the source position that
    Paddle puts around it."""
    text = str(error).strip()
    text = text.removeprefix("(InvalidArgument) ").removeprefix("(OutOfRange) ")
    text = text.rpartition(" (at ")[0] or text
    return IndexError(text) if isinstance(error, IndexError) else ConfigError(text)


def current_isa() -> str:
    """Instruction set that the kernels run with; see force_isa."""
    library = load_ops()
    return _isa_names(library)[library.fastkv_isa()]


def supported_isas() -> list[str]:
    """Instruction sets that this build has kernels for and that this CPU and system run, the plainest first."""
    library = load_ops()
    return [name for code, name in enumerate(_isa_names(library)) if library.fastkv_has_isa(code)]


def force_isa(name: str) -> None:
    """Make the kernels use one instruction set, or the best one again ("best"). For tests and measurements; not while
    an op runs.

    Args:
        name: "portable"; "avx2", with AVX2, FMA and F16C; "avx2_normal", the same without subnormal operands, which are
            slow on other CPUs than AMD's; "avx512", with AVX-512 F, BW, VL and DQ; "avx512_vnni", which adds VNNI for
            integer codes in models of float16 and bfloat16; or "best".

    Raises:
        ConfigError: unknown, or not available in this build, on this CPU or under this system.
    """
    library = load_ops()
    names = _isa_names(library)
    if name not in ("best", *names):
        raise ConfigError(f"unknown instruction set {name!r}; allowed: best, {', '.join(names)}")
    if not library.fastkv_force_isa(-1 if name == "best" else names.index(name)):
        raise ConfigError(
            f"instruction set {name} is not available in this build or on this CPU; use 'best', "
            f"or one of: {', '.join(supported_isas())}"
        )


def _isa_names(library: ctypes.CDLL) -> list[str]:
    """All that the kernels know, by their codes."""
    names: list[str] = []
    while (name := library.fastkv_isa_name(len(names))) is not None:
        names.append(name.decode())
    return names
