"""Elementary functions that compiled loops can vectorise: libm's ``expf`` is called once an element, this one is inlined.

Float32 in, float32 out. The reference is numpy's own, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)
_MOST = np.float32(88.0)
# Minimax polynomial of exp on ±ln 2 / 2 (Cephes' coefficients).
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ONE = np.float32(1)
_ROUNDING = np.float32(1.5 * 2**23)
"""Added and taken away again, it leaves a whole number."""
_MANTISSA = np.int32(23)
_BIAS = np.int32(127 << 23)


@intrinsic
def _as_float32(typingctx: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@intrinsic
def _as_int32(typingctx: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), codegen


# Contraction only, and said so, since a function that says nothing takes its caller's flags: neither the rounding by a large number
# nor the two-part subtraction may be rearranged.
@njit(fastmath={"contract"}, error_model="numpy")
def exp32(x):  # type: ignore[no-untyped-def]  # numba infers
    """e to the x within 2e-7 of itself; what lies beyond -87 and 88 counts as that, a NaN stays one."""
    limited = _LEAST if x < _LEAST else x
    limited = _MOST if limited > _MOST else limited
    shifted = limited * _LOG2E + _ROUNDING
    power = shifted - _ROUNDING
    rest = limited - power * _LN2_HIGH
    rest = rest - power * _LN2_LOW
    value = _C0
    value = value * rest + _C1
    value = value * rest + _C2
    value = value * rest + _C3
    value = value * rest + _C4
    value = value * rest + _C5
    value = value * rest * rest + rest + _ONE
    # The whole number is in the low bits of ``shifted``; as an exponent it multiplies by a power of two.
    return value * _as_float32(np.int32((_as_int32(shifted) << _MANTISSA) + _BIAS))


@njit(fastmath={"contract"}, error_model="numpy")
def sigmoid32(x):  # type: ignore[no-untyped-def]  # numba infers
    """1 / (1 + e to the -x)."""
    return _ONE / (_ONE + exp32(-x))
