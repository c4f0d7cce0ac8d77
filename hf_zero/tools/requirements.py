"""The releases of other packages that this one works with, as its own metadata names them."""

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from hf_zero.errors import ZeroImportError


def requirements(extra: str = "") -> Iterator[Requirement]:
    """What hf_zero needs on this Python, and with `extra` what that extra adds."""
    for line in metadata.requires("hf_zero") or []:
        wanted = Requirement(line)
        always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if always if not extra else not always and wanted.marker.evaluate({"extra": extra}):
            yield wanted


def admits(wanted: Requirement, found: str) -> bool:
    """Whether a version is in range; images of vendors call theirs 2.10.0a0+vendor, which counts as 2.10.0."""
    return wanted.specifier.contains(Version(found).base_version)


def check_release(name: str, extra: str = "") -> None:
    """Raise ZeroImportError where the installed release of a package is outside of the range that is tested."""
    try:
        wanted = next(found for found in requirements(extra) if found.name == name)
    except metadata.PackageNotFoundError:  # run from a folder: nothing says what is needed
        return
    found = metadata.version(name)
    if not admits(wanted, found):
        right = f"{name}{wanted.specifier}"
        raise ZeroImportError(f"{name} {found} is installed, and hf_zero works with {right}: pip install '{right}'")
