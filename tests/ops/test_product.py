"""product: products of 16 bits by cuBLASLt, which reads operands as they lie, against dense in plain JAX."""

from functools import partial

import emulated
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import F32

import transformer_engine_jax as te
from transformer_engine_jax import decisions, testing
from transformer_engine_jax.ops import product as module
from transformer_engine_jax.ops import xla_product
from transformer_engine_jax.ops.dense import dense
from transformer_engine_jax.ops.gemm import gemm
from transformer_engine_jax.ops.layernorm import Norm
from transformer_engine_jax.ops.layernorm_mlp import layernorm_mlp

BOUND = {"bfloat16": 1e-2, "float16": 2e-3}


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """The choice that one GPU makes, of many tokens."""
    for each in (module, xla_product, decisions):
        monkeypatch.setattr(each, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


# x, kernel, contracted axes
SHAPES = {
    "matrices": ((48, 64), (64, 40), 1),
    "rows of two axes": ((4, 24, 64), (64, 3, 16), 1),
    "two contracted axes": ((40, 4, 16), (4, 16, 24), 2),
    "odd sizes": ((5, 7, 33), (33, 3, 9), 1),
    "an axis of one": ((4, 24, 64), (64, 1, 40), 1),
}


def few_tokens(monkeypatch):
    """What has few tokens for a GPU: all."""
    monkeypatch.setattr(decisions, "FEW_TOKENS", 4096)
    monkeypatch.setattr(decisions, "FEW_WHERE_CONVERTED", 4096)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    "shapes, added",
    [*((shapes, "bias and residual") for shapes in SHAPES), *(("matrices", one) for one in ("", "bias", "residual"))],
)
@pytest.mark.parametrize("few", [False, True], ids=["", "few tokens"])
def test_is_dense(few, shapes, added, dtype, monkeypatch):
    if few:
        few_tokens(monkeypatch)
    x, kernel, k_axes = SHAPES[shapes]
    result = (*x[: len(x) - k_axes], *kernel[k_axes:])
    x, kernel, bias, residual = emulated.normal(1, x, kernel, kernel[k_axes:], result)
    args = [jnp.asarray(x, dtype), jnp.asarray(kernel) / x.shape[-1] ** 0.5]
    names = [name for name in ("bias", "residual") if name in added]
    args += [jnp.asarray(bias)] if "bias" in names else []
    args += [jnp.asarray(residual, dtype)] if "residual" in names else []

    def run(by_kernels, x, kernel, *others):
        return dense(x, kernel, k_axes=k_axes, by_kernels=by_kernels, **dict(zip(names, others)))

    ours, plain = (str(jax.make_jaxpr(partial(run, by_kernels))(*args)) for by_kernels in (True, False))
    assert ("<kernel gemm:" in ours) != few and "custom_vjp_call" in ours
    assert "<kernel gemm:" not in plain and "custom_vjp_call" not in plain
    testing.check_op(
        partial(run, True), partial(run, False), tuple(args),
        value_bound=BOUND[dtype], gradient_bound=BOUND[dtype], key=jax.random.key(0),
    )  # fmt: skip


@pytest.mark.parametrize("k_first", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operands_may_lie_with_their_contracted_axes_first(k_first, dtype):
    a, b = (jnp.asarray(x, dtype) for x in emulated.normal(2, (3, 16, 40), (24, 16, 40)))
    run = lambda a, b: gemm(a, b, None, None, None, None, None, dtype=a.dtype, k_axes=2, k_first=k_first).d

    @jax.jit
    def as_they_lie(a, b):
        """Of [k.., m..] where k comes first, so that the operand is a view."""
        turned = [jnp.moveaxis(x, 0, -1) if name in k_first else x for name, x in (("a", a), ("b", b))]
        given = [jnp.moveaxis(x, -1, 0) if name in k_first else x for name, x in zip("ab", turned)]
        return run(*given)

    expected = jnp.einsum("mij,nij->mn", *(x.astype(jnp.float32) for x in (a, b)), precision="highest")
    for f in (jax.jit(run), as_they_lie):
        testing.assert_close(f(a, b), expected, 1e-2 if dtype == "bfloat16" else 1e-5)


# rows, inputs, outputs, dtype of the kernel -> that of its gradient as the product yields it
@pytest.mark.parametrize(
    "m, k, n, kernel, expected",
    [
        (66, 32, 96, "float32", "float32"),
        (16, 32, 32, "float32", "float32"),
        (64, 32, 96, "bfloat16", "bfloat16"),  # nothing to convert
        (64, 32, 96, "float16", "bfloat16"),
        (64, 32, 32, "float16", "bfloat16"),
        (64, 32, 96, "float32", "bfloat16"),  # the output fits into the gradient of f32
    ],
)
@pytest.mark.parametrize("rounds", [False, True], ids=["", "rounded"])
def test_the_gradient_of_a_kernel_is_computed_as_it_is_wanted(m, k, n, kernel, expected, rounds, monkeypatch):
    of_products = []

    def recorded(a, b, *others, **options):
        of_products.append(str(jnp.dtype(options["dtype"])) if options.get("k_first") == "ab" else None)
        return gemm(a, b, *others, **options)

    monkeypatch.setattr(module, "gemm", recorded)
    f = lambda x, w: jnp.sum(dense(x, w, by_kernels=True).astype(jnp.float32))
    x, w = jnp.zeros((2, m // 2, k), jnp.bfloat16), jnp.zeros((k, n), kernel)
    with te.autocast(round_wgrad=rounds):
        dx, dw = jax.eval_shape(jax.grad(f, (0, 1)), x, w)
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
    expected = "bfloat16" if rounds else expected
    few = (2 if rounds else w.dtype.itemsize) * w.size > 2 * m * (k + n)
    # Before the input's gradient, as x is free before that is there; or, where tokens are few, whenever there is room.
    assert of_products == ([None, None, expected] if few else [None, expected, None])


def test_gradients_of_16_bits_are_converted_behind_all_barriers():
    """So that XLA keeps them in 16 bits, and converts them where an optimizer reads them."""
    x, *kernels = (jnp.asarray(a) for a in emulated.normal(5, (2, 24, 32), (32, 1, 96), (96, 32)))

    def loss(kernels):
        norm = x.astype(jnp.bfloat16), jnp.ones(32), None
        y = layernorm_mlp(*norm, kernels, (None, None), activations=("gelu",), norm_options=Norm())
        return jnp.sum(y.astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(tuple(kernels)).jaxpr
    made = {var: eqn.primitive.name for eqn in jaxpr.eqns for var in eqn.outvars}
    assert made[jaxpr.outvars[0]] == "convert_element_type", "of 96 from 32, of 48 tokens"


@pytest.mark.parametrize(
    "m, n, rounds, again",
    [
        (48, 192, False, True),
        (48, 192, True, False),
        (128, 192, False, False),
        (48, 256, False, False),
        (48, 64, False, False),
    ],
)
def test_a_kernel_s_copy_of_16_bits_is_kept_or_made_again(m, n, rounds, again):
    """Made again where tokens are few, the kernel is as one of queries, keys and values, and gradients are wide."""
    x, w, dy = emulated.normal(4, (m, 64), (64, n), (m, n))
    x, dy = jnp.asarray(x, jnp.bfloat16), jnp.asarray(dy, jnp.bfloat16)
    f = lambda x, w: dense(x, w, by_kernels=True)
    with te.autocast(round_wgrad=rounds):
        _, vjp = jax.vjp(f, x, w)
    kept = [a.dtype for a in jax.tree.leaves(vjp) if getattr(a, "shape", None) == w.shape]
    assert kept == [jnp.float32 if again else jnp.bfloat16]
    dx, dw = vjp(dy)
    wide = [jnp.asarray(a, jnp.float32) for a in (x, w.astype(jnp.bfloat16), dy)]
    testing.assert_close(dx, wide[2] @ wide[1].T, BOUND["bfloat16"])
    testing.assert_close(dw, wide[0].T @ wide[2], BOUND["bfloat16"])


def test_of_few_tokens_a_kernel_is_converted_once_and_its_gradient_comes_last(monkeypatch):
    """Else XLA converts that of an MLP twice, and holds the copies while it has begun with gradients."""
    few_tokens(monkeypatch)
    x, w, dy = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((64, 1, 256)), jnp.zeros((8, 1, 256), jnp.bfloat16)

    def gradients(x, w, dy):
        return jax.vjp(partial(dense, by_kernels=True), x, w)[1](dy)

    eqns = jax.make_jaxpr(gradients)(x, w, dy).eqns
    of_kernel = [eqn for eqn in eqns if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval == w.aval]
    assert len(of_kernel) == 1
    barriers = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "te_all_at_once"]
    products = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general"]
    assert products[-2] < barriers[-1] < products[-1] and eqns[products[-1]].outvars[0].aval.size == w.size


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("kernel", ["float32", "bfloat16"])
@pytest.mark.parametrize("few", [False, True], ids=["", "few tokens"])
def test_microbatches_add_up_in_f32(few, kernel, uses, monkeypatch):
    """The product adds to the buffer, in f32 whatever the kernel's dtype; of two uses one does."""
    if few:
        few_tokens(monkeypatch)
    in_place = []

    def recorded(*operands, **options):
        in_place.append(options.get("in_place", False) and operands[5] is not None)
        return gemm(*operands, **options)

    monkeypatch.setattr(module, "gemm", recorded)
    x, w, buffer, dy = emulated.normal(3, (4, 24, 64), (64, 3, 32), (64, 3, 32), (4, 24, 3, 32))
    x, w, dy = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, kernel) / 8, jnp.asarray(dy, jnp.bfloat16)

    def total(x, w, buffer):
        given = te.Accumulating(w, buffer)
        return sum(jnp.sum((dense(x, given, by_kernels=True) * dy).astype(jnp.float32)) for _ in range(uses))

    dx, dw, added = jax.jit(jax.grad(total, (0, 1, 2)))(x, w, jnp.asarray(buffer))
    expected = jnp.einsum("bmk,bmij->kij", *(a.astype(jnp.float32) for a in (x, dy)), precision="highest")
    testing.assert_close(added, buffer + uses * expected, 1e-6)
    assert dw.dtype == w.dtype and not dw.any()
    plain = jax.grad(lambda x: jnp.sum((dense(x, w) * dy).astype(jnp.float32)))(x)
    testing.assert_close(dx, uses * plain, BOUND["bfloat16"])
    assert in_place.count(True) == (0 if few else 1)


def test_what_is_not_computed_here(monkeypatch):
    x, kernel = jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((8, 4))
    assert module.computes(x, kernel, 1)
    assert not module.computes(x.astype(jnp.float32), kernel, 1)
    assert not module.computes(x[:0], kernel, 1)
    monkeypatch.setattr(decisions, "FEW_TOKENS", 2)
    monkeypatch.setattr(decisions, "FEW_WHERE_CONVERTED", 4)
    assert not module.by_xla(x.reshape(2, 2, 8), kernel, 1) and module.by_xla(x[:3], kernel, 1)
    assert module.by_xla(x.reshape(2, 2, 8), kernel.reshape(2, 4, 4), 2)
    in_16_bits = kernel.astype(jnp.bfloat16)
    assert not module.by_xla(x[:3], in_16_bits, 1) and module.by_xla(x[:1], in_16_bits, 1)
    assert module.computes(x[:1], kernel, 1)
    computed = []  # where tokens are scanned
    jax.lax.map(lambda x: computed.append(module.computes(x, kernel, 1)), x[:, None])
    assert computed == [False]
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not module.computes(x, kernel, 1)
    for size in (2, 1):  # the mesh in force counts, also where it is not of this machine's devices
        monkeypatch.setattr(jax, "device_count", lambda size=size: 3 - size)
        with jax.set_mesh(testing.mesh_of((size,), ("data",))):
            assert module.computes(x, kernel, 1) == (size == 1)


by_kernels = partial(dense, by_kernels=True)


def layers(x, kernels, of_each=by_kernels):
    return jax.lax.scan(lambda x, kernel: (of_each(x, kernel), None), x, kernels)[0]


def in_turn(x, kernels):
    for kernel in kernels:
        x = by_kernels(x, kernel)
    return x


def summed(x, kernels, of_all=in_turn):
    return jnp.sum(of_all(x, kernels).astype(jnp.float32))


gradients = jax.grad(summed, 1)


# x, kernels -> x: whether products are of kernels in a stack
SCANS = {
    "layers": (layers, True),
    "layers with gradients": (jax.grad(partial(summed, of_all=layers)), True),
    "rematerialised layers": (partial(layers, of_each=jax.checkpoint(by_kernels)), True),
    "layers for each token": (lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: layers(x, w), x), True),
    "tokens": (lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: in_turn(x, w), x), False),
    "microbatches": (lambda x, w: jax.lax.scan(lambda _, x: (None, in_turn(x, w)), None, x[None])[1], False),
    "gradients of microbatches": (lambda x, w: jax.lax.map(lambda x: gradients(x, w), x[None]), False),
    "training steps": (lambda x, w: jax.lax.scan(lambda w, x: (gradients(x, w), None), w, x[None]), False),
    "no scan": (in_turn, False),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("case", SCANS)
def test_of_few_tokens_it_has_those_of_scanned_layers(case, dtype, monkeypatch):
    monkeypatch.setattr(decisions, "FEW_TOKENS", 8)
    monkeypatch.setattr(decisions, "FEW_WHERE_CONVERTED", 16)
    run, stacked = SCANS[case]
    x, kernels = jnp.ones((7, 16), jnp.bfloat16), jnp.ones((3, 16, 16), dtype)
    kernels = kernels if stacked else list(kernels)
    for few in (True, False):
        tokens = x if few else jnp.tile(x, (3, 1))
        for jitted in (run, jax.jit(run)):
            by_cublas = "<kernel gemm:" in str(jax.make_jaxpr(jitted)(tokens, kernels))
            assert by_cublas == (stacked or not few)


# x, kernel, contracted axes, whether a second row is added
ALONE = {
    "a row": ((1, 8), (8, 6), 1, True),
    "of more axes": ((1, 1, 2, 4), (2, 4, 3, 2), 2, True),
    "two rows": ((1, 2, 8), (8, 6), 1, False),
    "none": ((8,), (8, 6), 1, False),
    "a large kernel": ((1, 8), (8, 9), 1, False),
}


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("by_kernels", [False, True])
def test_a_row_alone(case, by_kernels, monkeypatch):
    monkeypatch.setattr(decisions, "FEW_TOKENS", 64)
    monkeypatch.setattr(xla_product, "LARGEST_FOR_TWO_ROWS", 64)
    x, kernel, k_axes, padded = ALONE[case]
    x, kernel, dy = emulated.normal(3, x, kernel, x[: len(x) - k_axes] + kernel[k_axes:])
    run = partial(dense, k_axes=k_axes, by_kernels=by_kernels)
    assert ("pad[" in str(jax.make_jaxpr(run)(x, kernel))) == padded
    y, vjp = jax.vjp(jax.jit(run), jnp.asarray(x), jnp.asarray(kernel))
    rows, columns = x.ndim - k_axes, kernel.ndim - k_axes
    dx = np.tensordot(dy, kernel, [range(-columns, 0), range(-columns, 0)])
    dkernel = np.tensordot(x, dy, [range(rows), range(rows)])
    testing.assert_close((y, *vjp(jnp.asarray(dy))), (np.tensordot(x, kernel, k_axes), dx, dkernel), F32)


def test_a_row_alone_and_a_kernel_of_unknown_size(monkeypatch):
    monkeypatch.setattr(decisions, "FEW_TOKENS", 64)
    (n,) = jax.export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((1, 8), jnp.float32), jax.ShapeDtypeStruct((8, n), jnp.float32)
    read = jax.export.export(jax.jit(dense))(*shapes)
    testing.assert_close(read.call(jnp.ones((1, 8)), jnp.ones((8, 5))), jnp.full((1, 5), 8.0), F32)


# x, kernel, contracted axes
OF_ONE = {
    "the first": ((2, 4, 8), (8, 1, 6), 1),
    "the last, of three": ((4, 2, 4), (2, 4, 3, 1), 2),
    "all": ((4, 8), (8, 1, 1), 1),
    "of one row": ((1, 8), (8, 1, 6), 1),
}


@pytest.mark.parametrize("case", OF_ONE)
def test_axes_of_one_stay_out_of_the_product(case, monkeypatch):
    monkeypatch.setattr(decisions, "FEW_TOKENS", 64)
    x, kernel, k_axes = OF_ONE[case]
    x, kernel, dy = emulated.normal(7, x, kernel, x[: len(x) - k_axes] + kernel[k_axes:])
    run = jax.jit(partial(dense, k_axes=k_axes))
    (product,) = (eqn for eqn in jax.make_jaxpr(partial(dense, k_axes=k_axes))(x, kernel).eqns if "dot" in str(eqn))
    assert 1 not in product.invars[1].aval.shape
    y, vjp = jax.vjp(run, jnp.asarray(x), jnp.asarray(kernel))
    rows, columns = x.ndim - k_axes, kernel.ndim - k_axes
    dx = np.tensordot(dy, kernel, [range(-columns, 0), range(-columns, 0)])
    dkernel = np.tensordot(x, dy, [range(rows), range(rows)])
    testing.assert_close((y, *vjp(jnp.asarray(dy))), (np.tensordot(x, kernel, k_axes), dx, dkernel), F32)


def test_axes_of_one_on_an_explicit_mesh():
    mesh = testing.mesh_of((2, 2), ("data", "tensor"), explicit=True)
    x, kernel = testing.shard(mesh, emulated.normal(7, (4, 8), (8, 1, 6)), [jax.P("data"), jax.P(None, None, "tensor")])
    with testing.on_mesh(mesh):
        y = jax.jit(dense)(x, kernel)
        assert jax.typeof(y).sharding.spec == jax.P("data", None, "tensor")
    testing.assert_close(y, np.tensordot(x, kernel, 1), F32)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_bias_knows_its_explicit_mesh(transform):
    """Where none is in force."""
    mesh = testing.mesh_of((2, 2), ("data", "tensor"), explicit=True)
    x, kernel, bias = arrays = emulated.normal(7, (4, 8), (8, 6), (6,))
    y = transform(dense)(*testing.shard(mesh, arrays, [jax.P("data"), jax.P(None, "tensor"), jax.P()]))
    assert jax.typeof(y).sharding.spec == jax.P("data", "tensor")
    testing.assert_close(y, x @ kernel + bias, F32)


def test_explain_says_why_few_tokens_run_in_plain_jax(monkeypatch):
    monkeypatch.setattr(decisions, "FEW_TOKENS", 64)
    rows = te.explain(te.rmsnorm, jnp.ones((3, 8)), jnp.ones(8)).rows
    assert [row.runs for row in rows] == ["plain JAX: of few tokens XLA fuses references"]


if jax.default_backend() == "gpu":  # elsewhere there is no handler that would mind

    def test_fp8_operands_lie_one_way():
        a = jnp.zeros((16, 16), jnp.float8_e4m3fn)
        with pytest.raises(Exception, match="te_gemm: k_first: expected nothing for FP8, got ab"):
            gemm(a, a, None, None, None, None, None, dtype=jnp.bfloat16, k_first="ab").d.block_until_ready()
