"""The user's Flax module, nnx or linen, as the model of an experiment (model.flax).

Its parameters become one dictionary. A name is the path in the module and a letter for each axis, one letter for each
size: `layers.0.linear.kernel_AB`. So weight decay acts on matrices, and everything that knows parameters by name works:
checkpoints, averages, frozen parameters, studies.
"""

import contextlib
import functools
import inspect
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx, traverse_util
from jax.sharding import Mesh, PartitionSpec

from experiments.engine import by_name, config as configs, errors, mesh as meshes, train_step
from tfm import layout as layouts

LETTERS = [letter for letter in string.ascii_uppercase if letter not in "BDGHMNX"]  # without those that have a meaning
VECTORS = ("bias", "scale", "mean", "var")  # names of parameters that are no matrices
SIZES = ("M", "D", "H", "K", "F", "dropout")  # settings of the section `model` that a module may take
VALID = "valid"  # argument of a module's call for the mask valid_BN: True for tokens, False for padding


class FlaxModel:
    """The functions of model/model.py's Model that an experiment calls, for a Flax module. Its outputs are logits."""

    attention = "in your Flax module"
    weights: Mapping[str, float] = {}

    def __init__(
        self,
        m: configs.Settings,
        layout: layouts.Layout,
        inputs: jax.ShapeDtypeStruct,
        outputs: tuple[int, ...],
        *,
        padded: bool = False,
        **sizes: int,
    ):
        """Make the module that m.flax names, for a batch like `inputs`.

        layout: the devices of the training. outputs: the shape of its logits. padded: whether batches have padding.
        sizes: arguments that it may take, such as W and N. Raises UserError if it fails, or returns another shape.
        """
        label = f"model.flax = {m.flax}"
        cls = by_name.choose("Flax module", m.flax, {"": nnx.Linear})
        if not isinstance(cls, type) or not issubclass(cls, nnx.Module | linen.Module):
            raise errors.UserError(f"{label} must be a class of flax.nnx.Module or flax.linen.Module")
        allowed = inspect.signature(cls.__init__).parameters
        given = {name: size for name, size in sizes.items() if name in allowed}
        given |= {name: getattr(m, name) for name in SIZES if name in allowed}
        has_tokens = jnp.issubdtype(inputs.dtype, jnp.integer)
        self._takes_valid = has_tokens and VALID in inspect.signature(cls.__call__).parameters
        make, adapter = functools.partial(cls, **given), _NNX if issubclass(cls, nnx.Module) else _Linen
        with by_name.user_errors(label):
            self._adapter = adapter(make, inputs, self._choose_options(inputs, None))
            shapes, specs = jax.eval_shape(self._adapter.init, jax.random.key(0)), self._adapter.read_metadata()
            self._names, letters = _name_axes(shapes, specs)
            self.layout = layout._replace(letters=letters)
            self.lines = describe(shapes, specs, blind=padded and not self._takes_valid)
            result, _ = jax.eval_shape(self.hidden, jax.eval_shape(self.init, jax.random.key(0)), inputs)
        if result.shape != outputs:
            raise errors.UserError(f"{label} must return logits of shape {outputs}, not {result.shape}")

    def init(self, key: jax.Array, **block_settings: Any) -> dict[str, jax.Array]:
        """Return the initial parameters and batch statistics. Raises UserError for settings of our blocks."""
        if block_settings:
            raise errors.UserError(f"model.{min(block_settings)} is not a setting of a Flax module of yours")
        return {self._names[path]: leaf for path, leaf in self._adapter.init(key).items()}

    def hidden(
        self,
        params: dict,
        inputs: jax.Array,
        *,
        valid: jax.Array | None = None,
        key_B: jax.Array | None = None,
        layout: layouts.Layout = layouts.ONE,
    ) -> tuple[jax.Array, dict]:
        """Return the logits in float32 and, in training, aux with the batch statistics.

        valid: the mask valid_BN, for a module that takes it; None: no padding. key_B: a random key for each sequence;
        the module's dropout uses the first, with other zeros in each sequence.
        """
        params = layouts.gather_features(params, layout)
        leaves = {path: params[name] for path, name in self._names.items()}
        key, options = None if key_B is None else key_B[0], self._choose_options(inputs, valid)
        logits, new = self._adapter.call(leaves, inputs, key, options)
        aux = {}
        if key_B is not None and new:  # train_step moves the parameter by 1 - MOMENTUM towards these: to Flax's average
            momentum = train_step.MOMENTUM
            running = {self._names[path]: (x - momentum * leaves[path]) / (1 - momentum) for path, x in new.items()}
            aux = {train_step.RUNNING: running}
        return logits.astype(jnp.float32), aux

    def logits(self, params: dict, outputs: jax.Array, *, layout: layouts.Layout = layouts.ONE) -> jax.Array:
        """Return the outputs of `hidden`, which are the logits."""
        return outputs

    def apply(self, params: dict, inputs: jax.Array, **options: Any) -> tuple[jax.Array, dict]:
        """Return the logits and aux. options: arguments of `hidden`."""
        return self.hidden(params, inputs, **options)

    def by_layer(self, params: dict) -> dict:
        """Return the parameters for `step`."""
        return params

    def start(
        self, params: dict, prompt_BN: jax.Array, length_B: jax.Array, *, capacity: int, mask: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the logits_BW after each prompt, and the tokens so far as the cache: no keys and values are kept."""
        w_BN = jnp.pad(prompt_BN, ((0, 0), (0, capacity - prompt_BN.shape[1])))
        return self._predict(params, w_BN, length_B - 1), w_BN

    def step(
        self, params: dict, w_BN: jax.Array, w_B: jax.Array, n_B: jax.Array, *, mask: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the logits_BW after token w_B at position n_B, by computing all tokens again, and the tokens."""
        w_BN = w_BN.at[jnp.arange(len(w_BN)), n_B].set(w_B)
        return self._predict(params, w_BN, n_B), w_BN

    def _choose_options(self, inputs: Any, valid: jax.Array | None) -> dict[str, jax.Array]:
        """Return the further arguments of the module's call: `valid` if it takes this argument."""
        valid = jnp.ones(inputs.shape, bool) if valid is None else valid
        return {VALID: valid} if self._takes_valid else {}

    def _predict(self, params: dict, w_BN: jax.Array, n_B: jax.Array) -> jax.Array:
        return self.hidden(params, w_BN)[0][jnp.arange(len(w_BN)), n_B]


class _NNX:
    """An nnx module as functions of its parameters and batch statistics by path."""

    def __init__(self, make: Callable, inputs: jax.ShapeDtypeStruct, options: dict):
        self._cls = make

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return the values of the module's variables of these two types."""
        return {path: variable[...] for path, variable in self._find(self._make(key)).items()}

    def read_metadata(self) -> dict[str, PartitionSpec]:
        """Return the axes that the partitioning metadata of each variable names."""
        variables = self._find(nnx.eval_shape(lambda: self._make(jax.random.key(0))))
        specs = jax.tree.leaves(nnx.get_partition_spec(variables), is_leaf=meshes.is_spec)
        return dict(zip(sorted(variables), specs, strict=True))

    def call(self, leaves: dict, inputs: jax.Array, key: jax.Array | None, options: dict) -> tuple[jax.Array, dict]:
        """Return the outputs, and the batch statistics after the call. key: of dropout; None: evaluation."""
        module = self._make(jax.random.key(0) if key is None else key)
        variables = self._find(module)
        for path, variable in variables.items():
            variable[...] = leaves[path]
        module.eval() if key is None else module.train()
        outputs = module(inputs, **options)
        return outputs, {path: x[...] for path, x in variables.items() if isinstance(x, nnx.BatchStat)}

    def _make(self, key: jax.Array) -> nnx.Module:
        """Return the module. Its metadata must not place its arrays: shard_map does (flax 0.11 never places them)."""
        eager = nnx.use_eager_sharding(False) if hasattr(nnx, "use_eager_sharding") else contextlib.nullcontext()
        with eager:
            return self._cls(rngs=nnx.Rngs(key))

    def _find(self, module: nnx.Module) -> dict[str, Any]:
        """Return the variables of a module by their paths. A variable that two places share has one path."""
        nodes = nnx.iter_graph(module)
        kinds = nnx.Param | nnx.BatchStat
        return {".".join(map(str, path)): node for path, node in nodes if isinstance(node, kinds)}


class _Linen:
    """A linen module as functions of its parameters and batch statistics by path."""

    def __init__(self, make: Callable, inputs: jax.ShapeDtypeStruct, options: dict):
        self._module, self._inputs, self._options = make(), inputs, options
        parameters = inspect.signature(self._module.__call__).parameters
        self._flags = [name for name in ("train", "deterministic") if name in parameters]

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return the values of the collections `params` and `batch_stats`."""
        return traverse_util.flatten_dict(dict(linen.unbox(self._init(key))), sep=".")

    def read_metadata(self) -> dict[str, PartitionSpec]:
        """Return the axes that the partitioning metadata of each variable names."""
        specs = linen.get_partition_spec(jax.eval_shape(self._init, jax.random.key(0)))
        return traverse_util.flatten_dict(dict(specs), sep=".")

    def call(self, leaves: dict, inputs: jax.Array, key: jax.Array | None, options: dict) -> tuple[jax.Array, dict]:
        """Return the outputs, and the batch statistics after the call. key: of dropout; None: evaluation."""
        variables, flags = traverse_util.unflatten_dict(leaves, sep="."), self._choose_flags(key is not None) | options
        if key is None:
            return self._module.apply(variables, inputs, **flags), {}
        changed = ["batch_stats"] if "batch_stats" in variables else []
        outputs, new = self._module.apply(variables, inputs, rngs={"dropout": key}, mutable=changed, **flags)
        return outputs, traverse_util.flatten_dict(dict(new), sep=".")

    def _init(self, key: jax.Array) -> Mapping:
        inputs = jnp.zeros(self._inputs.shape, self._inputs.dtype)
        return self._module.init(key, inputs, **self._choose_flags(False), **self._options)

    def _choose_flags(self, train: bool) -> dict[str, bool]:
        return {name: train if name == "train" else not train for name in self._flags}


def _name_axes(
    leaves: Mapping[str, jax.ShapeDtypeStruct], specs: Mapping[str, PartitionSpec]
) -> tuple[dict[str, str], str]:
    """Return path -> name with a letter for each axis, and the letters of the axes whose metadata names `fsdp`.

    A letter means one size. The leading axes of a bias, such as heads, get letters of shapes.COPIES: weight decay must
    not take it for a matrix. Raises UserError without letters left.
    """
    free, copies, letters = iter(LETTERS), iter("HGX"), {}
    names = {}
    for path, leaf in leaves.items():
        is_vector, suffix = path.endswith(VECTORS), ""
        for i, size in enumerate(leaf.shape):
            kind = copies if is_vector and i < leaf.ndim - 1 else free
            key = kind is copies, meshes.FSDP in _list_names(tuple(specs[path])[i : i + 1]), size
            if key not in letters and (letter := next(kind, "")):
                letters[key] = letter
            if key not in letters:
                raise errors.UserError("model.flax: the parameters of the module have too many different sizes")
            suffix += letters[key]
        names[path] = f"{path}_{suffix}".rstrip("_")
    return names, "".join(letter for (_, is_sharded, _), letter in letters.items() if is_sharded)


def _list_names(axes: Iterable) -> list[str]:
    """Return the names in a PartitionSpec, whose entries are None, a name, or a tuple of names."""
    return [name for axis in axes for name in (axis if isinstance(axis, tuple) else (axis,)) if name]


def describe(
    leaves: Mapping[str, jax.ShapeDtypeStruct], specs: Mapping[str, PartitionSpec], *, blind: bool
) -> list[str]:
    """Return the lines of a run: about the partitioning metadata, and about padding if the module is blind to it."""
    lines = [f"padding: your Flax module does not see it, because its call has no argument `{VALID}`"] if blind else []
    names = {path: _list_names(spec) for path, spec in specs.items()}
    if any(names.values()):
        sharded = [leaves[path].size for path in leaves if meshes.FSDP in names[path]]
        share = sum(sharded) / sum(leaf.size for leaf in leaves.values())
        line = f"metadata: mesh.fsdp shards {len(sharded)} of {len(leaves)} parameters ({share:.0%} of their numbers)"
        ignored = sorted({name for axes in names.values() for name in axes} - {meshes.FSDP})
        lines.append(f"{line}; axis names without effect: {', '.join(ignored)}" if ignored else line)
    return lines


def build(
    m: configs.Settings, mesh: Mesh, inputs: jax.ShapeDtypeStruct, outputs: tuple[int, ...], **options: Any
) -> FlaxModel:
    """Return the model that m.flax names; mesh.fsdp shards the parameters whose metadata says so.

    The arguments are those of `FlaxModel`. Raises UserError for devices that share the module in another way.
    """
    errors.refuse(
        (m.mup, f"model.mup = {m.mup} must be 0 with model.flax: it needs names that state the shapes"),
        (m.window, f"model.window = {m.window} must be 0 with model.flax: your module chooses its mask"),
    )
    for axis, size in mesh.shape.items():
        if axis in (meshes.TENSOR, meshes.SEQUENCE) and size > 1:
            raise errors.UserError(f"mesh.{axis} = {size} must be 1 with model.flax. Choose mesh.data or mesh.fsdp")
    model = FlaxModel(m, meshes.layout(mesh), inputs, outputs, **options)
    if model.layout.fsdp and not model.layout.letters:
        raise errors.UserError(
            f"mesh.fsdp = {mesh.shape[meshes.FSDP]} must be 1: no parameter of model.flax = {m.flax} has the axis name "
            f'"{meshes.FSDP}" in its metadata. Name it with nnx.with_partitioning or nn.with_partitioning'
        )
    return model
