"""The table of element types against the installed torch and safetensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import _TYPES, save

from deltastore.dtypes import DTYPES, dtype_of, from_safetensors
from deltastore.errors import IncompatibleStateError, UnsupportedFormatError
from deltastore.tensors import empty_tensor, from_torch_dtype, to_torch_dtype

TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTISED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_is_known_or_refused_by_name(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name in QUANTISED:
        with pytest.raises(IncompatibleStateError, match=name):
            from_torch_dtype(dtype)
        return
    known = dtype_of(from_torch_dtype(dtype))
    assert to_torch_dtype(known.name) is dtype
    assert known.itemsize == dtype.itemsize
    assert known.word == dtype.itemsize // (2 if dtype.is_complex else 1)
    if known.floating:
        assert dtype.is_floating_point or dtype.is_complex


def test_table_has_unique_names_and_codes() -> None:
    assert len({dtype.name for dtype in DTYPES}) == len(DTYPES)
    codes = [dtype.safetensors for dtype in DTYPES if dtype.safetensors is not None]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES if dtype.safetensors is not None])
def test_codes_and_shapes_are_those_of_the_safetensors_library(name: str) -> None:
    known = dtype_of(name)
    header = save({"t": empty_tensor(name, (3, 4))}).decode("latin-1")
    shape = list(known.file_shape((3, 4)) or ())
    assert f'"dtype":"{known.safetensors}","shape":{shape}'.replace(" ", "") in header
    assert known.shape_from_file(shape) == (3, 4)
    assert from_safetensors(str(known.safetensors)) is known


def test_codes_of_the_library_are_known() -> None:
    assert {code: str(dtype) for code, dtype in _TYPES.items()} == {
        code: f"torch.{from_safetensors(code).name}" for code in _TYPES
    }


def test_packed_floats_need_a_dimension_of_whole_bytes() -> None:
    packed = dtype_of("float4_e2m1fn_x2")
    assert packed.file_shape(()) is None
    assert packed.shape_from_file((4, 7)) is None
    assert packed.shape_from_file(()) is None


def test_unknown_names_are_typed_errors() -> None:
    with pytest.raises(IncompatibleStateError, match="float3"):
        dtype_of("float3")
    with pytest.raises(UnsupportedFormatError, match="F6_E2M3"):
        from_safetensors("F6_E2M3")
