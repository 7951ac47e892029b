"""Payloads: round trips, folds, frozen samples, and what hostile bytes may do (fail, or stay in bounds)."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from codec_words import KERNELS, WORDS, chunk_pair, chunk_pairs, using
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.codecs import (
    Steps,
    Word,
    accumulate_delta,
    accumulate_deltas,
    apply_delta,
    apply_together,
    decode_full,
    delta_summary,
    encode_delta,
    encode_full,
    is_delta,
    kernel,
    numpy_kernel,
)
from deltastore.codecs.delta import DENSE, SPARSE, encode_dense, encode_sparse
from deltastore.codecs.full import PLANES, RAW
from deltastore.codecs.streams import PayloadReader, write_payload
from deltastore.errors import FormatError, UnsupportedFormatError

SAMPLES = Path(__file__).parent / "samples"
BF16 = Word(2, True)
CANARY = 64


def guarded(chunk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chunk inside a larger array: (all of it, the chunk)."""
    memory = np.full(chunk.size + 2 * CANARY, 0xA5, np.uint8)
    memory[CANARY : CANARY + chunk.size] = chunk
    return memory, memory[CANARY : CANARY + chunk.size]


def survives(codec: str, payload: bytes, base: np.ndarray) -> bool:
    """Decodes in all ways on all kernels. FormatError is fine, writing outside of the output is not. True: decoded."""
    outcomes = set()
    for module in KERNELS:
        memory, chunk = guarded(base)
        with using(module):
            try:
                if is_delta(codec):
                    word, _ = delta_summary(codec, payload)
                    accumulate_delta(codec, payload, np.zeros_like(base), word)
                    apply_delta(codec, payload, chunk)
                else:
                    decode_full(codec, payload, chunk)
                outcomes.add(chunk.tobytes())
            except FormatError:
                outcomes.add(b"refused")
            if is_delta(codec):
                outcomes.add(applied_together(codec, payload, base))
        assert bool((memory[:CANARY] == 0xA5).all())
        assert bool((memory[CANARY + base.size :] == 0xA5).all())
    assert len(outcomes) == 1  # both kernels agree
    return outcomes != {b"refused"}


def applied_together(codec: str, payload: bytes, base: np.ndarray) -> bytes:
    """What `apply_together` makes of one delta, which a bad one behind it may not change."""
    memory, chunk = guarded(base)
    (rest,) = {bool(apply_together([(codec, payload)], chunk)), bool(apply_together([(codec, payload)] * 2, base.copy()))}
    assert bool((memory[:CANARY] == 0xA5).all())
    assert bool((memory[CANARY + base.size :] == 0xA5).all())
    if not rest:
        assert apply_together([(codec, payload), (codec, payload[:-1])], base.copy()) == [0, 1]
        return chunk.tobytes()
    assert chunk.tobytes() == base.tobytes()
    try:
        apply_delta(codec, payload, chunk)
    except FormatError:
        return b"refused"
    assert codec == DENSE or kernel._backend is numpy_kernel
    return chunk.tobytes()


def valid_payloads() -> list[Any]:
    cases = []
    for word in (BF16, Word(1, False), Word(4, True), Word(8, False)):
        for density, pattern, encode, codec in (
            (0.1, "near", encode_sparse, SPARSE),
            (0.9, "near", encode_dense, DENSE),
            (0.4, "special", encode_sparse, SPARSE),
        ):
            old, new = chunk_pair(word, 300, density, pattern, 3)
            payload = encode(kernel.extract(old.copy(), new, word))
            cases.append(pytest.param(codec, payload, old, id=f"{codec}-{word.code}-{pattern}"))
        chunk = np.tile(np.arange(8, dtype=np.uint8), 30).repeat(word.width)
        payload = write_payload(word, (), kernel.split(chunk, word, "rotate" if word.floating else "plain"))
        cases.append(pytest.param(PLANES, payload, chunk, id=f"{PLANES}-{word.code}"))
    return cases


@given(chunk_pairs())
@settings(max_examples=150, deadline=None)
def test_deltas_and_full_chunks_come_back_bit_by_bit(case: tuple[Word, np.ndarray, np.ndarray]) -> None:
    word, old, new = case
    payloads = set()
    for module in KERNELS:
        with using(module):
            steps = kernel.extract(old.copy(), new, word)
            forms = {encode_delta(steps), (SPARSE, encode_sparse(steps)), (DENSE, encode_dense(steps))}
            for codec, payload in forms:
                assert delta_summary(codec, payload) == (word, steps.count)
                target = old.copy()
                apply_delta(codec, payload, target)
                assert target.tobytes() == new.tobytes()
            codec, payload = encode_full(new, word)
            assert len(payload) <= new.size
            assert codec in (RAW, PLANES)
            out = np.full_like(new, 7)
            decode_full(codec, payload, out)
            assert out.tobytes() == new.tobytes()
            payloads.add((*sorted(forms), codec, payload))
    assert len(payloads) == 1  # every kernel writes the same bytes


@given(
    st.sampled_from(WORDS),
    st.integers(0, 500),
    st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.55, 1.0]), max_size=20),
    st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_a_fold_of_sparse_and_dense_deltas_is_the_delta_of_the_ends(
    word: Word, length: int, densities: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    first = chunk_pair(word, length, 0.0, "special", seed)[0].copy()
    for module in KERNELS:
        with using(module):
            current, total = first.copy(), np.zeros_like(first)
            deltas = []
            for index, density in enumerate(densities):
                changed = rng.random(length) < density
                version = current.reshape(length, word.width).copy()
                version[changed] = rng.integers(0, 256, (int(changed.sum()), word.width), np.uint8)
                steps = kernel.extract(current, version.reshape(-1), word)
                codec, payload = encode_delta(steps) if index % 2 else (DENSE, encode_dense(steps))
                accumulate_delta(codec, payload, total, word)
                deltas.append((codec, payload))
            at_once = np.zeros_like(first)
            accumulate_deltas(deltas, at_once, word)
            assert at_once.tobytes() == total.tobytes()
            folded = encode_delta(kernel.collect(total, word))
            assert folded == encode_delta(kernel.extract(first.copy(), current, word))
            target = first.copy()
            apply_delta(*folded, target)
            together = first.copy()
            for index in apply_together(deltas, together):
                apply_delta(*deltas[index], together)
            assert together.tobytes() == target.tobytes() == current.tobytes()


def test_small_and_large_steps_choose_the_form_by_density() -> None:
    for density, expected in ((0.01, {SPARSE}), (0.45, {SPARSE}), (0.55, {SPARSE, DENSE}), (0.65, {DENSE}), (1.0, {DENSE})):
        old, new = chunk_pair(BF16, 5000, density, "near", 1)
        steps = kernel.extract(old, new, BF16)
        codec, payload = encode_delta(steps)
        assert codec in expected
        if len(expected) == 2:
            assert len(payload) == min(len(encode_sparse(steps)), len(encode_dense(steps)))


def test_sizes_stay_within_the_budget_on_simulated_training() -> None:
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.04, 1 << 20).astype(np.float32)
    moved = master + rng.laplace(0, 6e-7, master.size).astype(np.float32)

    def as_bf16(values: np.ndarray) -> np.ndarray:
        return ((values.view(np.uint32) + 0x8000) >> 16).astype("<u2").view(np.uint8)

    steps = kernel.extract(as_bf16(master).copy(), as_bf16(moved), BF16)
    assert 0.005 < steps.density < 0.02
    assert len(encode_delta(steps)[1]) <= 1.25 * steps.count
    codec, payload = encode_full(as_bf16(master), BF16)
    assert codec == PLANES
    assert len(payload) <= 0.685 * 2 * master.size
    codec, payload = encode_full(master.view(np.uint8), Word(4, True))
    assert codec == PLANES
    assert len(payload) <= 0.84 * 4 * master.size


def test_a_change_of_a_small_tensor_costs_a_few_bytes() -> None:
    bias = np.random.default_rng(0).normal(size=384).astype(np.float16).view("<u2")
    moved = bias.copy()
    moved[[5, 40, 41, 300]] += np.array([1, 2, 1, 1], np.uint16)
    codec, payload = encode_delta(kernel.extract(bias.view(np.uint8), moved.view(np.uint8), Word(2, True)))
    assert codec == SPARSE
    assert len(payload) <= 8 + 5 + 2 + 1  # numbers and heads, gaps with one escape, codes and one long step


def test_a_chunk_that_does_not_compress_stays_raw() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    assert encode_full(noise, BF16) == (RAW, noise.tobytes())
    assert encode_full(np.zeros(0, np.uint8), BF16) == (RAW, b"")
    codec, payload = encode_full(np.zeros(1 << 16, np.uint8), BF16)
    assert (codec, payload) == (PLANES, bytes([BF16.code, 0, 0]))


@pytest.mark.parametrize(("codec", "payload", "base"), valid_payloads())
def test_truncated_and_extended_payloads_are_refused(codec: str, payload: bytes, base: np.ndarray) -> None:
    assert survives(codec, payload, base)
    for length in range(len(payload)):
        assert not survives(codec, payload[:length], base)
    assert not survives(codec, payload + b"\0", base)
    assert not survives(codec, b"", base)


@pytest.mark.parametrize(("codec", "payload", "base"), valid_payloads())
def test_no_bit_of_our_own_is_spare(codec: str, payload: bytes, base: np.ndarray) -> None:
    """Whatever bit flips outside of compressed blocks, the payload is refused or gives another chunk.

    zstd itself leaves some bits without meaning, such as the last half byte of an odd number of Huffman weights.
    """
    reader = PayloadReader(payload, codec)
    width = reader.word().width
    for _ in range({SPARSE: 3, DENSE: 1, PLANES: 0}[codec]):
        reader.number(1 << 40, "number")
    heads = [reader.number(1 << 40, "head") for _ in range(width + 2 * (codec == SPARSE))]
    compressed: set[int] = set()
    at = reader._at
    for head in heads:
        if head & 3 == 2:
            compressed |= set(range(at + 2, at + (head >> 2)))
        at += head >> 2
    assert at == len(payload)

    def decoded(data: bytes) -> bytes:
        chunk = base.copy()
        if is_delta(codec):
            apply_delta(codec, data, chunk)
        else:
            decode_full(codec, data, chunk)
        return chunk.tobytes()

    expected = decoded(payload)
    for index, byte in enumerate(payload):
        if index in compressed:
            continue
        for bit in range(8):
            flipped = payload[:index] + bytes([byte ^ 1 << bit]) + payload[index + 1 :]
            try:
                found = decoded(flipped)
            except FormatError:
                continue
            assert found != expected, (index, bit)


@pytest.mark.parametrize(("codec", "payload", "base"), valid_payloads())
def test_flipped_bits_are_refused_or_stay_in_bounds(codec: str, payload: bytes, base: np.ndarray) -> None:
    bits = range(8 * len(payload)) if len(payload) < 150 else np.random.default_rng(0).integers(0, 8 * len(payload), 600).tolist()
    refused = 0
    for bit in bits:
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        refused += not survives(codec, bytes(damaged), base)
    assert refused > 0


@given(
    st.sampled_from([SPARSE, DENSE, PLANES, RAW]),
    st.binary(max_size=80),
    st.sampled_from([0, 1, 8, 64, 300, 1024]),
    st.integers(0, 7),
)
@settings(max_examples=400, deadline=None)
def test_random_bytes_are_refused_or_stay_in_bounds(codec: str, payload: bytes, size: int, code: int) -> None:
    survives(codec, payload, np.zeros(size, np.uint8))
    survives(codec, bytes([code]) + payload, np.zeros(size, np.uint8))


def frame(raw: bytes, **parameters: int) -> bytes:
    chosen = zstandard.ZstdCompressionParameters.from_level(
        3, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_checksum=0, **{"write_content_size": 0, **parameters}
    )
    return zstandard.ZstdCompressor(compression_params=chosen).compress(raw)


@pytest.mark.parametrize(
    "body",
    [
        frame(bytes(10_000_000)),  # expands to more than the plane
        frame(bytes(1999) + b"\1"),  # to less
        frame(bytes(range(200)) * 10)[:-3],
        frame(bytes(2000), write_content_size=1),
        b"\xe0" + b"\xff" * 8 + frame(bytes(2000))[1:],  # announces 2^64 - 1 bytes
        b"\x00\xff" + frame(bytes(2000))[2:],  # a window of terabytes
        frame(bytes(range(256)) * 8, write_content_size=0)[:1] + b"\x58" + b"\x04" * 40,
        b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + b"\0" * 8,  # with a magic number
        frame(bytes(2048)) + b"\0",
    ],
)
def test_zstd_frames_can_not_make_the_decoder_allocate(body: bytes) -> None:
    # dense delta of 2048 one-byte integers; the head is varint(stored length << 2 | zstd)
    stored = len(body) << 2 | 2
    head = (
        bytes([stored & 127 | 128, stored >> 7 & 127 | 128, stored >> 14])
        if stored > 16383
        else bytes([stored & 127 | 128, stored >> 7])
    )
    payload = bytes([0, 1]) + head + body
    target = np.zeros(2048, np.uint8)
    apply_delta(
        DENSE, encode_dense(kernel.extract(target.copy(), np.arange(2048).astype(np.uint8), Word(1, False))), target.copy()
    )
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            apply_delta(DENSE, payload, target)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert not target.any()


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ((1 << 40, 0, 0), "number of changes is"),
        ((1025, 1025, 0), "number of changes is 1025, expected at most 1024"),
        ((4, 1 << 50, 0), "number of gap bytes is"),
        ((4, 4, 5), "number of long steps is 5, expected at most 4"),
    ],
)
def test_numbers_beyond_what_the_chunk_can_hold_are_refused(numbers: tuple[int, ...], match: str) -> None:
    payload = write_payload(BF16, numbers, [np.ones(64, np.uint8)] * 4)
    with pytest.raises(FormatError, match=match):
        apply_delta(SPARSE, payload, np.zeros(2048, np.uint8))


def test_wrong_codecs_and_words_are_named() -> None:
    steps = kernel.extract(np.zeros(64, np.uint8), np.ones(64, np.uint8), BF16)
    codec, payload = encode_delta(steps)
    chunk = np.zeros(64, np.uint8)
    with pytest.raises(UnsupportedFormatError, match="sparse-ulp@2"):
        apply_delta("sparse-ulp@2", payload, chunk)
    with pytest.raises(UnsupportedFormatError, match="planes@1"):
        accumulate_delta(PLANES, payload, chunk, BF16)
    with pytest.raises(UnsupportedFormatError, match="entropy@9"):
        decode_full("entropy@9", payload, chunk)
    with pytest.raises(UnsupportedFormatError, match="raw@1"):
        delta_summary(RAW, payload)
    with pytest.raises(FormatError, match="words are"):
        accumulate_delta(codec, payload, chunk, Word(2, False))
    with pytest.raises(FormatError, match="can't fill 63 bytes"):
        apply_delta(codec, payload, np.zeros(63, np.uint8))
    with pytest.raises(FormatError, match="word code 9"):
        apply_delta(codec, b"\x09" + payload[1:], chunk)
    with pytest.raises(FormatError, match="4 bytes, its chunk 64"):
        decode_full(RAW, b"\0" * 4, chunk)
    assert not chunk.any()


def test_payloads_may_be_any_buffer() -> None:
    old, new = chunk_pair(BF16, 500, 0.2, "near", 2)
    codec, payload = encode_delta(kernel.extract(old.copy(), new, BF16))
    for buffer in (payload, bytearray(payload), memoryview(b"xx" + payload)[2:], np.frombuffer(payload, np.uint8)):
        target = old.copy()
        apply_delta(codec, buffer, target)
        assert target.tobytes() == new.tobytes()


def test_threads_have_coders_of_their_own() -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        for round_ in range(15):
            old, new = chunk_pair(BF16, 20_000, 0.05, "near", 100 * seed + round_)
            target = old.copy()
            apply_delta(*encode_delta(kernel.extract(old.copy(), new, BF16)), target)
            out = np.empty_like(new)
            decode_full(*encode_full(new, BF16), out)
            if target.tobytes() != new.tobytes() or out.tobytes() != new.tobytes():
                failures.append(f"{seed}/{round_}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("sample", json.loads((SAMPLES / "small.json").read_text()), ids=lambda sample: sample["name"])
def test_frozen_payloads_are_read_for_ever(sample: dict[str, Any]) -> None:
    payload, expected = base64.b64decode(sample["payload"]), base64.b64decode(sample["chunk"])
    for module in KERNELS:
        with using(module):
            if sample["base"] is None:
                chunk = np.full(len(expected), 1, np.uint8)
                decode_full(sample["codec"], payload, chunk)
            else:
                chunk = np.frombuffer(base64.b64decode(sample["base"]), np.uint8).copy()
                apply_delta(sample["codec"], payload, chunk)
                assert delta_summary(sample["codec"], payload)[0] == Word.from_code(sample["word"])
            assert chunk.tobytes() == expected


def test_frozen_payloads_of_several_zstd_blocks_are_read_for_ever() -> None:
    sample = json.loads((SAMPLES / "large.json").read_text())
    for module in KERNELS:
        for codec, form in ((SPARSE, "sparse"), (DENSE, "dense")):
            chunk = (np.arange(160_000) % 40_000).astype("<u2").view(np.uint8)
            with using(module):
                apply_delta(codec, base64.b64decode(sample[form]), chunk)
            assert hashlib.sha256(chunk.tobytes()).hexdigest() == sample["digest"]


def test_empty_steps_make_the_shortest_payload() -> None:
    steps = Steps(BF16, 0, np.zeros(0, np.uint8), (np.zeros(0, np.uint8),) * 2)
    codec, payload = encode_delta(steps)
    empty = np.zeros(0, np.uint8)
    apply_delta(codec, payload, empty)
    assert delta_summary(codec, payload) == (BF16, 0)
