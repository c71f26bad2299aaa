"""A function of the user's as a program to compile: "my_file:step" with the arguments that `example` returns.

The user's file has a function example(devices), or example(), next to `step`. It returns the tuple of step's arguments:
arrays, jax.ShapeDtypeStruct, or trees of them. Only their shapes, dtypes and shardings are used.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.config import by_name, errors
from experiments.dry_run import topology as topologies

FORM = "a function {0}(devices), or {0}(), which returns the tuple of arguments of {1}: arrays or jax.ShapeDtypeStruct"


def load(name: str, devices: Sequence[Any], example: str = "example") -> topologies.Request:
    """Return the request to compile the user's function `name`, "my_file:step".

    example: name of the user's function that makes its arguments, from `devices` if it has a parameter. Raises
    UserError if a function is missing or fails, also in tracing, or if the arguments are not a tuple with an array.
    """
    module_name, _, attribute = name.partition(":")
    form = f'"{name}" must have the form my_file:step. Call the command in the folder of my_file.py'
    errors.refuse((not by_name.CODE.fullmatch(name), form))
    module = by_name.import_user_module("function", name, module_name.removesuffix(".py"), attribute)
    function, make, file = getattr(module, attribute), getattr(module, example, None), module.__file__
    rule = f"{file} needs {FORM.format(example, attribute)}"
    no_function = f"{file}: {attribute} must be a function, not {function!r:.60}"
    errors.refuse((not callable(function), no_function), (not callable(make), rule))
    with by_name.user_errors(file):
        arguments = make(devices) if inspect.signature(make).parameters else make()
    if type(arguments) is not tuple or not any(map(is_array, jax.tree.leaves(arguments))):
        raise errors.UserError(f"{rule}. It returned {arguments!r:.60}")
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    request = topologies.Request(name, jitted, make_abstract(arguments, devices, f"{file}: {example}"))

    def explain(error: BaseException) -> str:
        code = getattr(inspect.unwrap(function), "__code__", None)  # an object that can be called has none
        place = "" if by_name.find_user_line(error) else f"{attribute}, line {code.co_firstlineno if code else 1}: "
        return f"{place}{by_name.describe_error(error)}"

    with by_name.user_errors(file, explain=explain):
        jitted.lower(*request.arguments)  # JAX keeps the result, which the compilation uses
    return request


def make_abstract(arguments: tuple, devices: Sequence[Any], label: str) -> tuple:
    """Return the arguments with a jax.ShapeDtypeStruct in place of each array.

    The sharding is that of a jax.ShapeDtypeStruct which has one; every other array is replicated. Raises UserError,
    which begins with `label`, if a sharding has other devices than `devices`.
    """
    structs = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.ShapeDtypeStruct)]
    meshes = [struct.sharding.mesh for struct in structs if isinstance(struct.sharding, NamedSharding)]
    replicated = NamedSharding((meshes or [Mesh(np.array(devices), ("devices",))])[0], PartitionSpec())

    def convert(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
        if sharding and not sharding.device_set <= set(devices):
            raise errors.UserError(f"{label}: the sharding {sharding} must use only devices of the argument `devices`")
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)  # float64 -> float32
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding or replicated)

    return jax.tree.map(convert, arguments)


def is_array(leaf: Any) -> bool:
    """Return True for an array, concrete or abstract."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
