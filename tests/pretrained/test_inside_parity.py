"""Activations, patching, attribution, lenses and head scores of tfm.inside, and those of transformer_lens.

Models with random parameters have the same weights in both. All numbers are float32.
"""

import functools
import types

import jax
import numpy as np
import pytest
from transformers_models import make_random, torch

lens = pytest.importorskip("transformer_lens", reason="parity with transformer_lens needs the extra [parity]")

from transformer_lens import head_detector, patching  # noqa: E402
from transformer_lens.pretrained import weight_conversions  # noqa: E402

from experiments.pretrained import open_model  # noqa: E402
from tfm import inside  # noqa: E402

M, D, H, W, F, PERIOD = 3, 64, 4, 97, 80, 7
N = 2 * PERIOD
HUGGING_FACE = {  # name -> class of transformers, fields of its config
    "gpt2": ("GPT2LMHeadModel", dict(n_layer=M, n_embd=D, n_head=H, n_inner=F, n_positions=N + 1)),
    "llama": (
        "LlamaForCausalLM",
        dict(num_hidden_layers=M, hidden_size=D, num_attention_heads=H, num_key_value_heads=2, intermediate_size=F)
        | dict(max_position_embeddings=N + 1, rms_norm_eps=1e-3),
    ),
}
LENS = {  # name -> fields of transformer_lens's config, conversion of the weights
    "gpt2": (dict(normalization_type="LN", act_fn="gelu_new", eps=1e-5), weight_conversions.convert_gpt2_weights),
    "llama": (
        dict(normalization_type="RMS", act_fn="silu", eps=1e-3, final_rms=True, gated_mlp=True, n_key_value_heads=2)
        | dict(positional_embedding_type="rotary", rotary_dim=D // H, rotary_base=10000),
        weight_conversions.convert_llama_weights,
    ),
}
SIZES = dict(n_layers=M, d_model=D, n_heads=H, d_head=D // H, d_mlp=F, d_vocab=W, n_ctx=N + 1)
HOOKS = {"hidden": "resid_post", "y": "z", "A": "pattern", "attention": "attn_out", "mlp": "mlp_out"}
HOOKS |= {"q": "q", "k": "k", "v": "v"}
ROTATED = {"q": "rot_q", "k": "rot_k"}  # the hooks after the rotation, if positions rotate queries and keys
UNCHANGED = "fold_ln center_writing_weights center_unembed fold_value_biases refactor_factored_attn_matrices"
DETECT = {  # name of a score -> function of w_1N: the pairs of query and key that count
    "previous": head_detector.get_previous_token_head_detection_pattern,
    "duplicate": head_detector.get_duplicate_token_head_detection_pattern,
    "induction": head_detector.get_induction_head_detection_pattern,
}
torch.set_num_threads(1)  # on a busy machine, threads that wait for each other take most of the time
CLEAN_BN, CORRUPTED_BN = np.random.default_rng(0).integers(0, W, (2, 2, N))
RIGHT_B, WRONG_B = np.array([[3, 5], [8, 2]])  # tokens whose logits are compared


@pytest.fixture(scope="module", params=HUGGING_FACE)
def pair(request, tmp_path_factory):
    """Return a namespace: our model, their model, and the activations of both for the clean and corrupted texts."""
    name, fields = HUGGING_FACE[request.param]
    reference = make_random(name, fields | dict(vocab_size=W, bos_token_id=None, eos_token_id=None))
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    ours, theirs = open_model.open(folder), build_lens(reference, *LENS[request.param])
    look = {text: ours.run(w_BN, look=tuple(HOOKS))[1] for text, w_BN in (("clean", CLEAN_BN), ("other", CORRUPTED_BN))}
    with torch.no_grad():
        _, clean = theirs.run_with_cache(torch.tensor(CLEAN_BN))
    return types.SimpleNamespace(ours=ours, theirs=theirs, clean=look["clean"], other=look["other"], cache=clean)


def build_lens(reference, fields: dict, convert):
    """Return the HookedTransformer with the weights of a model of transformers."""
    config = lens.HookedTransformerConfig(**SIZES, **fields, device="cpu", init_weights=False)
    with pytest.warns(DeprecationWarning, match="HookedTransformer is deprecated"):
        model = lens.HookedTransformer(config)
    model.load_and_process_state_dict(convert(reference, config), **dict.fromkeys(UNCHANGED.split(), False))
    return model.eval()


def assert_near(actual, expected, *, spread: float = 0.1) -> None:
    """Assert equality within 1e-4. The values must vary by more than `spread`, so that the tolerance is strict."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > spread


def compare_logits(logits_BW):
    """Return the mean difference of two logits, of either library."""
    b_B = np.arange(len(RIGHT_B))
    return (logits_BW[b_B, RIGHT_B] - logits_BW[b_B, WRONG_B]).mean()


def measure(pair, edit):
    return compare_logits(pair.ours.run(CORRUPTED_BN, edit=edit, at=-1)[0])


def test_logits_and_activations_are_equal(pair):
    """Both libraries have the same activations by other names. Theirs have the axes B N H K where ours have B H N K."""
    with torch.no_grad():
        assert_near(pair.ours(CLEAN_BN), pair.theirs(torch.tensor(CLEAN_BN)), spread=1)
    rotates = pair.theirs.cfg.positional_embedding_type == "rotary"
    for name, hook in (HOOKS | ROTATED if rotates else HOOKS).items():
        expected = np.stack([pair.cache[hook, m] for m in range(M)])
        assert_near(pair.clean[name], expected.swapaxes(2, 3) if name in ("q", "k", "v", "y") else expected)


@pytest.mark.parametrize("name", ["hidden", "y"])
def test_every_patch_of_a_grid_is_equal(pair, name):
    """The grid has all layers and tokens for `hidden`, and all layers and heads for `y`."""
    axes, setter = {
        "hidden": (("layer", "pos"), patching.layer_pos_patch_setter),
        "y": (("layer", "head_index"), patching.layer_head_vector_patch_setter),
    }[name]
    actual_MI = inside.patch(functools.partial(measure, pair), name, pair.clean[name], batch=5)
    with torch.no_grad():
        expected_MI = patching.generic_activation_patch(
            pair.theirs,
            torch.tensor(CORRUPTED_BN),
            pair.cache,
            lambda logits_BNW: compare_logits(logits_BNW[:, -1]),
            setter,
            HOOKS[name],
            index_axis_names=axes,
        )
    assert_near(actual_MI, expected_MI)


@pytest.mark.parametrize("name", ["hidden", "y"])
def test_attribution_is_that_of_hooks_with_gradients(pair, name):
    actual = inside.attribute(functools.partial(measure, pair), name, pair.clean[name], pair.other[name])
    values, gradients = {}, {}
    names = [f"blocks.{m}.{'hook_resid_post' if name == 'hidden' else 'attn.hook_z'}" for m in range(M)]

    def store(where, x, hook):
        where[hook.name] = x.detach()

    forward = [(hook, functools.partial(store, values)) for hook in names]
    backward = [(hook, functools.partial(store, gradients)) for hook in names]
    with pair.theirs.hooks(fwd_hooks=forward, bwd_hooks=backward):
        compare_logits(pair.theirs(torch.tensor(CORRUPTED_BN))[:, -1]).backward()
    expected = torch.stack([((pair.cache[hook] - values[hook]) * gradients[hook]).sum(-1) for hook in names])
    assert_near(actual, expected.swapaxes(2, 3) if name == "y" else expected)


def test_head_scores_are_those_of_the_head_detector(pair):
    """Their score is a share of the weights of all queries, ours a mean over the queries that have such a key."""
    w_BN = np.asarray(inside.draw_repeated(jax.random.key(3), W=W, B=3, period=PERIOD))
    assert all(len(set(w_N)) == PERIOD for w_N in w_BN)  # no other token is a duplicate
    scores = inside.head_scores(pair.ours.run(w_BN, look=("A",))[1]["A"], period=PERIOD)
    with torch.no_grad():
        _, cache = pair.theirs.run_with_cache(torch.tensor(w_BN))
    options = dict(exclude_bos=False, exclude_current_token=False, error_measure="mul")
    for name, detect in DETECT.items():
        expected_BMH = np.zeros((len(w_BN), M, H))
        for b, m, h in np.ndindex(expected_BMH.shape):
            pattern_NN = detect(torch.tensor(w_BN[b : b + 1]))
            A_NN = cache["pattern", m][b, h]
            share = head_detector.compute_head_attention_similarity_score(A_NN, pattern_NN, **options)
            expected_BMH[b, m, h] = share * N / pattern_NN.sum()
        assert_near(scores[name], expected_BMH.mean(0), spread=0.05)


def test_the_logit_lens_reads_the_accumulated_residual_stream(pair):
    actual_MBNW = inside.logit_lens(functools.partial(pair.ours.run, CLEAN_BN), pair.clean["hidden"])
    with torch.no_grad():
        x_MBND = pair.cache.accumulated_resid()[1:]  # the first is the embedding
        expected_MBNW = pair.theirs.unembed(pair.theirs.ln_final(x_MBND.flatten(0, 1))).unflatten(0, x_MBND.shape[:2])
    assert_near(actual_MBNW, expected_MBNW, spread=1)
