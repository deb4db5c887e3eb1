"""Find and install the compilers of absent devices.

XLA's compilers for NVIDIA GPUs and TPUs are packages that need neither the device nor a driver.
They are installed in a separate folder that only the compile process has on its path, because
otherwise every ``import jax`` in their environment would search for the device and complain.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from ....common.errors import CompilerError
from ....common.plugins import extra_hint
from ....common.versions import installed

logger = logging.getLogger(__name__)

#: Platforms with such a compiler.
PLATFORMS = ("gpu", "tpu")
#: Assemblers for CUDA: version 12.9 supports the architectures that CUDA 13 dropped (Maxwell,
#: Pascal and Volta).
_CUDA_TOOLS = ("nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14", "nvidia-cuda-nvcc-cu12>=12.9,<13")
#: Packages with the compiler itself, the preferred one first.
_MAIN_PACKAGE = {"gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt"), "tpu": ("libtpu",)}
#: Folders of CUDA tools within the packages, newest first.
_CUDA_FOLDERS = ("nvidia/cu13", "nvidia/cuda_nvcc")
# As in the list of `--gpu-name` in ptxas's help.
_ARCHITECTURE = re.compile(r"'sm_(\d+)'")


@dataclass(frozen=True)
class Compiler:
    """An installed compiler.

    Attributes:
        platform: ``gpu`` or ``tpu``.
        folder: Folder with its packages; ``None`` if they are in this environment.
        version: Names and versions of its packages, which affect the compiled program.
    """

    platform: str
    folder: Path | None
    version: str

    def assemblers(self) -> list[tuple[Path, tuple[int, ...]]]:
        """List CUDA folders with ``ptxas``, and the architectures (90 for sm_90) each supports."""
        # Packages of this environment may be in any folder on its path.
        roots = [self.folder] if self.folder else [Path(p) for p in sys.path if p]
        folders = [root / name for name in _CUDA_FOLDERS for root in roots]
        if self.folder is None and (toolkit := shutil.which("ptxas")):
            folders.append(Path(toolkit).resolve().parents[1])
        tools = [(f, _architectures(f / "bin" / "ptxas")) for f in dict.fromkeys(folders)]
        return [(folder, known) for folder, known in tools if known]


def compilers_root() -> Path:
    """Return the folder in which compilers are installed.

    This is ``$OPCAST_COMPILERS``, else ``compilers`` in this environment if ``make`` put them
    there, else a folder in the user's data folder.
    """
    if override := os.environ.get("OPCAST_COMPILERS"):
        return Path(override)
    if (own := Path(sys.prefix) / "compilers").is_dir():
        return own
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "opcast" / "compilers"


def find_compiler(platform: str) -> Compiler:
    """Find the compiler for a platform, in a separate folder or in this environment.

    Raises:
        CompilerError: There is none, or its version differs from jaxlib's.
    """
    wrong: list[str] = []
    for folder in (_own_folder(platform), compilers_root() / platform, None):
        compiler = _look(platform, folder, wrong)
        if compiler is not None:
            return compiler
    what = f"no {platform} compiler is installed"
    if wrong:
        what = f"the {platform} compiler does not fit jaxlib {_jaxlib()}: {'; '.join(wrong)}"
    raise CompilerError(
        what,
        hint=f"run: opcast compilers install {platform} (or "
        f"{extra_hint(f'{platform}-compiler')}); or use another lowering, such as --lowering op",
    )


def packages(platform: str) -> list[str]:
    """List the packages that pip has to install, with versions that match the jaxlib in use.

    Raises:
        CompilerError: There is no compiler for the platform.
    """
    if platform not in PLATFORMS:
        raise CompilerError(
            f"there is no compiler for {platform!r}", hint=f"choose {' or '.join(PLATFORMS)}"
        )
    if platform == "tpu":
        return [_libtpu()]
    version = _jaxlib()
    plugin = [f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
    return [*plugin, *_CUDA_TOOLS]


def install_compiler(platform: str) -> Compiler:
    """Install the compiler for a platform into a separate folder.

    A single call of pip installs everything into a temporary folder, which is renamed at the end,
    so that an interrupted installation is never mistaken for a complete one.

    Raises:
        CompilerError: There is no compiler for the platform, or pip fails.
    """
    wanted = packages(platform)
    target = _own_folder(platform)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    # Without dependencies, which would install a second jax into the folder.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--disable-pip-version-check", "--target", str(partial), *wanted],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise CompilerError(
                f"pip cannot install {', '.join(wanted)}: {' '.join(lines)[:500]}",
                hint="check the network and the package index; with jaxlib of another version "
                "other packages are wanted",
            )
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return find_compiler(platform)


def _own_folder(platform: str) -> Path:
    """Return the folder for the jaxlib in use, so that other environments are not affected."""
    return compilers_root() / f"{platform}-{_jaxlib()}"


def _look(platform: str, folder: Path | None, wrong: list[str]) -> Compiler | None:
    versions = _versions(folder)
    for name in _MAIN_PACKAGE[platform]:
        version = versions.get(name)
        if version is None:
            continue
        # The CUDA plug-in is released with each jaxlib and matches only that version.
        if platform == "gpu" and version != _jaxlib():
            wrong.append(f"{name} {version} in {folder or 'this environment'}")
            continue
        tools = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
        parts = [f"{n} {versions[n]}" for n in (name, *tools) if n in versions]
        return Compiler(platform, folder, ", ".join(parts if platform == "gpu" else parts[:1]))
    return None


def _versions(folder: Path | None) -> dict[str, str]:
    """Return the versions of the relevant packages by name."""
    names = [*_MAIN_PACKAGE["gpu"], *_MAIN_PACKAGE["tpu"]]
    names += ["nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"]
    if folder is None:
        return installed(names)
    if not folder.is_dir():
        return {}
    listed = metadata.distributions(path=[str(folder)])
    return {d.metadata["Name"].lower().replace("_", "-"): d.version for d in listed}


def _jaxlib() -> str:
    return metadata.version("jaxlib")


def _libtpu() -> str:
    """Return the libtpu requirement of the installed jax's extra ``tpu``."""
    wanted = [r for r in metadata.requires("jax") or () if r.startswith("libtpu")]
    return wanted[0].split(";")[0].strip() if wanted else "libtpu"


@lru_cache(maxsize=16)
def _architectures(ptxas: Path) -> tuple[int, ...]:
    if not ptxas.is_file():
        return ()
    try:
        # The help lists the architectures that `--gpu-name` accepts.
        done = subprocess.run(
            [str(ptxas), "--help"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("cannot run %s: %s", ptxas, error)
        return ()
    return tuple(sorted({int(number) for number in _ARCHITECTURE.findall(done.stdout)}))
