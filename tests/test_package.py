"""The package as it is built: version, author, Pythons, and a long description without dead links."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import tokenyard

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
_LINK = re.compile(r"\]\(([^)#]+)")


def built(kind: str, source: Path, folder: Path) -> Path:
    """A `wheel` or an `sdist` of the project in a folder."""
    script = f"import sys; from hatchling.build import build_{kind} as build; print(build(sys.argv[1]))"
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(built("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def library(source, tmp_path_factory) -> Path:
    """The wheel that is built from the source distribution."""
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(library) -> Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(library) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(wheel.read(name))


def test_the_version_is_the_first_one_of_the_changelog(metadata):
    version, released = re.search(r"^## \[(.*?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
    assert metadata["Version"] == tokenyard.__version__
    assert tokenyard.__version__ == (f"{version}.dev0" if "unreleased" in released else version)


def test_somebody_is_named_as_the_author(metadata):
    assert metadata["Author"] == "The tokenyard authors"


def test_requirements_are_the_same_in_the_package_and_on_its_pages(metadata):
    named = re.findall(r"Programming Language :: Python :: 3\.(\d+)", str(metadata))
    assert metadata["Requires-Python"] == f">=3.{named[0]}"
    install = (ROOT / "docs" / "install.md").read_text()
    for told in (f"Python 3.{named[0]} or newer", "Linux", "x86"):
        assert told in README
        assert told in install.replace("| Python | ", "Python ")


def test_the_long_description_is_the_readme_without_links_that_lead_nowhere(metadata, source):
    description = metadata.get_payload(decode=True).decode()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert all(link.startswith("https://") for link in _LINK.findall(description))
    files = {link for link in _LINK.findall(README) if not link.startswith("https://")}
    assert len(files) > 10
    for file in files:
        assert f"`{file}" in description
        assert (source / file).exists()
    fences = re.compile(r"^```.*?^```$", re.M | re.S)
    assert fences.findall(description) == fences.findall(README)


def test_the_wheel_is_small_and_holds_the_library_alone(library):
    assert library.stat().st_size <= 1_200_000
    with zipfile.ZipFile(library) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tokenyard"}
    assert {Path(name).suffix for name in names if ".dist-info/" not in name} == {".py", ".typed"}


def test_the_lab_is_a_distribution_with_the_model_and_the_same_version(source, tmp_path):
    with zipfile.ZipFile(built("wheel", source / "lab", tmp_path)) as wheel:
        names = wheel.namelist()
        about = message_from_bytes(wheel.read(next(name for name in names if name.endswith("/METADATA"))))
        points = wheel.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    assert (about["Name"], about["Version"]) == ("tokenyard-lab", tokenyard.__version__)
    assert "tokenyard" in about.get_all("Requires-Dist")
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tokenyard_lab"}
    assert "tokenyard_lab/shipped/model/model.safetensors" in names
    assert "[tokenyard.commands]\nlab = tokenyard_lab.commands:COMMANDS\n" in points


_IMPORT = """
import sys, time
start = time.process_time()
import tokenyard
took = time.process_time() - start
print(took, *{name.partition(".")[0] for name in sys.modules})
"""
# Takes half a second or more to import, or is used by commands alone.
_HEAVY = {"torch", "numpy", "typer", "rich", "transformers", "triton", "tokenyard_lab"}


def test_importing_the_library_is_quick_and_loads_no_other():
    times = []
    for _ in range(10):  # time of the CPU, which other processes can slow down but not take
        command = [sys.executable, "-c", _IMPORT]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        took, *modules = done.stdout.split()
        assert not _HEAVY & set(modules)
        times.append(float(took))
        if times[-1] <= 0.05:
            return
    pytest.fail(f"it took {min(times):.3f} s at least")
