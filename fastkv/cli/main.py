"""fastkv: the command line. Dispatches to one module a command.

The user's own mistakes end with one sentence on stderr and exit code 1 (2 for a bad command line), never with a
traceback. Paddle is imported by the commands that need it, after the runtime environment is prepared. The commands
themselves are imported inside `main`, so that Ctrl-C in the half second which that takes is no traceback either.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from fastkv import __version__
from fastkv.engine.interrupts import held_signals
from fastkv.errors import FastKVError

_EXTRAS = {"paddle": "cpu", "gguf": "demo", "tokenizers": "demo"}
"""Python package -> the extra of fastkv that brings it."""


class _Terminated(BaseException):
    """SIGTERM came: end as after Ctrl-C, so that engines store what is queued and close what is open."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    from fastkv.cli import cache, calibrate, generate, plan, replay
    from fastkv.cli import eval as evaluate

    parser = argparse.ArgumentParser(
        prog="fastkv", description="KV-cache manager for PaddlePaddle LLM inference: plan, run and inspect caches."
    )
    parser.add_argument("--version", action="version", version=f"fastkv {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (generate, plan, calibrate, evaluate, replay, cache):
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    _make_streams_writable()
    before = signal.getsignal(signal.SIGTERM)
    _set_sigterm(_end_in_order)
    try:
        with held_signals():
            parser = build_parser()
        args = parser.parse_args(argv)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        print(
            f"fastkv: error: this command needs the Python package {error.name}, which is not installed; "
            f"run pip install 'fastkv[{_EXTRAS[error.name]}]' (in a checkout: pip install '.[{_EXTRAS[error.name]}]')",
            file=sys.stderr,
        )
        return 1
    except FastKVError as error:
        print(f"fastkv: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fastkv: interrupted", file=sys.stderr)
        return 130
    except _Terminated:
        print("fastkv: terminated", file=sys.stderr)
        return 143
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        _drop_stdout()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_stdout()
        print(f"fastkv: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        _set_sigterm(signal.SIG_DFL if before is None else before)


def _set_sigterm(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():  # others may not
        signal.signal(signal.SIGTERM, handler)


def _end_in_order(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise _Terminated


def _make_streams_writable() -> None:
    """Text that the terminal's encoding has no place for, and a stream that is closed, are no reason to fail.

    What a stream does with such text stays, if it does anything: stderr shows it as escapes, and in a locale "C" stdout
    gives back bytes that are no text as they came.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
        elif isinstance(stream, io.TextIOWrapper) and (
            stream.errors == "strict"
            or (stream.errors == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8")  # fails for "é"
        ):
            stream.reconfigure(errors="replace")


def _drop_stdout() -> None:
    """What Python still holds for stdout has nowhere to go: let it go without another error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
