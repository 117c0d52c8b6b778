"""What this machine is, for measurements that hold on it alone."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bertsmith import __version__


def usable_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _family() -> str:
    """Numbers that tell processors of one name apart, which virtual machines hide behind a common one."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return ""
    lines = (line.partition(":") for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    wanted = ("cpu family", "model", "stepping")
    found = {name.strip(): value.strip() for name, _, value in lines if name.strip() in wanted}
    return ".".join(found.get(name, "") for name in wanted)


def fingerprint() -> dict[str, str | int]:
    """What must be equal for a measurement to hold: processor, cores, system."""
    return {
        "processor": processor(),
        "family": _family(),
        "cores": usable_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(engine: str) -> dict[str, str]:
    """The versions of what answers with an engine."""
    packages = ["torch", *(["onnxruntime"] if engine == "onnxruntime" else [])]
    found = {"bertsmith": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
