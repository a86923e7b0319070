"""llama-server from the package xllamacpp: llama.cpp's own C++ server, in a wheel without a program of its own.

    python -P -m launcher.engines.llama_cpp.wheel_server --model FILE --host SOCKET ...

It takes the options and LLAMA_ARG_* variables of llama-server, because llama.cpp's own parser reads them: the wheel's
library exports it, and the structure that it fills is embedded in xllamacpp's CommonParams. Both are private to a release
of the wheel, so that this program runs with the releases in RELEASES only. It needs a model on this host: the wheel has no
router and this program downloads nothing.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

PACKAGE: Final = "xllamacpp"
# Release of the wheel, to LLAMA_EXAMPLE_SERVER of its llama.cpp (common/common.h, enum llama_example): the parser's options
# depend on it. Other values reject --alias.
RELEASES: Final = {"2026.10.11549": 12}
# bool common_params_parse(int, char **, common_params &, llama_example, void (*)(int, char **)), common/arg.h
_PARSE: Final = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
_PR_SET_NAME: Final = 15
_NAME: Final = b"llama-server"
# llama-server's; CommonParams has 0 instead.
_PORT: Final = 8080


def release() -> str | None:
    """The installed release of the wheel; None without one. Does not load it."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_of(found: str) -> str:
    """The version of a release in the words of `--version`: the build of llama.cpp in it."""
    return f"{found.rpartition('.')[2]} ({PACKAGE} {found})"


def why_not(found: str | None) -> tuple[str, str] | None:
    """Reason and remedy where this program does not run with a release; None where it does."""
    if found is None:
        return f"the package {PACKAGE} is not installed", "pip install 'numa-launcher[llama-cpp]'"
    if found not in RELEASES:
        return (
            f"{PACKAGE} {found} is installed, but only {', '.join(RELEASES)} is known",
            "pip install 'numa-launcher[llama-cpp]'",
        )
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, and returns 0; 1: wrong options, or the server does not start."""
    # The name that ps, top and killall show, as that of the program.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME, 0, 0, 0)
    if (reason := why_not(release())) is not None:
        print(f"cannot start llama.cpp's server: {reason[0]}\n{reason[1]}", file=sys.stderr)
        return 1
    words = sys.argv[1:] if arguments is None else list(arguments)
    import xllamacpp  # noqa: PLC0415  an extra, of 100 MB

    if "--version" in words:
        print(_version(xllamacpp), file=sys.stderr)
        return 0
    # Until the server runs, a signal ends the process at once, as it ends llama-server.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    params = _parsed(xllamacpp, words)
    if params is None:
        return 1
    if not params.model.path:
        print("cannot start llama.cpp's server: no model\ngive a GGUF file with --model", file=sys.stderr)
        return 1
    return _serve(xllamacpp, params)


def _version(wheel: Any) -> str:
    """As llama-server prints it, and a line that it has in its log: the library's instruction sets."""
    info = wheel.BUILD_INFO
    return (
        f"version: {version_of(wheel.__version__)}\nbuilt with {info['compiler']} for {info['build_target']}\n"
        f"system_info: {wheel.get_system_info()}"
    )


def _parsed(wheel: Any, words: Sequence[str]) -> Any:
    """CommonParams by llama.cpp's parser; None for wrong options, about which it has printed a line. `--help` exits."""
    params = wheel.CommonParams()
    params.port = _PORT
    # Cython (cdef class CommonParams, xllamacpp.pyx): the structure follows the object's head.
    structure = ctypes.c_void_p(id(params) + object.__basicsize__)
    argv = (ctypes.c_char_p * (len(words) + 2))(
        _NAME, *(word.encode(errors="surrogateescape") for word in words), None
    )
    parse = ctypes.CDLL(sys.modules[f"{PACKAGE}.{PACKAGE}"].__file__)[_PARSE]
    parse.restype = ctypes.c_bool
    example = RELEASES[wheel.__version__]
    return params if parse(len(words) + 1, argv, structure, example, None) else None


def _serve(wheel: Any, params: Any) -> int:
    ended = threading.Event()
    try:
        # Serves from threads of its own once the model is loaded.
        server = wheel.Server(params)
    except (RuntimeError, ValueError) as error:  # its log has said why
        print(f"cannot start llama.cpp's server: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    # A second signal ends the process at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    del server
    return 0


if __name__ == "__main__":
    sys.exit(main())
