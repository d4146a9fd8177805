"""Builds the native code: `fastkv._paddle_ops`, the custom ops, against the installed Paddle, and `fastkv._core`.

Metadata lives in pyproject.toml; this file only says how C++ becomes libraries. Paddle is found, never imported. Run
by pip (`pip install .`, `pip install --no-build-isolation -e .`) or by hand: `python setup.py build_ext --inplace`.
Objects are rebuilt when their command, their source or any header changed; a library is replaced in one step, so
that processes which run the old one are not disturbed. Two builds in one folder wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OPS = Path("custom_ops")
BUILD_JOBS = 2  # a file that includes Paddle's headers takes about 1.5 GB to compile
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

COMMON_FLAGS = ["-std=c++17", "-O3", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]
# the kernels compare and select, and want that vectorised; nothing reads the floating-point exception flags
KERNEL_FLAGS = ["-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
# GCC's own header leaves lanes undefined on purpose, and warns of it
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
ISA_FLAGS = {"avx2": AVX2_FLAGS, "avx512": [*AVX2_FLAGS, *AVX512_FLAGS]}  # of sources named *_avx2.cc, *_avx512.cc


class BuildError(SystemExit):
    """The native build cannot go on; the text is one sentence for the person who started it."""


def find_paddle() -> Path:
    """The installed paddle package's folder."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "error: fastkv builds against the installed Paddle, and none is installed in this environment: "
            "run `pip install paddlepaddle==3.3.1` (or your GPU build), then `pip install --no-build-isolation .`"
        )
    paddle = Path(next(iter(spec.submodule_search_locations)))
    if not (paddle / "include" / "paddle" / "phi" / "api" / "all.h").is_file():
        raise BuildError(f"error: {paddle} has no C++ headers (include/paddle/phi/api/all.h); reinstall Paddle's wheel")
    return paddle


def paddle_build(paddle: Path) -> str:
    """What a library is tied to: Paddle's version and the CUDA it was built with, for example "3.3.1 cuda False"."""
    text = (paddle / "version" / "__init__.py").read_text()
    found = {key: re.search(rf"^{key}\s*=\s*'([^']*)'", text, re.M) for key in ("full_version", "cuda_version")}
    version, cuda = (match.group(1) if match else "unknown" for match in found.values())
    return f"{version} cuda {cuda}"


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, which may have several words ("ccache g++"), else g++, else c++."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]):
            return chosen
        raise BuildError(f"error: CXX is {chosen[0]!r}, which is not installed: install it, or unset CXX for g++")
    for candidate in ("g++", "c++"):
        if shutil.which(candidate):
            return [candidate]
    raise BuildError("error: fastkv needs a C++17 compiler and found none: install g++ (or set CXX), then try again")


def instruction_set(source: Path) -> str | None:
    """The instruction set that a source is compiled for and needs flags for; None for any CPU."""
    suffix = source.stem.rpartition("_")[2]
    return suffix if suffix in ISA_FLAGS else None


def names(paths: Sequence[Path]) -> list[str]:
    """Paths as setuptools wants them. Sources and what they depend on make up a source distribution."""
    return [str(path.relative_to(ROOT)) for path in paths]


class PaddleOps(Extension):
    """The custom ops. Framework-free kernels compile fast; only custom_ops/paddle includes Paddle's headers."""

    def __init__(self) -> None:
        kernels = sorted((ROOT / OPS / "cpu").glob("*.cc"))
        bindings = sorted((ROOT / OPS / "paddle").glob("*.cc"))
        chosen = [path for path in kernels if IS_X86 or instruction_set(path) is None]
        others = [path for path in kernels if path not in chosen]  # packed all the same, for another machine
        headers = sorted(p for part in ("include", "cpu", "paddle") for p in (ROOT / OPS / part).rglob("*.h"))
        super().__init__("fastkv._paddle_ops", names(chosen + bindings), depends=names(headers + others))

    def compile_flags(self, source: Path) -> list[str]:
        """Flags of one source: bindings see Paddle, kernels see only custom_ops/include."""
        paddle = find_paddle()
        flags = [*COMMON_FLAGS, f"-I{OPS / 'include'}"]
        if source.parent.name == "paddle":
            include = paddle / "include"
            third_party = include / "third_party"
            return [
                *flags,
                f"-isystem{include}",
                f"-isystem{third_party}",
                f"-isystem{sysconfig.get_paths()['include']}",
                f"-ffile-prefix-map={paddle.parent}/=",  # headers' __FILE__ without this machine's folders
                "-DPADDLE_WITH_CUSTOM_KERNEL",
                "-Wno-unused-parameter",
            ]
        flags += KERNEL_FLAGS
        if IS_X86:
            flags.append("-DFASTKV_HAVE_X86")
        flags += ISA_FLAGS.get(instruction_set(source) or "", [])
        if source.stem.startswith("codec_"):
            flags.append("-ffp-contract=off")  # codes must be those of NumPy, bit for bit
        if source.stem == "dispatch":
            flags.append(f'-DFASTKV_BUILT_FOR="{paddle_build(paddle)}"')
        return flags

    def link_flags(self, in_source_tree: bool) -> list[str]:
        """Paddle's library and its OpenMP runtime (a second runtime beside it makes tails ten times longer)."""
        paddle = find_paddle()
        origin = "$ORIGIN/../paddle"
        folders = [f"-L{paddle / 'base'}", f"-L{paddle / 'libs'}"]
        rpaths = [f"{origin}/libs", f"{origin}/base"]
        if in_source_tree:  # an installed wheel lies beside paddle, a source tree does not
            rpaths += [str(paddle / "libs"), str(paddle / "base")]
        return [*folders, "-l:libpaddle.so", "-l:libiomp5.so", *(f"-Wl,-rpath,{path}" for path in rpaths)]


def core_sources_digest(folder: Path) -> str:
    """Names and contents of the core's sources as one SHA-256; fastkv/scheduler/_native.py computes the same."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cc"), *folder.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class SchedulerCore(Extension):
    """The scheduler's core: pybind11, no Paddle."""

    def __init__(self) -> None:
        folder = ROOT / OPS / "core"
        headers = sorted(folder.glob("*.h"))
        super().__init__("fastkv._core", names(sorted(folder.glob("*.cc"))), depends=names(headers))

    def compile_flags(self, source: Path) -> list[str]:
        """Only bindings see Python; stamp.cc says which sources there were."""
        if source.stem == "stamp":
            return [*COMMON_FLAGS, f'-DFASTKV_CORE_SOURCES="{core_sources_digest(ROOT / OPS / "core")}"']
        if not source.stem.startswith("bindings"):
            return COMMON_FLAGS
        if importlib.util.find_spec("pybind11") is None:
            raise BuildError("error: the scheduler core needs pybind11: run `pip install pybind11`, then try again")
        import pybind11

        site = Path(pybind11.__file__).parent.parent
        folders = [f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_paths()['include']}"]
        return [*COMMON_FLAGS, *folders, f"-ffile-prefix-map={site}/="]

    def link_flags(self, in_source_tree: bool) -> list[str]:
        """Nothing but the C++ runtime."""
        return []


class BuildNative(build_ext):
    """Compiles sources in parallel with flags of their own; other Extensions go the usual way."""

    in_source_tree = False

    def run(self) -> None:
        """Remember where the libraries will stay: setuptools resets inplace while it builds."""
        self.in_source_tree = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension, if anything it depends on changed."""
        if not isinstance(ext, (PaddleOps, SchedulerCore)):
            super().build_extension(ext)
            return
        compiler = find_compiler()
        folder = Path(self.build_temp).resolve() / ext.name
        folder.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            headers = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in ext.depends)).hexdigest()
            with ThreadPoolExecutor(BUILD_JOBS) as pool:
                objects = list(pool.map(lambda s: compile_one(compiler, ext, Path(s), folder, headers), ext.sources))
            link([*compiler, "-shared", *map(str, objects), *ext.link_flags(self.in_source_tree)], objects, target)


def run(command: list[str], what: str) -> None:
    """Run a compiler; its own messages reach the terminal."""
    print(" ".join(command), flush=True)
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        raise BuildError(f"error: {what} failed; the compiler's messages above say why")


def is_fresh(stamp: Path, product: Path, signature: str) -> bool:
    """Whether product was made by exactly this command from exactly these inputs."""
    return product.is_file() and stamp.is_file() and stamp.read_text() == signature


def without_launcher(command: list[str]) -> list[str]:
    """The command as it is without a compiler cache in front: that changes nothing in what comes out."""
    return command[1:] if Path(command[0]).name in ("ccache", "sccache") else command


def compile_one(compiler: list[str], ext: PaddleOps | SchedulerCore, source: Path, folder: Path, headers: str) -> Path:
    """Compile one source unless its object is up to date."""
    product = folder / f"{source.parent.name}_{source.stem}.o"
    stamp = product.with_suffix(".stamp")
    command = [*compiler, *ext.compile_flags(source), "-c", str(source), "-o", str(product)]
    inputs = f"{without_launcher(command)} {headers} ".encode() + (ROOT / source).read_bytes()
    signature = hashlib.sha256(inputs).hexdigest()
    if not is_fresh(stamp, product, signature):
        stamp.unlink(missing_ok=True)
        run(command, f"compiling {source}")
        stamp.write_text(signature)
    return product


def link(command: list[str], objects: list[Path], target: Path) -> None:
    """Link the objects into target, replacing it in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + ".new")
    stamp = objects[0].with_name("link.stamp")
    contents = hashlib.sha256(b"".join(path.read_bytes() for path in objects)).hexdigest()
    signature = hashlib.sha256(f"{without_launcher(command)} {contents}".encode()).hexdigest()
    if not is_fresh(stamp, target, signature):
        run([*command, "-o", str(fresh)], f"linking {target.name}")
        fresh.replace(target)
        stamp.write_text(signature)


def extensions() -> list[Extension]:
    """Every native part."""
    return [PaddleOps(), SchedulerCore()]


if sys.platform != "linux":
    raise BuildError(f"error: fastkv's native code builds on Linux, not on {sys.platform}")
os.chdir(ROOT)
setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
