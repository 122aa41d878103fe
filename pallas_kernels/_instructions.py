"""Single instructions, on the registers of the threads of a warpgroup, for inlined Mosaic code."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


def word_type() -> Any:
    return ir.IntegerType.get_signless(32)


def word(value: int) -> Any:
    signed = value - 2**32 if value >= 2**31 else value
    return arith.constant(word_type(), ir.IntegerAttr.get(word_type(), signed))


def mask(number: Any, bits: int) -> Any:
    return arith.andi(number, word(bits))


def shift(number: Any, bits: int) -> Any:
    return arith.shrui(number, word(bits))


def shift_left(number: Any, bits: int) -> Any:
    return arith.shli(number, word(bits))


def wide(value: int) -> Any:
    kind = ir.IntegerType.get_signless(64)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def extend(number: Any) -> Any:
    return arith.extui(ir.IntegerType.get_signless(64), number)


def wide_product(number: Any, factor: int) -> Any:
    return arith.muli(arith.extsi(ir.IntegerType.get_signless(64), number), wide(factor))


def address(ref: Any, bits: int) -> Any:
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), utils.memref_ptr(ref))


def at(base: Any, row: Any) -> Any:
    """Returns the address of 16 bytes."""
    return utils.getelementptr(base, [row], ir.VectorType.get((4,), ir.F32Type.get()))


def element(register: Any) -> Any:
    return extract(register, 0) if isinstance(register.type, ir.VectorType) else register


def load_four(base: Any, row: Any) -> list[Any]:
    """Loads the words of 16 bytes."""
    four = llvm.load(ir.VectorType.get((4,), word_type()), at(base, row), alignment=16)
    return [extract(four, i) for i in range(4)]


def extract(register: Any, index: int) -> Any:
    return vector.extract(
        register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index])
    )


def pack(numbers: Sequence[Any]) -> Any:
    return vector.from_elements(ir.VectorType.get((len(numbers),), numbers[0].type), numbers)


def struct(shape: tuple[int, ...], dtype: DTypeLike, layout: Any) -> Any:
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout)


def as_fragments(registers: Any, shape: tuple[int, ...], dtype: Any, layout: Any) -> Any:
    """Returns registers, in order, as an array of a warpgroup."""
    layout, mlir_dtype = layout.to_mgpu(), utils.dtype_to_ir_type(jnp.dtype(dtype))
    kind = layout.registers_element_type(mlir_dtype)
    found = np.empty(layout.registers_shape(shape), object)
    for i, register in zip(range(found.size), registers, strict=True):
        found.flat[i] = register if register.type == kind else utils.bitcast(register, kind)
    is_signed = True if jnp.dtype(dtype) == jnp.int32 else None
    return FragmentedArray(_registers=found, _layout=layout, _is_signed=is_signed)


def ldmatrix(address: Any, kind: str) -> list[Any]:
    found: Any = llvm.inline_asm(
        llvm.StructType.get_literal([word_type()] * 4),
        [address],
        f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        has_side_effects=True,
    )
    return [llvm.extractvalue(word_type(), found, [i]) for i in range(4)]


def copy_async(target: Any, source: Any, count: int) -> None:
    how = "cg" if count == 16 else "ca"
    code = f"cp.async.{how}.shared.global [$0], [$1], {count};"
    _ = llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [target, source], code, "r,l,~{memory}", has_side_effects=True
    )


def mma(
    dtype: DTypeLike, sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]
) -> list[Any]:
    """Adds the product of [16, 16] and [16, 8] of a dtype of 16 bits, in words, to float32 sums."""
    number, name = ir.F32Type.get(), {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]
    found: Any = llvm.inline_asm(
        llvm.StructType.get_literal([number] * 4),
        [*left, *right, *sums],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
    )
    return [llvm.extractvalue(number, found, [i]) for i in range(4)]


def run_asm(code: str) -> None:
    @plgpu.inline_mgpu()
    def run(_: Any) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], code, "~{memory}", has_side_effects=True)

    run()
