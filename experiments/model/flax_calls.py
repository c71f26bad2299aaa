"""Calls of a Flax module, nnx or linen, as functions of its arrays by path, and the checks of what a call does.

A collection is a collection of linen, or the type of an nnx variable: `params` stands for nnx.Param too, `batch_stats`
for nnx.BatchStat. Arrays of all other collections, such as constants, are fixed: drawn once, and never trained.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx, traverse_util
from flax.core import DenyList
from jax.sharding import PartitionSpec

from experiments.config import errors
from experiments.devices import mesh as meshes

# The flags of the training mode, in the call or the constructor of a module, with their values in training.
FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
PARAMS, STATISTICS = "params", "batch_stats"
SHOWN = (
    "intermediates",
    "Intermediate",
    "perturbations",
    "Perturbation",
    "attribute",
)  # collections that only show values
MOST = 2**24  # float32 represents all integers up to this one exactly
FORM = '(logits, {"loss_balance": (sum, count)})'


class Called(NamedTuple):
    """The result of a call: its outputs, {path: new value} of changed state, and {path: collection} of sown values."""

    outputs: Any
    changed: dict[str, Any]
    sown: dict[str, str]


class _Calls:
    """The base class of NNX and Linen: creates modules, and records their properties in `init` and in calls."""

    def __init__(self, cls: type, given: Mapping[str, Any], inputs: jax.ShapeDtypeStruct, options: dict):
        self._cls, self._given, self._inputs, self._options = cls, given, inputs, options
        self.collections: dict[str, str] = {}  # path of an array -> its collection
        self.dropouts: set[str] = set()  # paths of the modules with dropout
        self.norms: set[str] = set()  # paths of the batch norms

    def choose_flags(self, train: bool, method: str = "__call__") -> dict[str, bool]:
        """Return {argument: value} of the arguments of a method that set the training mode (FLAGS)."""
        parameters = inspect.signature(getattr(self._cls, method)).parameters
        return {name: value is train for name, value in FLAGS.items() if name in parameters}

    def find_unknown_flags(self) -> list[str]:
        """Return the names of arguments of `__call__` that have a bool as default, but are not in FLAGS."""
        parameters = inspect.signature(self._cls.__call__).parameters.values()
        return [p.name for p in parameters if isinstance(p.default, bool) and p.name not in FLAGS]

    def _make(self, train: bool, **arguments: Any) -> Any:
        """Return a new module. A flag of the training mode that its call takes is not passed to its constructor."""
        flags = self.choose_flags(train, "__init__").items() - self.choose_flags(train).items()
        return self._cls(**self._given, **dict(flags), **arguments)

    def _see(self, module: Any, path: str, axes: tuple) -> None:
        """Record the path of a dropout or batch norm, and let the norm average over these axes of the mesh."""
        if isinstance(module, linen.BatchNorm | nnx.BatchNorm):
            self.norms.add(path)
            if axes:  # object: a linen module is frozen
                object.__setattr__(module, "axis_name", axes)
        rate = module.rate if isinstance(module, linen.Dropout | nnx.Dropout) else getattr(module, "dropout_rate", 0)
        if isinstance(rate, int | float) and rate > 0:
            self.dropouts.add(path)


class NNX(_Calls):
    """A module of flax.nnx as functions: `init` returns its arrays {path: array}, and `call` calls it with these."""

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return path -> value of the module's variables, and of the JAX arrays that are its attributes.

        Raises UserError if a variable holds several arrays, or none.
        """
        found = self._find(self._make_module(False, key))
        self.collections = {path: collection for path, (collection, _) in found.items()}
        if wrong := [path for path, (_, leaves) in found.items() if len(leaves) != 1]:
            raise errors.UserError(f"the nnx variable `{wrong[0]}` must hold one array. Make a variable for each array")
        return {path: jnp.asarray(leaf) for path, (_, (leaf,)) in found.items()}

    def read_metadata(self) -> dict[str, PartitionSpec]:
        """Return {path: the axes that the variable's partitioning metadata names}, PartitionSpec() without metadata."""
        specs = dict.fromkeys(self.collections, PartitionSpec())

        def read(key: jax.Array) -> None:
            nodes = {_join(path): node for path, node in _list_nodes(self._make_module(False, key)).items()}
            variables = {path: nodes[path] for path in specs if isinstance(nodes[path], nnx.Variable)}
            found = jax.tree.leaves(nnx.get_partition_spec(variables), is_leaf=meshes.is_spec)
            specs.update(zip(sorted(variables), found, strict=True))

        jax.eval_shape(read, jax.random.key(0))
        return specs

    def call(self, leaves: dict, inputs: jax.Array, key: jax.Array, options: dict, train: bool, axes: tuple) -> Called:
        """Call the module with the leaves {path: array}. axes: the mesh axes over which batch norms average."""
        module = self._make_module(train, key)
        nodes = _list_nodes(module)
        frozen = [node for node in nodes.values() if train and getattr(node, "use_running_average", None) is True]
        (module.train if train else module.eval)()
        for node in frozen:  # `train` set it to False, but the author of the module has frozen its statistics
            node.use_running_average = True
        for path, node in nodes.items():
            if isinstance(node, nnx.Module):
                self._see(node, _join(path), axes)
            elif isinstance(node, nnx.Variable) and _join(path) in leaves:
                node[...] = leaves[_join(path)]
            elif _join(path) in leaves:
                _set(nodes[path[:-1]], path, leaves[_join(path)])
        old = self._find(module, numbers=True)
        outputs = module(inputs, **options, **self.choose_flags(train))
        new = self._find(module, numbers=True)
        changed = {path: x[-1] for path, (_, x) in new.items() if path in old and not _are_same(old[path][1], x)}
        nodes = {_join(path): node for path, node in _list_nodes(module).items()}
        shown = {path: type(node).__name__ for path, node in nodes.items() if isinstance(node, nnx.Intermediate)}
        return Called(outputs, changed, shown | {path: kind for path, (kind, _) in new.items() if path not in old})

    def _make_module(self, train: bool, key: jax.Array) -> nnx.Module:
        """Return a new module. Its metadata does not shard its arrays: shard_map does (flax 0.11 never shards here)."""
        eager = nnx.use_eager_sharding(False) if hasattr(nnx, "use_eager_sharding") else contextlib.nullcontext()
        with eager:
            return self._make(train, rngs=nnx.Rngs(key))

    def _find(self, module: nnx.Module, *, numbers: bool = False) -> dict[str, tuple[str, list]]:
        """Return {path: (collection, arrays)} of all state but random state. numbers: include Python and NumPy numbers.

        A variable that two places share has one path.
        """
        found = {}
        for path, node in _list_nodes(module).items():
            if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState | nnx.Intermediate):
                kind = PARAMS if isinstance(node, nnx.Param) else type(node).__name__
                kind = STATISTICS if isinstance(node, nnx.BatchStat) else kind
                found[_join(path)] = kind, jax.tree.leaves(node)
            elif isinstance(node, jax.Array) or (numbers and isinstance(node, int | float | np.ndarray)):
                found[_join(path)] = "attribute", [node]
        return found


class Linen(_Calls):
    """A module of flax.linen as functions: `init` returns its arrays {path: array}, and `call` calls it with these."""

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return {path: array} of all collections, except those that only show values (SHOWN)."""
        leaves = traverse_util.flatten_dict(dict(linen.unbox(self._init(key))), sep=".")
        leaves = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, tuple)}  # tuples are sown values
        self.collections = {path: path.partition(".")[0] for path in leaves}
        return {path: jnp.asarray(leaf) for path, leaf in leaves.items() if self.collections[path] not in SHOWN}

    def read_metadata(self) -> dict[str, PartitionSpec]:
        """Return {path: the axes that the variable's partitioning metadata names}, PartitionSpec() without metadata."""
        specs = linen.get_partition_spec(jax.eval_shape(self._init, jax.random.key(0)))
        return traverse_util.flatten_dict(dict(specs), sep=".")

    def call(self, leaves: dict, inputs: jax.Array, key: jax.Array, options: dict, train: bool, axes: tuple) -> Called:
        """Call the module with the leaves {path: array}. axes: the mesh axes over which batch norms average."""

        def intercept(method: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
            self._see(context.module, ".".join(context.module.path), axes)
            return method(*args, **kwargs)

        rngs = {"params": jax.random.fold_in(key, 1), "dropout": key}  # other streams draw from `params`
        kept = {PARAMS} if train else {*self.collections.values()}
        arguments = {"rngs": rngs, "mutable": DenyList([*kept]), **options, **self.choose_flags(train)}
        with linen.intercept_methods(intercept):
            outputs, new = self._make(train).apply(traverse_util.unflatten_dict(leaves, sep="."), inputs, **arguments)
        new = traverse_util.flatten_dict(dict(new), sep=".")
        changed = {path: x for path, x in new.items() if path in leaves and x is not leaves[path]}
        return Called(outputs, changed, {path: path.partition(".")[0] for path in new if path not in leaves})

    def _init(self, key: jax.Array) -> Mapping:
        inputs = jnp.zeros(self._inputs.shape, self._inputs.dtype)
        return self._make(False).init(key, inputs, **self.choose_flags(False), **self._options)


def choose(cls: type) -> type[_Calls]:
    """Return the class that calls modules of type `cls` as functions of arrays: NNX for nnx modules, else Linen."""
    return NNX if issubclass(cls, nnx.Module) else Linen


def stop_gradients(leaves: Mapping[str, jax.Array], collections: Mapping[str, str]) -> dict[str, jax.Array]:
    """Return the arrays, with stop_gradient applied to all but parameters. collections: path -> collection."""
    return {p: leaf if collections[p] == PARAMS else jax.lax.stop_gradient(leaf) for p, leaf in leaves.items()}


def _join(path: tuple) -> str:
    return ".".join(map(str, path))


def _list_nodes(module: nnx.Module) -> dict[tuple, Any]:
    """Return path -> node, with the attributes that nnx.iter_graph omits in tree mode: arrays and numbers."""
    nodes = dict(nnx.iter_graph(module))
    modules = [(path, node) for path, node in nodes.items() if isinstance(node, nnx.Module)]
    attributes = {(*path, name): x for path, node in modules for name, x in vars(node).items()}
    return {p: x for p, x in attributes.items() if isinstance(x, jax.Array | np.ndarray | int | float)} | nodes


def _are_same(old: list, new: list) -> bool:
    """Return whether a variable still holds the same values: the same JAX arrays, or equal numbers."""
    pairs = list(zip(old, new, strict=False))
    is_jax = [isinstance(x, jax.Array) or isinstance(y, jax.Array) for x, y in pairs]
    equal = [x is y if jax_array else np.array_equal(x, y) for jax_array, (x, y) in zip(is_jax, pairs, strict=True)]
    return len(old) == len(new) and all(equal)


def _set(parent: Any, path: tuple, leaf: jax.Array) -> None:
    """Set the array `path` of the whole module, an attribute of `parent`. Raises UserError if `parent` is no module."""
    if not isinstance(parent, nnx.Module):
        raise errors.UserError(f"the array `{_join(path)}` must be an attribute of a module, or in an nnx.Variable")
    setattr(parent, path[-1], leaf)


def check(
    label: str, calls: _Calls, shapes: dict[str, jax.ShapeDtypeStruct], inputs: Any, options: dict
) -> tuple[list[str], list[str], list[str]]:
    """Return the paths of fixed arrays, the paths of running statistics, and lines to print about the module.

    label: the module's name in messages. shapes: its arrays by path. options: further arguments of its call. Raises
    UserError if a call does what a run cannot repeat: it changes other state than batch statistics, it changes state in
    evaluation, its dropout or batch norm does not follow the training mode, or it sows a loss, which nothing reads.
    """
    arguments, called = (shapes, inputs, jax.eval_shape(jax.random.key, 0)), {}

    def call(train: bool, leaves: dict, inputs: jax.Array, key: jax.Array) -> Any:
        called[train] = calls.call(leaves, inputs, key, options, train, ())
        return called[train].outputs

    for train in (True, False):
        jax.eval_shape(functools.partial(call, train), *arguments)
    _check_changes(label, calls, called)
    draws = {train: bool(calls.dropouts) and _is_random(functools.partial(call, train), arguments) for train in called}
    flags = f"Take one of {', '.join(FLAGS)} as an argument of the call or the constructor, and pass it on"
    dropout, unknown = min(calls.dropouts, default=""), calls.find_unknown_flags()
    statistics = {path for path, collection in calls.collections.items() if collection == STATISTICS}
    frozen = sorted(statistics - called[True].changed.keys())
    errors.refuse(
        (dropout and not draws[True], f"{label}: the dropout of `{dropout}` does nothing in training. {flags}"),
        (draws[False], f"{label}: the dropout of `{dropout}` is on in evaluation. {flags}"),
        (
            frozen and unknown,
            f"{label}: the batch statistics `{''.join(frozen[:1])}` do not change in training, and the argument "
            f"`{''.join(unknown[:1])}` of the call is not a known flag. {flags}",
        ),
    )
    fixed = sorted(
        path for path, kind in calls.collections.items() if kind not in (PARAMS, STATISTICS) and path in shapes
    )
    lines = [f"fixed, never trained: {', '.join(fixed)}"] * bool(fixed)
    lines += [f"batch statistics that the module itself keeps as they are: {', '.join(frozen)}"] * bool(frozen)
    shown = sorted(called[True].sown)
    running = sorted(called[True].changed)
    return fixed + frozen, running, lines + [f"sown values without a use here: {', '.join(shown)}"] * bool(shown)


def check_dtypes(label: str, calls: _Calls, shapes: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raise UserError for an array that float32 cannot hold: random keys, or an integer above 2^24 in absolute value.

    label: the beginning of the message. shapes: the module's arrays by path. calls.init makes their initial values.
    """
    whole = [path for path, leaf in shapes.items() if not jnp.issubdtype(leaf.dtype, jnp.inexact)]
    for path in whole:
        if not (shapes[path].dtype == bool or jnp.issubdtype(shapes[path].dtype, jnp.integer)):
            raise errors.UserError(f"{label}: `{path}` must hold numbers, not {shapes[path].dtype}")
    find = jax.jit(lambda key: {path: x for path, x in calls.init(key).items() if path in whole})
    for path, x in find(jax.random.key(0)).items() if whole else ():
        if np.abs(np.asarray(x, np.float64)).max(initial=0) > MOST:
            raise errors.UserError(
                f"{label}: the integers of `{path}` must not exceed {MOST:,}, as they are saved as float32"
            )


def _check_changes(label: str, calls: _Calls, called: dict[bool, Called]) -> None:
    """Raise UserError for changed state that may not change, and for a sown loss. called: training mode -> result."""
    for train, place in ((True, "training"), (False, "evaluation")):
        for path in called[train].changed:
            kind = calls.collections.get(path, "attribute")
            if not train or kind != STATISTICS:
                raise errors.UserError(
                    f"{label} changes `{path}` of the collection {kind} in {place}. Only batch statistics are carried "
                    f"({STATISTICS}, nnx.BatchStat) from step to step, and only in training (flags: {', '.join(FLAGS)})"
                )
        for path, kind in called[train].sown.items():
            if kind not in SHOWN or "loss" in path.lower():
                raise errors.UserError(
                    f"{label} sows `{path}` in the collection {kind}, which nothing reads. Return a loss as {FORM}"
                )


def _is_random(call: Callable, arguments: tuple) -> bool:
    """Return whether the outputs of call(leaves, inputs, key) depend on the key."""
    keys = jax.eval_shape(lambda key: jax.random.split(key, 2), arguments[-1])
    try:
        jax.eval_shape(jax.vmap(call, in_axes=(None, None, 0), out_axes=None), *arguments[:-1], keys)
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        return True
    return False
