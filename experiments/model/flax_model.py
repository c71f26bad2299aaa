"""The user's Flax module, nnx or linen, as the model of an experiment (model.flax).

Its parameters become one dictionary. A name is the path in the module and a letter for each axis, one letter for each
size: `layers.0.linear.kernel_AB`. So weight decay acts on matrices, and everything that knows parameters by name works:
checkpoints, averages, frozen parameters, studies.
"""

import functools
import glob
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.sharding import Mesh, PartitionSpec

from experiments.config import by_name, errors, settings as configs
from experiments.devices import mesh as meshes
from experiments.engine import train_step
from experiments.model import flax_calls
from tfm import layout as layouts, loss, models, variant

LETTERS = "AEUΓΔΘΛΞΠΣБДЖИЛЦЧШЩЭЮЯ"  # of axes: those without a meaning in tfm/__init__.py
COPIES = "ΦΨΩ"  # of the leading axes of a parameter that is no matrix (shapes.COPIES)
IN_MODULE = "attention: in your Flax module; its parameters end in a letter for each axis, one letter for each size"
VECTORS = ("bias", "scale", "mean", "var")  # names of parameters that are no matrices
SIZES = ("M", "D", "H", "K", "F", "dropout")  # settings of the section `model` that a module may take
VALID = "valid"  # argument of a module's call for the mask valid_BN: True for tokens, False for padding


class Module(NamedTuple):
    """The user's module: how it is called, its arrays by path, and their names in our dictionary of parameters.

    names: {path: name}. takes_valid: whether its call has the argument `valid`, True for tokens that are not padding.
    """

    label: str  # for messages
    calls: Any  # an object of the class that flax_calls.choose returns
    shapes: dict[str, jax.ShapeDtypeStruct]
    names: dict[str, str]
    takes_valid: bool


def make(
    m: configs.Settings,
    layout: layouts.Layout,
    inputs: jax.ShapeDtypeStruct,
    outputs: tuple[int, ...],
    *,
    padded: bool = False,
    **sizes: int,
) -> tuple[models.Model, list[str]]:
    """Return the model of the module m.flax, and the paths of batch statistics that would differ between devices.

    layout: the devices of the training. inputs, outputs: the shapes of a batch and of its logits. padded: whether
    batches have padding. sizes: arguments that the module may take, such as W and N. Raises UserError if the module
    is no Flax module, fails, returns another shape, or does what a run cannot repeat (flax_calls.check).
    """
    label = f"model.flax = {m.flax}"
    cls = by_name.choose("Flax module", m.flax, {"": nnx.Linear})
    if not isinstance(cls, type) or not issubclass(cls, nnx.Module | linen.Module):
        raise errors.UserError(f"{label} must be a class of flax.nnx.Module or flax.linen.Module")
    allowed = inspect.signature(cls.__init__).parameters
    given = {name: size for name, size in sizes.items() if name in allowed}
    given |= {name: getattr(m, name) for name in SIZES if name in allowed}
    has_tokens = jnp.issubdtype(inputs.dtype, jnp.integer)
    takes_valid = has_tokens and VALID in inspect.signature(cls.__call__).parameters
    with by_name.user_errors(label):
        options = choose_options(takes_valid, inputs, None)
        calls = flax_calls.choose(cls)(cls, given, inputs, options)
        shapes, specs = jax.eval_shape(calls.init, jax.random.key(0)), calls.read_metadata()
        flax_calls.check_dtypes(label, calls, shapes)
        fixed, running, lines = flax_calls.check(label, calls, shapes, inputs, options)
        names, letters = _name_axes(shapes, specs, vectors=running)
        module = Module(label, calls, shapes, names, takes_valid)
        params = jax.eval_shape(functools.partial(init, module), jax.random.key(0))
        result, aux = jax.eval_shape(functools.partial(hidden, module), params, inputs)
    if result.shape != outputs:
        raise errors.UserError(f"{label} must return logits of shape {outputs}, not {result.shape}")
    weights = choose_weights(cls, aux.get(train_step.MEASURES, {}))
    lines += [f"added to the loss: {weight:g} {name}" for name, weight in weights.items()]
    return bind(module)._replace(
        layout=layout._replace(letters=letters),
        weights=weights,
        lines=(IN_MODULE, *describe(shapes, specs, blind=padded and not takes_valid), *lines),
        fixed=tuple(glob.escape(names[path]) for path in fixed),
    ), [path for path in running if _find_norm(path) not in calls.norms]


def bind(module: Module) -> models.Model:
    """Return the functions of the module. Its outputs are the logits, so there is no head."""
    of_module = {"init": init, "hidden": hidden, "start": start, "step": step}
    return models.Model(
        **{name: functools.partial(function, module) for name, function in of_module.items()},
        output=lambda params, outputs, layout=layouts.ONE: (outputs, {}),
        logits=lambda params, outputs, layout=layouts.ONE: outputs,
        loss=lambda params, outputs, target, weight, **options: loss.measure(outputs, target, weight),
        by_layer=models.unchanged,
    )


def _find_norm(path: str) -> str:
    """Return the path of the norm that has these running statistics."""
    return path.removeprefix(f"{flax_calls.STATISTICS}.").rpartition(".")[0]


def init(module: Module, key: jax.Array, **block_settings: Any) -> dict[str, jax.Array]:
    """Return the initial parameters and other arrays by name. Raises UserError if there are block_settings.

    An array of integers or bools is float32 here, because the training step differentiates with respect to all.
    """
    if block_settings:
        setting = f"model.{min(block_settings)}"
        raise errors.UserError(f"{setting} does not apply to the module of model.flax. Leave it out of the study")
    leaves = module.calls.init(key)
    to_float = {path: not jnp.issubdtype(leaf.dtype, jnp.inexact) for path, leaf in leaves.items()}
    return {module.names[p]: x.astype(jnp.float32) if to_float[p] else x for p, x in leaves.items()}


def hidden(
    module: Module,
    params: dict,
    inputs: jax.Array,
    *,
    valid: jax.Array | None = None,
    key_B: jax.Array | None = None,
    layout: layouts.Layout = layouts.ONE,
) -> tuple[jax.Array, dict]:
    """Return the logits in float32, and aux: "measures" of the module and, in training, "running" batch statistics.

    valid: the mask valid_BN, for a module that takes it; None: no padding. key_B: a random key for each sequence, in
    training. The module's dropout uses only the first key, and sets different elements to 0 in each sequence. None:
    evaluation, where the key is the same for all batches.
    """
    params, train = layouts.gather_features(params, layout), key_B is not None
    leaves = {path: params[name].astype(module.shapes[path].dtype) for path, name in module.names.items()}
    leaves = flax_calls.stop_gradients(leaves, module.calls.collections)
    key, options = key_B[0] if train else jax.random.key(0), choose_options(module.takes_valid, inputs, valid)
    called = module.calls.call(leaves, inputs, key, options, train, layout.batch)
    logits, measures = split_measures(module.label, called.outputs)
    aux = {train_step.MEASURES: measures} if measures else {}
    if train and called.changed:  # train_step moves the parameter by 1 - MOMENTUM towards these: to Flax's average
        momentum, new = train_step.MOMENTUM, called.changed.items()
        aux[train_step.RUNNING] = {module.names[p]: (x - momentum * leaves[p]) / (1 - momentum) for p, x in new}
    return logits.astype(jnp.float32), aux


def start(
    module: Module, params: dict, prompt_BN: jax.Array, length_B: jax.Array, *, capacity: int, mask: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return the logits_BW after each prompt, and as the cache the prompts, padded with 0 to `capacity` tokens."""
    w_BN = jnp.pad(prompt_BN, ((0, 0), (0, capacity - prompt_BN.shape[1])))
    return _predict(module, params, w_BN, length_B - 1), w_BN


def step(
    module: Module, params: dict, w_BN: jax.Array, w_B: jax.Array, n_B: jax.Array, *, mask: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Write w_B into w_BN at the positions n_B. Return the logits_BW after these tokens, and the new w_BN.

    All tokens are computed again, because a module has no cache. mask: not used.
    """
    w_BN = w_BN.at[jnp.arange(len(w_BN)), n_B].set(w_B)
    return _predict(module, params, w_BN, n_B), w_BN


def _predict(module: Module, params: dict, w_BN: jax.Array, n_B: jax.Array) -> jax.Array:
    return hidden(module, params, w_BN)[0][jnp.arange(len(w_BN)), n_B]


def choose_options(takes_valid: bool, inputs: Any, valid: jax.Array | None) -> dict[str, jax.Array]:
    """Return {"valid": valid} if the module takes this argument, otherwise {}. valid = None: all `inputs` are valid."""
    valid = jnp.ones(inputs.shape, bool) if valid is None else valid
    return {VALID: valid} if takes_valid else {}


def _name_axes(
    leaves: Mapping[str, jax.ShapeDtypeStruct], specs: Mapping[str, PartitionSpec], *, vectors: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Return {path: name with a letter for each axis}, and the letters of the axes whose metadata names `fsdp`.

    A letter means one size. The leading axes of a bias, such as heads, get letters of COPIES, so that weight decay does
    not act on it as on a matrix. vectors: paths of other parameters that are not matrices. Raises UserError if the
    parameters have more sizes than there are letters.
    """
    free, copies, letters = iter(LETTERS), iter(COPIES), {}
    names = {}
    for path, leaf in leaves.items():
        is_vector, suffix = path.endswith(VECTORS) or path in vectors, ""
        for i, size in enumerate(leaf.shape):
            kind = copies if is_vector and i < leaf.ndim - 1 else free
            key = kind is copies, meshes.FSDP in _list_names(tuple(specs[path])[i : i + 1]), size
            if key not in letters and (letter := next(kind, "")):
                letters[key] = letter
            if key not in letters:
                raise errors.UserError(
                    "model.flax: the parameters of the module have too many different sizes. Use fewer different widths"
                )
            suffix += letters[key]
        names[path] = f"{path}_{suffix}".rstrip("_")
    return names, "".join(letter for (_, is_sharded, _), letter in letters.items() if is_sharded)


def _list_names(axes: Iterable) -> list[str]:
    """Return the names in a PartitionSpec, whose entries are None, a name, or a tuple of names."""
    return [name for axis in axes for name in (axis if isinstance(axis, tuple) else (axis,)) if name]


def describe(
    leaves: Mapping[str, jax.ShapeDtypeStruct], specs: Mapping[str, PartitionSpec], *, blind: bool
) -> list[str]:
    """Return the lines that a run prints about partitioning metadata, and about padding that the module cannot see.

    leaves: shapes by path. blind: whether batches have padding, but the module takes no argument `valid`.
    """
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
) -> models.Model:
    """Return the model of the module m.flax; mesh.fsdp shards the parameters whose metadata names this axis.

    inputs, outputs, options: arguments of `make`. Raises UserError if mesh.tensor or mesh.sequence exceeds 1, if
    mesh.fsdp shards no parameter, if devices would have different batch statistics, or if model.mup or model.window
    is set.
    """
    errors.refuse(
        (m.mup, f"model.mup = {m.mup} must be 0 with model.flax: mup needs parameter names that state shapes"),
        (m.window, f"model.window = {m.window} must be 0 with model.flax: your module chooses its mask"),
    )
    for axis, size in mesh.shape.items():
        if axis in (meshes.TENSOR, meshes.SEQUENCE) and size > 1:
            raise errors.UserError(f"mesh.{axis} = {size} must be 1 with model.flax. Choose mesh.data or mesh.fsdp")
    model, local = make(m, meshes.layout(mesh), inputs, outputs, **options)
    for axis in (axis for axis in meshes.BATCH if local and mesh.shape[axis] > 1):
        raise errors.UserError(
            f"mesh.{axis} = {mesh.shape[axis]} must be 1: the statistic `{local[0]}` of model.flax = {m.flax} is not "
            "of Flax's BatchNorm, so each device would have its own statistics"
        )
    if model.layout.fsdp and not model.layout.letters:
        raise errors.UserError(
            f"mesh.fsdp = {mesh.shape[meshes.FSDP]} must be 1: no parameter of model.flax = {m.flax} has the axis name "
            f'"{meshes.FSDP}" in its metadata. Name it with nnx.with_partitioning or nn.with_partitioning'
        )
    return model


def choose_weights(cls: type, measures: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the weights of a module's measures in the loss: its attribute `measures`, else 1 for each name "loss...".

    Raises UserError for the weight of a measure that the module does not return.
    """
    weights = getattr(cls, "measures", {name: 1.0 for name in measures if name.startswith(train_step.LOSS)})
    for name in weights:
        by_name.choose("measure of model.flax", name, dict.fromkeys(measures or [""]))
    return weights


def split_measures(label: str, outputs: Any) -> tuple[jax.Array, variant.Measures]:
    """Return (logits, measures) from a module's outputs, which are this pair or only logits (then measures = {}).

    measures: {name: (sum, count)}. Raises UserError, which begins with `label`, for outputs of another form.
    """
    logits, measures = outputs if isinstance(outputs, tuple) and len(outputs) == 2 else (outputs, {})
    pairs = [*measures.values()] if isinstance(measures, dict) else [None]
    are_pairs = [isinstance(pair, tuple) and [*map(jnp.shape, pair)] == [(), ()] for pair in pairs]
    if not isinstance(logits, jax.Array) or not all(are_pairs):
        form = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", outputs)
        raise errors.UserError(f"{label} must return logits or {flax_calls.FORM}, where both are scalars, not {form}")
    return logits, measures
