"""An NNX model's way to disk and to Linen and back, its FP8 state included."""

from functools import partial

import emulated
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint
import pytest
import steps
import twins
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from steps import DELAYED

import transformer_engine_jax as te
import transformer_engine_jax.flax as te_flax
import transformer_engine_jax.nnx as te_nnx
from transformer_engine_jax import testing

(X,) = (jnp.asarray(a) for a in emulated.normal(7, (4, 8, 32)))
Layer = partial(te_nnx.LayerNormMLP, 32, intermediate_dim=48)


def stepped() -> te_nnx.LayerNormMLP:
    """A model whose states have seen a step."""
    model = twins.make(Layer)
    with steps.autocast(DELAYED):
        _, (grads, _) = twins.step(lambda model, x: model(x)[0], model, X)
    te_nnx.update_state(model, grads)
    return model


def saved(path, tree) -> orbax.checkpoint.StandardCheckpointer:
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(path, tree)
    checkpointer.wait_until_finished()
    return checkpointer


def test_checkpoints_round_trip(tmp_path):
    model = stepped()
    graph, state = nnx.split(model)
    checkpointer = saved(tmp_path / "model", state)
    with steps.autocast(DELAYED):
        fresh = nnx.eval_shape(lambda: Layer(rngs=nnx.Rngs(0, dropout=1)))
    restored = nnx.merge(graph, checkpointer.restore(tmp_path / "model", nnx.state(fresh)))
    testing.assert_same_bytes(te_nnx.to_linen(restored), te_nnx.to_linen(model))
    with steps.autocast(DELAYED):
        testing.assert_same_bytes(nnx.jit(twins.call)(restored, X), nnx.jit(twins.call)(model, X))


@pytest.mark.parametrize("explicit", [False, True])
def test_abstract_models_are_restored_into_on_a_mesh(explicit, tmp_path):
    model, mesh = stepped(), testing.mesh_of((2, 2), ("data", "model"), explicit=explicit)
    checkpointer = saved(tmp_path / "model", nnx.state(model, te_nnx.TRAINED))
    resource = te.MeshResource(fsdp_resource="data", tp_resource="model")
    with testing.on_mesh(mesh), steps.autocast(DELAYED, mesh_resource=resource):
        with nnx.logical_axis_rules(te_nnx.extend_logical_axis_rules(())):
            _, shapes = nnx.get_abstract_model(lambda: Layer(rngs=nnx.Rngs(0)), mesh)
        restored = checkpointer.restore(tmp_path / "model", nnx.state(shapes, te_nnx.TRAINED))
        assert restored["wi_kernel"].sharding == NamedSharding(mesh, PartitionSpec("data", None, "model"))
        made = nnx.jit(lambda: Layer(rngs=nnx.Rngs(0)))()
        nnx.update(made, restored)
        testing.assert_same_bytes(jax.device_get(te_nnx.to_linen(made)), te_nnx.to_linen(model))


def test_pure_dicts_need_no_target(tmp_path):
    """As Flax's guide to checkpoints has it: what is restored names arrays by their places alone."""
    model = stepped()
    restored = saved(tmp_path / "model", nnx.to_pure_dict(nnx.state(model))).restore(tmp_path / "model")
    with steps.autocast(DELAYED):
        graph, state = nnx.split(nnx.eval_shape(lambda: Layer(rngs=nnx.Rngs(0, dropout=1))))
    nnx.replace_by_pure_dict(state, restored)
    testing.assert_same_bytes(te_nnx.to_linen(nnx.merge(graph, state)), te_nnx.to_linen(model))


@pytest.mark.parametrize("form", ["orbax", "msgpack"])
def test_from_linen_takes_variables_that_were_restored_without_a_target(form, tmp_path):
    variables = te_nnx.to_linen(stepped())
    if form == "orbax":
        restored = saved(tmp_path / "variables", variables).restore(tmp_path / "variables")
    else:
        restored = flax.serialization.msgpack_restore(flax.serialization.to_bytes(variables))
    assert isinstance(restored[te_flax.STATE_COLLECTION]["gemm_1_state"], dict)
    model = twins.make(Layer)
    te_nnx.from_linen(model, restored)
    testing.assert_same_bytes(te_nnx.to_linen(model), variables)


def test_the_state_is_read_by_the_names_of_its_tensors():
    state = stepped().gemm_1_state
    assert isinstance(state, te_nnx.Fp8State) and state.x.scale != 1 and state.kernel.amax_history[1] > 0
    assert not hasattr(state, "query")


def test_conversion_says_what_differs():
    model = twins.make(Layer)
    good = te_nnx.to_linen(model)
    te_nnx.from_linen(model, {"params": good["params"]})  # the state may be missing: the model keeps its own
    for change, message in (
        (lambda p: p.pop("wi_kernel"), r"the model alone has \['wi_kernel'\], and the variables alone have \[\]"),
        (lambda p: p.clear(), r"the model alone has \['ln_bias', 'scale', 'wi_kernel', 'wo_kernel'\]"),
        (lambda p: p.update(more=X), r"the model alone has \[\], and the variables alone have \['more'\]"),
        (lambda p: p.update({0: X}), r"the variables alone have \['0'\]"),
        (lambda p: p.update(wo_kernel=X), r"params/wo_kernel: expected \['float32\[48, 32\]'\], got [^;]*$"),
        (lambda p: p.update(scale=p["scale"].astype(jnp.bfloat16)), r"scale: .* got \['bfloat16\[32\]'\]; cast it"),
    ):
        params = {name: value + 1 for name, value in good["params"].items()}
        change(params)
        with pytest.raises(ValueError, match=message):
            te_nnx.from_linen(model, {"params": params})
        testing.assert_same_bytes(te_nnx.to_linen(model), good, "as it was")
    with pytest.raises(ValueError, match=r"variables: expected {\"params\": ...}, got collections \['wi_kernel'"):
        te_nnx.from_linen(model, {"wi_kernel": params["wi_kernel"]})
    short = te.GemmState.create(te.recipe.DelayedScaling(amax_history_len=3))
    state = {**good[te_flax.STATE_COLLECTION], "gemm_2_state": short}
    with pytest.raises(ValueError, match=r"gemm_2_state: expected \['float32\[3, 6\]'\], got \['float32\[3, 5\]'\]"):
        te_nnx.from_linen(model, {**good, te_flax.STATE_COLLECTION: state})


# --- What is shared, or in a list ------------------------------------------------------------------------------------

SIZES = dict(hidden_size=32, mlp_hidden_size=48, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)


class Linen(nn.Module):
    """Layers that share their biases, as T5's do."""

    @nn.compact
    def __call__(self, x):
        shared = te_flax.RelativePositionBiases(32, 128, 4, name="shared")
        for name in ("a", "b"):
            x = te_flax.TransformerLayer(**SIZES, relative_embedding=shared, name=name)(x)
        return x


class Shared(nnx.Module):
    """The same; the path by which NNX knows the biases is one of a layer."""

    def __init__(self, *, rngs):
        self.shared = te_nnx.RelativePositionBiases(32, 128, 4, rngs=rngs)
        for name in ("a", "b"):
            layer = te_nnx.TransformerLayer(**SIZES, relative_embedding=self.shared, rngs=rngs)
            layer.above = self  # a path without an end
            setattr(self, name, layer)

    def __call__(self, x):
        return self.b(self.a(x))


def test_what_is_shared_goes_by_the_shortest_path_and_comes_by_any():
    model = twins.make(Shared)
    variables = twins.twins(Linen(), model, X)
    back = te_nnx.to_linen(model)
    assert jax.tree.structure(back) == jax.tree.structure(variables)
    testing.assert_same_bytes(back, variables)
    testing.assert_close(nnx.jit(twins.call)(model, X), jax.jit(Linen().apply)(variables, X), emulated.F32)

    params = dict(variables["params"])
    shared = params.pop("shared")
    table = {"rel_embedding": shared["rel_embedding"] + 1}
    for layer in ("a", "b"):
        te_nnx.from_linen(model, {"params": {**params, layer: {**params[layer], "relative_embedding": table}}})
        testing.assert_same_bytes(te_nnx.to_linen(model)["params"]["shared"], table)
    both = {**params, "shared": shared, "b": {**params["b"], "relative_embedding": table}}
    message = r"expected one of \['b/relative_embedding/rel_embedding', 'shared/rel_embedding'\], which the model shar"
    with pytest.raises(ValueError, match=message):
        te_nnx.from_linen(model, {"params": both})


def test_what_is_tied_keeps_its_name():
    model = nnx.Dict(embedding=nnx.Embed(4, 8, rngs=nnx.Rngs(0)))
    model["head"] = model["embedding"].embedding
    params = te_nnx.to_linen(model)["params"]
    assert set(params) == {"embedding"}
    te_nnx.from_linen(model, {"params": {"head": params["embedding"]["embedding"] + 1}})
    testing.assert_same_bytes(model["head"].get_value(), params["embedding"]["embedding"] + 1)


@pytest.mark.parametrize("number", [int, str])
def test_places_in_a_list_are_numbers_or_their_names(number):
    layers = nnx.List([te_nnx.DenseGeneral(32, 4, rngs=nnx.Rngs(i)) for i in range(2)])
    kernels = [jnp.full((32, 4), i, jnp.float32) for i in range(2)]
    te_nnx.from_linen(
        layers, {"params": {number(i): {"kernel": kernel, "bias": jnp.ones(4)} for i, kernel in enumerate(kernels)}}
    )
    testing.assert_same_bytes([layer.kernel.get_value() for layer in layers], kernels)
