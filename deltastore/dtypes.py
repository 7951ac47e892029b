"""The element types that format 1 can hold: every dense, non-quantised torch dtype, known here without importing torch.

Names are torch's own without the prefix. Codes of safetensors files follow the safetensors format description, version
0.8; `float4_e2m1fn_x2` holds two `F4` values per element, so its last dimension counts double there (`file_shape`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltastore.errors import IncompatibleStateError, UnsupportedFormatError

PACKED_FLOAT4 = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `itemsize` is the bytes of one storage element and `word` the bytes of one step word (1, 2, 4 or 8; a complex number
    is two words). `floating`: words are sign-magnitude floats, so that neighbouring values have neighbouring ranks.
    `safetensors` is the code in safetensors files, None when that format has none.
    """

    name: str
    itemsize: int
    word: int
    floating: bool
    safetensors: str | None = None

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shape to write into a safetensors file; None when a packed element has no dimension to be counted in."""
        if self.name != PACKED_FLOAT4:
            return tuple(shape)
        return (*shape[:-1], shape[-1] * 2) if shape else None

    def shape_from_file(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The shape in storage elements of a shape in a safetensors file; None when it does not fill whole bytes."""
        if self.name != PACKED_FLOAT4:
            return tuple(shape)
        return (*shape[:-1], shape[-1] // 2) if shape and shape[-1] % 2 == 0 else None


DTYPES: tuple[DType, ...] = (
    DType("bool", 1, 1, False, "BOOL"),
    DType("uint8", 1, 1, False, "U8"),
    DType("int8", 1, 1, False, "I8"),
    DType("uint16", 2, 2, False, "U16"),
    DType("int16", 2, 2, False, "I16"),
    DType("uint32", 4, 4, False, "U32"),
    DType("int32", 4, 4, False, "I32"),
    DType("uint64", 8, 8, False, "U64"),
    DType("int64", 8, 8, False, "I64"),
    DType("float8_e4m3fn", 1, 1, True, "F8_E4M3"),
    DType("float8_e4m3fnuz", 1, 1, True, "F8_E4M3FNUZ"),
    DType("float8_e5m2", 1, 1, True, "F8_E5M2"),
    DType("float8_e5m2fnuz", 1, 1, True, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, 1, False, "F8_E8M0"),  # an exponent without a sign
    DType(PACKED_FLOAT4, 1, 1, False, "F4"),
    DType("float16", 2, 2, True, "F16"),
    DType("bfloat16", 2, 2, True, "BF16"),
    DType("float32", 4, 4, True, "F32"),
    DType("float64", 8, 8, True, "F64"),
    DType("complex32", 4, 2, True),
    DType("complex64", 8, 4, True, "C64"),
    DType("complex128", 16, 8, True),
    *(DType(f"{sign}int{bits}", 1, 1, False) for bits in range(1, 8) for sign in ("", "u")),  # one value per byte
    DType("bits8", 1, 1, False),
    DType("bits16", 2, 2, False),
    DType("bits1x8", 1, 1, False),
    DType("bits2x4", 1, 1, False),
    DType("bits4x2", 1, 1, False),
)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES if dtype.safetensors is not None}


def dtype_of(name: str) -> DType:
    """The element type with this torch name, such as `"bfloat16"`. Raises IncompatibleStateError for any other name."""
    found = _BY_NAME.get(name)
    if found is None:
        raise IncompatibleStateError(
            f"dtype {str(name)[:80]!r} is not one that deltastore stores; convert the tensor to a dense dtype, such as "
            "`tensor.dequantize()` or `tensor.to(torch.bfloat16)`, or use a newer deltastore"
        )
    return found


def from_safetensors(code: str) -> DType:
    """The element type behind a code of a safetensors file, such as `"BF16"`. Raises UnsupportedFormatError."""
    found = _BY_CODE.get(code)
    if found is None:
        raise UnsupportedFormatError(
            f"safetensors dtype {str(code)[:80]!r} is not known here (known: {', '.join(_BY_CODE)}); "
            "convert the file, or use a newer deltastore"
        )
    return found
