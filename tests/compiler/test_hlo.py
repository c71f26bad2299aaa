"""What is read off a compiled TPU program: cycles by scope, turns of loops, kernels, and collectives beside work.

The texts are cut from what libtpu 0.0.23 and 0.0.50 wrote; a last test, which takes seconds, asks libtpu itself.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from experiments.compiler import hlo
from experiments.engine import compilation


def estimate(entry: str, *computations: str, clock: float = 1.0, ring: float = math.inf) -> hlo.Estimate:
    """Of a program with these computations. 'N cycles' stands for how libtpu writes it."""
    head = "HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[3,5]{1,0})->f32[3,5]{1,0}}"
    text = "\n\n".join([head, *computations, f"ENTRY %main.1 (x.1: f32[3,5]) -> f32[3,5] {{\n{entry.strip()}\n}}"])
    config = r'backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"\1","is_mask":false}}'
    return hlo.estimate(re.sub(r"(\d+) cycles", config, text + "\n"), clock=clock, ring=ring)


BODY = """
%body.1 (given.1: (s32[], f32[3,5], s32[])) -> (s32[], f32[3,5], s32[]) {
  %step.1 = s32[]{:T(128)} constant(STEP)
  %given.1 = (s32[]{:T(128)}, f32[3,5]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%given.1), index=0
  %copy.2 = s32[]{:T(128)} copy(%i.1), backend_config={"aliasing_operands":{"lists":[]}}
  %add.1 = s32[]{:T(128)} add(%copy.2, %step.1), metadata={op_name="jit(step)/while/body/add"}
  %x.2 = f32[3,5]{1,0:T(8,128)S(1)} get-tuple-element(%given.1), index=1
  %n.2 = s32[]{:T(128)} get-tuple-element(%given.1), index=2
  %tanh.1 = f32[3,5]{1,0:T(8,128)S(1)} tanh(%x.2), metadata={op_name="jit(step)/blocks/while/body/mlp/tanh"}, 7 cycles
  ROOT %tuple.2 = (s32[]{:T(128)}, f32[3,5]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%add.1, %tanh.1, %n.2)
}

%condition.1 (given.2: (s32[], f32[3,5], s32[])) -> pred[] {
  %end.1 = s32[]{:T(128)} constant(END)
  %given.2 = (s32[]{:T(128)}, f32[3,5]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%given.2), index=0
  %n.1 = s32[]{:T(128)} get-tuple-element(%given.2), index=2
  ROOT %test.1 = pred[]{:T(512)} compare(%i.2, %TO.1), direction=DIRECTION
}
""".strip()

LOOP = """
  %first.1 = s32[]{:T(128)} constant(FIRST)
  %last.1 = s32[]{:T(128)} constant(29)
  %x.1 = f32[3,5]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %copy.1 = s32[]{:T(128)} copy(%first.1)
  %tuple.1 = (s32[]{:T(128)}, f32[3,5]{1,0:T(8,128)S(1)}, s32[]{:T(128)}) tuple(%copy.1, %x.1, %last.1)
  %while.1 = (s32[]{:T(128)}, f32[3,5]{1,0}, s32[]) while(%tuple.1), condition=%condition.1, body=%body.1
  %gather.1 = f32[3,5]{1,0:T(8,128)} fusion(%x.1), kind=kCustom, calls=%sparse_core.1, 9223372036854775807 cycles
  ROOT %sin.1 = f32[3,5]{1,0:T(8,128)} sine(%x.1), metadata={op_name="jit(step)/sin"}, 11 cycles
"""


def replaced(text: str, **values: object) -> str:
    return functools.reduce(lambda text, item: text.replace(item[0], str(item[1])), values.items(), text)


KNOWN = ', backend_config={"known_trip_count":{"n":"17"}}'


@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        ({}, 13),
        ({"FIRST": 3, "STEP": 2}, 5),
        ({"FIRST": 3, "STEP": 2, "END": 14}, 6),
        ({"FIRST": 3, "STEP": 2, "DIRECTION": "LE"}, 6),
        ({"FIRST": 20, "STEP": -3, "END": 2, "DIRECTION": "GT"}, 6),
        ({"FIRST": 20, "STEP": -3, "END": 2, "DIRECTION": "GE"}, 7),
        ({"FIRST": 7, "END": 5}, 0),
        ({"END": 2, "%TO.1": "%n.1"}, 29),  # the end is carried along
        ({"DIRECTION": "NE", "body=%body.1": f"body=%body.1{KNOWN}"}, 17),  # known turns are believed
        # Those that do not follow count once, and are said; the last: no even steps, 0, 29, 30, 31.
        ({"constant(FIRST)": "parameter(1)"}, None),
        ({"DIRECTION": "NE"}, None),
        ({"STEP": "0"}, None),
        ({"%step.1), metadata": "%n.2), metadata", "%n.2)\n}": "%step.1)\n}", "END": "40"}, None),
    ],
)
def test_turns_of_a_loop_follow_from_its_numbers(changes, turns):
    values = changes | {"FIRST": 0, "STEP": 1, "END": 13, "DIRECTION": "LT", "TO": "end"} | changes
    found = estimate(replaced(LOOP, **values), replaced(BODY, **values))
    assert found.by_scope.get("blocks/mlp", 0) == 7 * (1 if turns is None else turns)
    assert found.seconds == found.by_scope.get("blocks/mlp", 0) + 11 and found.unknown_loops == (turns is None)


def test_loop_within_a_loop():
    loop = "%while.2 = (s32[], f32[3,5], s32[]) while(%tuple.9), condition=%condition.2, body=%body.2"
    tuples = "%tuple.9 = (s32[], f32[3,5], s32[]) tuple(%zero.1, %x.2, %n.2)"
    inner = replaced(BODY, STEP=1, END=3, DIRECTION="LT", TO="end")
    outer = replaced(inner, **{"constant(3)": "constant(5)"}).replace(
        "\n  ROOT %tuple.2", f"\n  {tuples}\n  {loop}\n  ROOT %tuple.2"
    )
    outer = outer.replace("  %step.1 =", "  %zero.1 = s32[] constant(0)\n  %step.1 =")
    inner = re.sub(r"%(\w+)\.([12])", lambda found: f"%{found[1]}.{found[2]}2", inner)
    inner = inner.replace("%body.12", "%body.2").replace("%condition.12", "%condition.2")
    assert estimate(replaced(LOOP, FIRST=0), inner, outer).seconds == 5 * (7 + 3 * 7) + 11


FUSED = """
%fused.1 (param_0.1: f32[3,5]) -> f32[3,5] {
  %param_0.1 = f32[3,5]{1,0} parameter(0)
  %exp.1 = f32[3,5]{1,0} exponential(%param_0.1), metadata={op_name="jit(step)/jvp(blocks)/mlp/exp"}, 3 cycles
  ROOT %tanh.1 = f32[3,5]{1,0} tanh(%exp.1), metadata={op_name="jit(step)/transpose(jvp(blocks))/score/tanh"}
}
""".strip()


def test_fusion_counts_once_where_its_root_stands():
    entry = "%x.1 = f32[3,5]{1,0} parameter(0)\n ROOT %fusion.1 = f32[3,5] fusion(%x.1), calls=%fused.1, 5 cycles"
    found = estimate(entry, FUSED, clock=2.0)
    assert found.by_scope == {"blocks/score": 2.5} and found.seconds == 2.5


BRANCH = """
%branch.N (given.N: f32[3,5]) -> f32[3,5] {
  %given.N = f32[3,5]{1,0} parameter(0)
  ROOT %tanh.N = f32[3,5]{1,0} tanh(%given.N), metadata={op_name="jit(step)/branch_N_fun/scope_N/tanh"}, CYCLES cycles
}
""".strip()


@pytest.mark.parametrize(
    "named",
    [
        "branch_computations={%branch.1, %branch.2, %branch.3}",
        "true_computation=%branch.1, false_computation=%branch.2",
    ],
)
def test_dearest_branch_counts(named):
    branches = [replaced(BRANCH, N=n, CYCLES=cycles) for n, cycles in ((1, 5), (2, 17), (3, 11))]
    entry = f"%x.1 = f32[3,5] parameter(0)\n ROOT %c.1 = (f32[3,5]) conditional(%x.1, %x.1, %x.1), {named}"
    assert estimate(entry, *branches).by_scope == {"scope_2": 17}


KERNEL = """
  %x.1 = f32[3,5]{1,0} parameter(0)
  %tanh.9 = f32[3,5]{1,0} tanh(%x.1), 13 cycles
  ROOT %splash.4 = (bf16[2,3,5]{2,1,0:T(8,128)(2,1)S(1)}, f32[3]{0}) custom-call(%tanh.9, %x.1), \
custom_call_target="tpu_custom_call", operand_layout_constraints={f32[3,5]{1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128, \\"use_fused_bwd_kernel\\": false}"
}}, metadata={op_name="jit(step)/jvp(blocks)/while/body/attention/pallas_call"}, backend_config={"custom_call_config":\
{"body":"TUzv","cost_estimate":{"transcendentals":"13","flops":"33554432","bytes_accessed":"7777"}}}
"""


def test_kernel_has_no_time_but_flops_and_counts_with_the_turns_of_its_loop():
    found = estimate(KERNEL)
    assert (found.kernel_flops, found.silent_kernels, found.seconds) == (33554432, 0, 13)
    silent = estimate(KERNEL.replace("cost_estimate", "other"))
    assert (silent.kernel_flops, silent.silent_kernels) == (0, 1)
    kernel = KERNEL.partition("ROOT ")[2].strip().replace("%tanh.9, %x.1", "%x.2")
    body = replaced(BODY, STEP=1, END=3, DIRECTION="LT", TO="end").replace(
        "  ROOT %tuple.2", f"  {kernel}\n  ROOT %tuple.2"
    )
    assert estimate(replaced(LOOP, FIRST=0), body).kernel_flops == 3 * 33554432


def between(*lines: str) -> hlo.Traffic:
    """The collective-permute of a program where it is started, these are done, and it is waited for."""
    permuted = "(f32[3,5]{1,0}, f32[3,5]{1,0}, u32[]{:S(2)}, u32[]{:S(2)})"
    entry = f"""
  %x.1 = f32[3,5]{{1,0}} parameter(0)
  %cos.1 = f32[3,5]{{1,0}} cosine(%x.1), 5 cycles
  %collective-permute-start.1 = {permuted} collective-permute-start(%x.1), channel_id=1, source_target_pairs={{{{0,1}}}}
  {"  ".join(f"{line}" + chr(10) for line in lines)}
  %collective-permute-done.1 = f32[3,5]{{1,0}} collective-permute-done(%collective-permute-start.1)
  ROOT %tanh.1 = f32[3,5]{{1,0}} tanh(%x.1), 5 cycles
"""
    loop = replaced(BODY, STEP=1, END=13, DIRECTION="LT", TO="end")
    return estimate(entry, loop).collectives["collective-permute"]


def test_collective_with_work_between_start_and_end_runs_beside_it():
    assert between() == between("%neg.1 = f32[3,5] negate(%x.1)") == (1, 60, 0)
    assert between("%exp.1 = f32[3,5] exponential(%x.1), 5 cycles") == (1, 60, 1)
    assert between(*LOOP.replace("FIRST", "0").replace("ROOT ", "").strip().splitlines()[:-1]) == (1, 60, 1)
    kernel = '%k.1 = f32[3,5] custom-call(%x.1), custom_call_target="tpu_custom_call"'
    assert between(kernel) == (1, 60, 1)


def test_collectives_of_a_loop_count_with_its_turns():
    body = replaced(BODY, STEP=1, END=13, DIRECTION="LT", TO="end")
    started = "%s.1 = (f32[3,5], f32[3,5], u32[], u32[]) collective-permute-start(%x.2), channel_id=1"
    body = body.replace("  %tanh.1", f"  {started}\n  %tanh.1").replace(
        "  ROOT %tuple.2", "  %done.1 = f32[3,5] collective-permute-done(%s.1)\n  ROOT %tuple.2"
    )
    waited = "%sum.1 = f32[3,5] all-reduce(%x.2), channel_id=1, replica_groups=mesh['a'=2,'b'=1] {'a'}, to_apply=%add"
    alone = waited.replace("%sum.1", "%sum.2").replace("{'a'}", "{'b'}")
    body = body.replace("  ROOT %tuple.2", f"  {waited}\n  {alone}\n  ROOT %tuple.2")
    found = estimate(replaced(LOOP, FIRST=0), body).collectives
    assert found == {"all-reduce": (13, 13 * 60, 0), "collective-permute": (13, 13 * 60, 13)}


def test_gathering_that_is_started_brings_its_outputs_only():
    entry = """
  %x.1 = f32[3,5] parameter(0)
  %all-gather-start.1 = (f32[3,5], f32[6,5]) all-gather-start(%x.1), replica_groups={{0,1}}, dimensions={0}
  ROOT %all-gather-done.1 = f32[6,5] all-gather-done(%all-gather-start.1)
"""
    assert estimate(entry).collectives == {"all-gather": (1, 120, 0)}


GATHER = """
%fused.N (param_0.N: bf16[1,5]) -> bf16[8,5] {
  %param_0.N = bf16[1,5]{1,0} parameter(0)
  %all-gather.N = bf16[8,5]{1,0} all-gather(%param_0.N), channel_id=9, replica_groups={{0,1,2,3,4,5,6,7}}, \
dimensions={0}, frontend_attributes={chain_id="3"}, backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %last.N = bf16[8,5] custom-call(%all-gather.N), custom_call_target="TARGET"
}
""".strip()


@pytest.mark.parametrize("beside", [True, False])
def test_collective_that_several_fusions_do_counts_once(beside):
    targets = ("AsyncCollectiveStart", "Other", "AsyncCollectiveDone")
    computations = [replaced(GATHER, N=n, TARGET=target) for n, target in enumerate(targets)]
    entry = f"""
  %x.1 = bf16[1,5]{{1,0}} parameter(0)
  %async-collective-start.1 = (bf16[1,5], bf16[8,5], u32[]) fusion(%x.1), kind=kCustom, calls=%fused.0
  {"%fusion.1 = bf16[8,5] fusion(%x.1), kind=kOutput, calls=%fused.1, 19 cycles" if beside else ""}
  ROOT %async-collective-done.1 = bf16[8,5] fusion(%x.1), kind=kCustom, calls=%fused.2
"""
    found = estimate(entry, *computations)
    assert found.collectives == {"all-gather": (1, 80, int(beside))}
    assert found.seconds == 19 * beside


@pytest.mark.parametrize("named", ["async", "call"])
def test_computation_that_is_started_counts_once(named):
    entry = """
  %x.1 = f32[3,5]{1,0} parameter(0)
  %NAME-start.1 = ((f32[3,5]), f32[3,5], u32[]) NAME-start(%x.1), CALLED=%branch.1
  %NAME-update.1 = ((f32[3,5]), f32[3,5]) NAME-update(%NAME-start.1, %x.1)
  %exp.1 = f32[3,5]{1,0} exponential(%x.1), 23 cycles
  ROOT %NAME-done.1 = f32[3,5]{1,0} NAME-done(%NAME-update.1)
"""
    reduced = "%sum.1 = f32[3,5] all-reduce(%given.1), replica_groups={{0,1}}, to_apply=%add"
    body = replaced(BRANCH, N=1, CYCLES=5).replace("  ROOT", f"  {reduced}\n  ROOT")
    entry = replaced(entry, NAME=named, CALLED={"async": "calls", "call": "to_apply"}[named])
    found = estimate(entry, body, ring=1.0)
    assert (found.passing, found.waited) == (60, 60 - 28)
    assert found.seconds == 28 and found.collectives == {"all-reduce": (1, 60, 1)}
    assert estimate(entry.replace("-update(", "-copy("), body).collectives == {"all-reduce": (1, 60, 0)}


@pytest.fixture
def uncached():
    """JAX 0.7 cannot keep what is compiled for chips that are not there."""
    before = jax.config.jax_enable_compilation_cache
    compilation.keep_nothing()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation.compilation_cache.reset_cache()


def test_compiler_itself(monkeypatch, uncached):
    """Seven products in a loop take about seven times one; a sum over chips is found among products."""
    pytest.importorskip("libtpu", reason="needs libtpu, the TPU's compiler")
    for name, value in {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        monkeypatch.setenv(name, value)
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
    mesh = Mesh(np.array(devices), ("chips",), axis_types=(AxisType.Auto,))

    def found(function, *shapes):
        arrays = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, (P(), P(), P("chips")), strict=False)
        ]
        return hlo.estimate(jax.jit(function).lower(*arrays).compile().as_text(), clock=1.5e9)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("chips")), out_specs=P())
    def summed(x, W, y):
        return jnp.tanh(x @ W) @ W + jax.lax.psum(y, "chips")

    n = 1024
    one = found(lambda x, W: jnp.tanh(x @ W), (n, n), (n, n))
    loop = found(lambda x, W: jax.lax.scan(lambda x, W: (jnp.tanh(x @ W), None), x, W)[0], (n, n), (7, n, n))
    assert 2 * n**3 / 197e12 < one.seconds < 4 * 2 * n**3 / 197e12
    assert 6 < loop.seconds / one.seconds < 11 and loop.unknown_loops == 0
    both = found(summed, (n, n), (n, n), (8 * n, n))
    assert both.collectives == {"all-reduce": (1, 2 * n * n, 0)}
    assert 1.5 < both.seconds / one.seconds < 3
