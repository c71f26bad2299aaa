"""Collectives in the text of a compiled program, and the bytes of their results."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments.devices import mesh as meshes
from experiments.dry_run import dry_run as dry_runs
from experiments.engine import train_step


def test_collectives_of_a_program_are_counted_with_their_bytes():
    mesh = meshes.make(data=8)

    def local(x_BD):
        gathered_BD = jax.lax.all_gather(x_BD, "data", axis=0, tiled=True)
        return jax.lax.psum(gathered_BD[:1] * 2, "data")

    program = jax.jit(meshes.sharded(local, mesh, in_specs=P("data"))).lower(np.ones((8, 5), np.float32))
    gather, reduce = {"times": 1, "bytes": 8 * 5 * 4}, {"times": 1, "bytes": 5 * 4}
    counts = dry_runs.count_collectives(program.compile().as_text())
    assert counts == {"all-gather": gather, "all-reduce": reduce}


@pytest.mark.parametrize(
    ("shape", "opcode", "size"),
    [
        ("(f32[3,5]{1,0}, bf16[7], pred[], s8[2])", "all-reduce", 60 + 14 + 1 + 2),
        ("(f32[3,5], f32[6,5])", "all-gather-start", 120),  # the second shape is the output
        ("(f32[3,5], f32[3,5], u32[], u32[])", "collective-permute-start", 60),
    ],
)
def test_the_result_of_a_collective_has_these_bytes(shape, opcode, size):
    assert dry_runs.result_bytes(shape, opcode) == size


def test_parts_of_one_collective_count_once():
    part = '  %g.N = bf16[8,5]{1,0} all-gather(%p.N), channel_id=9, frontend_attributes={chain_id="3"}\n'
    text = part.replace("N", "1") + part.replace("N", "2") + "  %r = f32[5] all-reduce(%x), channel_id=9\n" * 2
    expected = {"all-gather": {"times": 1, "bytes": 80}, "all-reduce": {"times": 2, "bytes": 40}}
    assert dry_runs.count_collectives(text) == expected


def test_abstract_batches_have_the_shapes_dtypes_and_shardings_of_real_ones():
    mesh = meshes.make(data=2, sequence=2)
    batch = {"example_B": np.arange(6), "word_BN": np.ones((6, 4), np.float64), "weight_B": np.ones(6, np.float32)}

    def describe_leaves(tree):
        return {name: (x.shape, x.dtype, x.sharding) for name, x in tree.items()}

    assert describe_leaves(meshes.abstract_batch(mesh, batch)) == describe_leaves(meshes.place_batch(mesh, batch))
    rows = meshes.place_rows(mesh, [batch] * 3)
    assert describe_leaves(meshes.abstract_batch(mesh, batch, rows=3)) == describe_leaves(rows)
    alive = train_step.abstract_alive(mesh, 3)
    assert (alive.shape, alive.dtype, alive.sharding) == ((3,), np.bool_, meshes.replicated(mesh))
