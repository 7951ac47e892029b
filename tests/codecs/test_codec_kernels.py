"""The kernel, native and NumPy: equal bytes, exact steps, steps that add up, one look at live memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from codec_words import KERNELS, WORDS, chunk_pair, chunk_pairs, native_kernel, special_words, using, value_of
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.codecs import Steps, Word, kernel
from deltastore.errors import FormatError, InvalidInputError

TRANSFORMS = ("plain", "rotate", "zigzag")


def as_bytes(steps: Steps) -> tuple[object, ...]:
    return steps.word, steps.length, steps.gaps.tobytes(), *(plane.tobytes() for plane in steps.planes)


def slow_steps(word: Word, old: np.ndarray, new: np.ndarray) -> tuple[bytes, list[bytes]]:
    """Gaps and planes by the definitions, one word at a time."""
    modulus = 1 << (8 * word.width)
    gaps, codes, gap = bytearray(), [], 0
    for before, after in zip(old.view(f"<u{word.width}").tolist(), new.view(f"<u{word.width}").tolist(), strict=True):
        if before == after:
            gap += 1
            continue
        gaps += b"\xff" * (gap // 255) + bytes([gap % 255])
        gap = 0
        step = (value_of(word, after) - value_of(word, before)) % modulus
        signed = step - modulus if step >= modulus // 2 else step
        codes.append((2 * signed if signed >= 0 else -2 * signed - 1) - 1)
    return bytes(gaps), [bytes(code >> (8 * plane) & 255 for code in codes) for plane in range(word.width)]


@given(chunk_pairs())
@settings(max_examples=150, deadline=None)
def test_kernels_extract_apply_and_collect_equal_bytes(case: tuple[Word, np.ndarray, np.ndarray]) -> None:
    word, old, new = case
    gaps, planes = slow_steps(word, old, new)
    for module in KERNELS:
        with using(module):
            baseline, live = old.copy(), new.copy()
            steps = kernel.extract(baseline, live, word)
            assert baseline.tobytes() == live.tobytes() == new.tobytes()
            assert (steps.gaps.tobytes(), [plane.tobytes() for plane in steps.planes]) == (gaps, planes)
            assert kernel.extract(baseline, live, word).count == 0

            target = old.copy()
            kernel.apply(target, steps)
            assert target.tobytes() == new.tobytes()

            total = np.zeros_like(old)
            kernel.accumulate(total, steps)
            assert as_bytes(kernel.collect(total, word)) == as_bytes(steps)
            target = old.copy()
            kernel.add(target, total, word)
            assert target.tobytes() == new.tobytes()


@given(chunk_pairs())
@settings(max_examples=100, deadline=None)
def test_kernels_split_merge_and_pack_equal_bytes(case: tuple[Word, np.ndarray, np.ndarray]) -> None:
    word, old, new = case
    seen: dict[str, set[bytes]] = {}
    for module in KERNELS:
        with using(module):
            for transform in TRANSFORMS:
                planes = kernel.split(new, word, transform)
                seen.setdefault(transform, set()).add(b"".join(plane.tobytes() for plane in planes))
                assert kernel.merge(planes, word, transform).tobytes() == new.tobytes()
            steps = kernel.extract(old.copy(), new, word)
            codes, longs = kernel.pack(steps)
            seen.setdefault("pack", set()).add(codes.tobytes() + b"".join(plane.tobytes() for plane in longs))
            target = old.copy()
            kernel.apply_packed(target, steps.gaps, codes, longs, steps.count, word)
            assert target.tobytes() == new.tobytes()
            total, expected = np.zeros_like(old), np.zeros_like(old)
            kernel.apply_packed(total, steps.gaps, codes, longs, steps.count, Word(word.width, False))
            kernel.accumulate(expected, steps)
            assert total.tobytes() == expected.tobytes()
    assert all(len(outputs) == 1 for outputs in seen.values())


@pytest.mark.parametrize("word", WORDS, ids=str)
def test_every_pair_of_special_words_survives(word: Word) -> None:
    special = special_words(word)
    old, new = np.repeat(special, special.size).view(np.uint8), np.tile(special, special.size).view(np.uint8)
    for module in KERNELS:
        with using(module):
            steps = kernel.extract(old.copy(), new, word)
            assert steps.count == special.size**2 - special.size  # equal bits are no change, -0.0 and 0.0 differ
            target = old.copy()
            kernel.apply(target, steps)
            assert target.tobytes() == new.tobytes()


def test_floats_of_one_ulp_apart_are_one_step_apart() -> None:
    values = np.array([-1.0, -0.0, 0.0, 1.0, 60000.0], np.float16)
    above = np.nextafter(values, np.float16(np.inf))
    word = Word(2, True)
    steps = kernel.extract(values.copy().view(np.uint8), above.view(np.uint8), word)
    # zigzag(1) - 1 = 1; from -0.0 the next number above is the smallest denormal, and 0.0 lies between the two
    assert steps.planes[0].tolist() == [1, 3, 1, 1, 1]
    assert steps.planes[1].tolist() == [0, 0, 0, 0, 0]


def test_rotate_gives_bf16_and_fp32_exponents_a_plane_of_their_own() -> None:
    numbers = np.array([1.5, -1.5, 1e-30, -3e20, 0.0], np.float32)
    exponents = (numbers.view(np.uint32) >> 23 & 255).astype(np.uint8)
    halves = (numbers.view(np.uint32) >> 16).astype("<u2")
    for module in KERNELS:
        with using(module):
            planes = kernel.split(numbers.view(np.uint8), Word(4, True), "rotate")
            assert planes[3].tolist() == exponents.tolist()
            assert planes[0].tolist() == (numbers.view(np.uint32) & 255).tolist()
            assert kernel.split(halves.view(np.uint8), Word(2, True), "rotate")[1].tolist() == exponents.tolist()


@given(
    st.sampled_from(WORDS),
    st.integers(0, 600),
    st.lists(st.sampled_from([0.001, 0.05, 0.9]), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_steps_of_successive_versions_add_up(word: Word, length: int, densities: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, version = (side.copy() for side in chunk_pair(word, length, 0.5, "special", seed))
    for module in KERNELS:
        with using(module):
            current, total = first.copy(), np.zeros_like(first)
            for density in densities:
                version = chunk_pair(word, length, density, "random", int(rng.integers(2**32)))[1]
                kernel.accumulate(total, kernel.extract(current, version, word))
            folded = kernel.collect(total, word)
            assert as_bytes(folded) == as_bytes(kernel.extract(first.copy(), version, word))


@pytest.mark.parametrize(
    ("gaps", "count"),
    [
        ([0] * 9, 9),  # more changes than words
        ([8], 1),  # first position behind the end
        ([0, 7], 2),  # a later one
        ([255, 0], 1),
        ([255], 0),  # ends in an escape
        ([0, 255], 1),
        ([0], 0),  # fewer steps than positions
        ([0], 2),
        ([], 1),
        ([255] * 300 + [0], 1),
    ],
)
def test_steps_that_do_not_fit_are_refused_and_change_nothing(gaps: list[int], count: int) -> None:
    for word in WORDS:
        steps = Steps(word, 8, np.array(gaps, np.uint8), (np.zeros(count, np.uint8),) * word.width)
        for module in KERNELS:
            memory = np.arange(8 * word.width + 64, dtype=np.uint8)
            before = memory.tobytes()
            with using(module), pytest.raises(FormatError, match="does not fit its chunk"):
                kernel.apply(memory[32:-32], steps)
            assert memory.tobytes() == before


def refused(word: Word, gaps: np.ndarray, codes: np.ndarray, longs: tuple[np.ndarray, ...], count: int, length: int) -> bool:
    """Whether packed steps are refused by every kernel, the target untouched; else their results are equal."""
    results = set()
    for module in KERNELS:
        memory = np.arange(length * word.width + 64, dtype=np.int64).astype(np.uint8)
        before = memory.copy()
        with using(module):
            try:
                kernel.apply_packed(memory[32:-32], gaps, codes, longs, count, word)
                results.add(memory.tobytes())
                assert np.array_equal(memory[:32], before[:32])
                assert np.array_equal(memory[-32:], before[-32:])
            except FormatError:
                assert memory.tobytes() == before.tobytes()
                results.add(b"refused")
    assert len(results) == 1
    return results == {b"refused"}


@pytest.mark.parametrize(
    ("gaps", "codes", "long_count", "count"),
    [
        ([0], [0b11], 0, 1),  # a long step that is not there
        ([0], [0b00], 1, 1),  # one too many
        ([0], [0b0100], 0, 1),  # a code behind the last change
        ([0, 0], [0b1111], 1, 2),
        ([0, 0], [0b1111], 3, 2),
        ([8], [0], 0, 1),  # a position behind the end
        ([0, 7], [0], 0, 2),
        ([255], [], 0, 0),  # ends in an escape
        ([0, 255], [0], 0, 1),
        ([0], [0], 0, 2),  # fewer positions than changes
        ([0] * 9, [0] * 3, 0, 9),  # more changes than words
        ([255] * 300 + [0], [0], 0, 1),
    ],
)
def test_packed_steps_that_do_not_fit_are_refused_and_change_nothing(
    gaps: list[int], codes: list[int], long_count: int, count: int
) -> None:
    for word in WORDS:
        longs = (np.ones(long_count, np.uint8),) * word.width
        assert refused(word, np.array(gaps, np.uint8), np.array(codes, np.uint8), longs, count, 8)
        assert not refused(
            word, np.array([3, 2], np.uint8), np.array([0b1101], np.uint8), (np.ones(1, np.uint8),) * word.width, 2, 8
        )


@given(
    st.sampled_from(WORDS),
    st.sampled_from([1, 2, 31, 32, 33, 511, 512, 513, 1025, 1600]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([0, 1, 300]),
    st.sampled_from(["", "gap", "code", "long", "end"]),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_packed_steps_of_many_tiles_give_equal_results_whole_or_damaged(
    word: Word, count: int, share: float, spread: int, damage: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    skipped = rng.integers(0, spread + 1, count)
    gaps = np.concatenate([np.array([255] * (skip // 255) + [skip % 255], np.uint8) for skip in skipped.tolist()])
    kinds = np.where(rng.random(count) < share, 3, rng.integers(0, 3, count))
    quads = np.zeros((count + 3) // 4 * 4, np.int64)
    quads[:count] = kinds
    codes = (quads.reshape(-1, 4) << [0, 2, 4, 6]).sum(axis=1).astype(np.uint8)
    long_count = int((kinds == 3).sum())
    length = int(skipped.sum()) + count
    if damage == "gap":
        gaps[rng.integers(gaps.size)] ^= np.uint8(1 << int(rng.integers(8)))
    elif damage == "code":
        codes[rng.integers(codes.size)] ^= np.uint8(1 << int(rng.integers(8)))
    elif damage == "long":
        long_count += 1
    elif damage == "end":
        length -= 1
    longs = tuple(rng.integers(0, 256, long_count, np.uint8) for _ in range(word.width))
    found = refused(word, gaps, codes, longs, count, length)
    if damage in ("", "long", "end"):
        assert found == bool(damage)


@pytest.mark.skipif(native_kernel is None, reason="the native kernel is not built")
def test_streams_that_change_while_they_are_applied_never_lead_outside_of_the_target() -> None:
    count, length = 40_000, 80_000
    gaps, codes = np.ones(count, np.uint8), np.zeros(count // 4, np.uint8)
    longs = (np.zeros(0, np.uint8),) * 2
    memory = np.full(2 * length + 8192, 0xA5, np.uint8)
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            gaps[::3] = 255
            codes[:] = 255
            gaps[:] = 1
            codes[:] = 0

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(300):
            native_kernel.apply_packed(memory[4096:-4096], gaps, codes, longs, count, 2, True)
    finally:
        stop.set()
        thread.join()
    assert bool((memory[:4096] == 0xA5).all())
    assert bool((memory[-4096:] == 0xA5).all())


def test_buffers_of_wrong_size_or_kind_are_refused() -> None:
    word = Word(4, True)
    eight = np.zeros(8, np.uint8)
    with pytest.raises(InvalidInputError, match="same chunk"):
        kernel.extract(eight, np.zeros(12, np.uint8), word)
    with pytest.raises(InvalidInputError, match="whole number"):
        kernel.collect(np.zeros(7, np.uint8), word)
    with pytest.raises(InvalidInputError, match="contiguous uint8"):
        kernel.collect(np.zeros(16, np.uint8)[::2], word)
    with pytest.raises(InvalidInputError, match="contiguous uint8"):
        kernel.collect(np.zeros(2, np.float32), word)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="need 8 bytes"):
        kernel.merge((np.zeros(2, np.uint8),) * 4, word, "plain", np.zeros(4, np.uint8))
    with pytest.raises(InvalidInputError, match="must be equal"):
        kernel.add(eight, np.zeros(4, np.uint8), word)
    with pytest.raises(InvalidInputError, match="1, 2, 4 or 8"):
        Word(3, False)


@pytest.mark.skipif(native_kernel is None, reason="the native kernel is not built")
def test_the_native_kernel_checks_its_own_arguments() -> None:
    def zeros(size: int) -> np.ndarray:
        return np.zeros(size, np.uint8)

    calls = [
        lambda: native_kernel.extract(zeros(8), zeros(8), zeros(64), zeros(8), 3, True),
        lambda: native_kernel.extract(zeros(8), zeros(16), zeros(64), zeros(16), 2, True),
        lambda: native_kernel.extract(zeros(8), zeros(8), zeros(8), zeros(8), 1, True),
        lambda: native_kernel.extract(zeros(8), zeros(8), zeros(64), zeros(7), 1, True),
        lambda: native_kernel.collect(zeros(9), zeros(64), zeros(64), 2),
        lambda: native_kernel.apply(zeros(8), zeros(1), (zeros(1),), 2, True),
        lambda: native_kernel.apply(zeros(8), zeros(1), (zeros(1), zeros(2)), 2, True),
        lambda: native_kernel.apply(zeros(8), zeros(1), [zeros(1), zeros(1)], 2, True),
        lambda: native_kernel.add(zeros(8), zeros(4), 2, True),
        lambda: native_kernel.split(zeros(8), zeros(8), 2, 3),
        lambda: native_kernel.split(zeros(8), zeros(4), 2, 0),
        lambda: native_kernel.merge((zeros(4), zeros(4)), zeros(6), 2, 0),
        lambda: native_kernel.merge((zeros(4), zeros(4)), zeros(9), 2, 0),
        lambda: native_kernel.pack((zeros(5), zeros(5)), zeros(1), zeros(10), 2),
        lambda: native_kernel.pack((zeros(5), zeros(5)), zeros(2), zeros(9), 2),
        lambda: native_kernel.apply_packed(zeros(8), zeros(4), zeros(2), (zeros(0), zeros(0)), 4, 2, True),
        lambda: native_kernel.apply_packed(zeros(8), zeros(4), zeros(1), (zeros(0), zeros(0)), -1, 2, True),
        lambda: native_kernel.apply_packed(zeros(8), zeros(4), zeros(1), (zeros(0), zeros(1)), 4, 2, True),
        lambda: native_kernel.apply_packed(zeros(8), zeros(4), zeros(1), (zeros(0),), 4, 2, True),
        lambda: native_kernel.apply_packed(zeros(9), zeros(4), zeros(1), (zeros(0), zeros(0)), 4, 2, True),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()
    read_only = zeros(8)
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError, TypeError)):
        native_kernel.add(read_only, zeros(8), 1, False)


def test_unaligned_buffers_give_the_same_bytes() -> None:
    for word in WORDS:
        old, new = chunk_pair(word, 777, 0.1, "near", 5)
        shifted = np.zeros(old.size + 1, np.uint8)
        shifted[1:] = old
        live = np.zeros(old.size + 3, np.uint8)
        live[3:] = new
        for module in KERNELS:
            with using(module):
                expected = kernel.extract(old.copy(), new, word)
                baseline = shifted.copy()[1:]
                assert as_bytes(kernel.extract(baseline, live[3:], word)) == as_bytes(expected)
                assert baseline.tobytes() == new.tobytes()


@pytest.mark.parametrize("module", KERNELS, ids=lambda module: module.__name__)
def test_live_words_that_change_meanwhile_give_a_mixture_but_never_a_wrong_delta(module: object) -> None:
    word = Word(2, True)
    rng = np.random.default_rng(7)
    one = rng.integers(0, 1 << 16, 1 << 19).astype("<u2")
    two = one ^ (rng.random(one.size) < 0.3).astype("<u2")
    live = one.copy()
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            np.copyto(live, two)
            np.copyto(live, one)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        with using(module):
            baseline = one.copy().view(np.uint8)
            for _ in range(30):
                before = baseline.copy()
                kernel.apply(before, kernel.extract(baseline, live.view(np.uint8), word))
                assert before.tobytes() == baseline.tobytes()
                seen = baseline.view("<u2")
                assert bool(((seen == one) | (seen == two)).all())
    finally:
        stop.set()
        thread.join()


def test_threads_do_not_share_scratch_memory() -> None:
    word = Word(4, True)
    failures: list[int] = []

    def work(seed: int) -> None:
        for round_ in range(20):
            old, new = chunk_pair(word, 3000 + 100 * seed, 0.3, "near", 31 * seed + round_)
            target = old.copy()
            kernel.apply(target, kernel.extract(old.copy(), new, word))
            if target.tobytes() != new.tobytes():
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("setting", "expected"), [("numpy", "numpy"), ("", "native" if native_kernel else "numpy"), ("fast", "InvalidInputError")]
)
def test_the_environment_chooses_the_kernel(setting: str, expected: str) -> None:
    program = "from deltastore.codecs import kernel; print(kernel.NAME, kernel._backend.__name__)"
    environment = {**os.environ, "DELTASTORE_KERNEL": setting}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == (expected != "InvalidInputError")
