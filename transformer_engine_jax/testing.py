"""The shared test suite: what every kernel and every op must hold, on every platform present.

Errors are relative L2 norms, so that a gradient of zeros (error 1) or of the wrong sign (error 2) fails any bound
below 1. Bounds come from the formats: `epsilon` of a dtype, growing with the square root of a sum's length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_engine_jax.kernel import Kernel, use_references
from transformer_engine_jax.quantized import QuantizerStates


def reference_kernels() -> contextlib.AbstractContextManager:
    """Runs the kernels' pure-JAX references in place of their compiled handlers."""
    return use_references(True)


def epsilon(dtype) -> float:
    """Half the distance from 1 to the next number of a format: the largest relative error of one rounding."""
    return float(jnp.finfo(dtype).eps) / 2


def relative_error(got: Any, expected: Any) -> float:
    """|got - expected| / |expected| in L2, over all leaves of one array or pytree; NaN where either holds one."""
    got, expected = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(t)] or [np.zeros(0)])
        for t in (got, expected)
    )
    if got.shape != expected.shape:
        raise AssertionError(f"expected {expected.size} elements, got {got.size}")
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(got - expected) / norm) if norm else float(np.abs(got).max(initial=0.0))


def _leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by their paths; the states of several tensors one by one, as their sizes differ."""
    is_states = lambda x: isinstance(x, QuantizerStates)
    named = jax.tree.map(lambda x: x.states() if is_states(x) else x, tree, is_leaf=is_states)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(named)}


def assert_close(got: Any, expected: Any, bound: float, what: str = "") -> None:
    """Leaf by leaf: same shape, and a relative L2 error of at most `bound` (below 1)."""
    assert 0 <= bound < 1, f"a bound of {bound} would let zeros pass"
    got, expected = _leaves(got), _leaves(expected)
    assert got.keys() == expected.keys(), f"{what}: expected the same leaves: {list(expected)}, got {list(got)}"
    for path, g in got.items():
        e = expected[path]
        assert jnp.shape(g) == jnp.shape(e), f"{what}{path}: {jnp.shape(g)} != {jnp.shape(e)}"
        error = relative_error(g, e)
        assert error <= bound, f"{what}{path}: relative error {error:.3g} > {bound:.3g}"


def assert_same_bytes(got: Any, expected: Any, what: str = "") -> None:
    """Same shape, dtype and bytes, leaf by leaf; any NaN equals any NaN of f32, f16 and bf16."""
    got, expected = _leaves(got), _leaves(expected)
    assert got.keys() == expected.keys(), f"{what}: expected the same leaves: {list(expected)}, got {list(got)}"
    for path, g in got.items():
        g, e = np.asarray(g), np.asarray(expected[path])
        where = f"{what}{path}"
        assert (g.shape, g.dtype) == (e.shape, e.dtype), f"{where}: {g.dtype}{g.shape} != {e.dtype}{e.shape}"
        view = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[g.dtype.itemsize]
        differ = np.atleast_1d(g).view(view) != np.atleast_1d(e).view(view)
        if g.dtype.itemsize > 1:
            differ &= ~(np.isnan(np.atleast_1d(g)) & np.isnan(np.atleast_1d(e)))
        assert not differ.any(), f"{where}: {differ.sum()} of {differ.size} elements differ"


# --- Platforms and meshes --------------------------------------------------------------------------------------------


def platforms() -> list[str]:
    """Platforms that JAX can run on here: "cpu", and "gpu" where there is one."""
    found = ["cpu"]
    with contextlib.suppress(RuntimeError):
        found += ["gpu"] if jax.devices("gpu") else []
    return found


def mesh_of(shape: Sequence[int], names: Sequence[str], *, explicit: bool = False) -> Mesh:
    """A mesh of GPUs where there are enough, else of (virtual) CPU devices; ValueError where there are too few."""
    size = int(np.prod(shape))
    for platform in reversed(platforms()):
        devices = jax.devices(platform)
        if len(devices) >= size:
            kind = AxisType.Explicit if explicit else AxisType.Auto
            return Mesh(np.array(devices[:size]).reshape(shape), tuple(names), axis_types=(kind,) * len(shape))
    raise ValueError(
        f"mesh_of: {size} devices needed; set XLA_FLAGS=--xla_force_host_platform_device_count={size} "
        "before importing jax"
    )


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """Computes on the mesh's devices, also where they are not JAX's default ones."""
    with jax.default_device(mesh.devices.flat[0]), jax.set_mesh(mesh):
        yield


def shard(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Puts a pytree of arrays, or None, on a mesh; specs: a matching pytree of PartitionSpecs."""
    place = lambda x, spec: None if x is None else jax.device_put(np.asarray(x), NamedSharding(mesh, spec))
    return jax.tree.map(place, tree, specs, is_leaf=lambda x: x is None)


# --- Kernels ---------------------------------------------------------------------------------------------------------


def check_kernel(
    kernel: Kernel,
    operands: Sequence[Any],
    attributes: dict[str, Any],
    compare: Callable[[Any, Any], None],
    *,
    specs: Sequence[PartitionSpec | None] | None = None,
) -> None:
    """Handler against reference: eager, jit, vmap, on each platform, and sharded over 8 devices.

    Args:
      kernel: declared with @kernel.
      operands: arrays or None.
      attributes: static attributes.
      compare: (results, expected results) -> raises AssertionError; called with the kernel's result type.
      specs: partition specs of the operands over the mesh axes "data" (4) and "model" (2); None: not sharded.
    """
    present = [i for i, x in enumerate(operands) if x is not None]

    def call(*arrays):
        full = list(operands)
        for i, x in zip(present, arrays):
            full[i] = x
        return kernel(*full, **attributes)

    arrays = [jnp.asarray(operands[i]) for i in present]
    for platform in platforms():
        local = jax.device_put(arrays, jax.devices(platform)[0])
        with jax.default_device(jax.devices(platform)[0]):
            with reference_kernels():
                expected = jax.jit(call)(*local)
            compare(call(*local), expected)
            compare(jax.jit(call)(*local), expected)
            # Two examples; the second has the rows reversed where there are rows, so that a mix-up shows.
            twice = [jnp.stack([x, jnp.flip(x, 0) if x.ndim > 1 else x]) for x in local]
            batched = jax.jit(jax.vmap(call))(*twice)
            for example in range(2):
                one = jax.tree.map(lambda x: x[example], batched)
                compare(one, call(*[x[example] for x in twice]))
    if specs is not None:
        for explicit in (False, True):
            mesh = mesh_of((4, 2), ("data", "model"), explicit=explicit)
            with on_mesh(mesh):
                sharded = jax.jit(call)(*shard(mesh, arrays, [specs[i] for i in present]))
                compare(jax.device_get(sharded), jax.device_get(expected))


# --- Differentiable ops ----------------------------------------------------------------------------------------------


def gradients(f: Callable, args: Sequence[Any], key: jax.Array) -> tuple[Any, Any]:
    """(f(*args), its gradients for all args under a random cotangent)."""
    out, vjp = jax.vjp(f, *args)
    leaves, tree = jax.tree.flatten(out)
    keys = jax.random.split(key, len(leaves))
    cotangent = [jax.random.normal(k, x.shape, jnp.float32).astype(x.dtype) for k, x in zip(keys, leaves)]
    return out, vjp(jax.tree.unflatten(tree, cotangent))


def check_op(
    op: Callable,
    plain: Callable,
    args: Sequence[Any],
    *,
    value_bound: float,
    gradient_bound: float,
    key: jax.Array,
) -> None:
    """Value and every gradient of `op` against a plain-JAX formulation in f32: eager, jit, vmap, remat, scan.

    Args:
      op, plain: functions of the same array arguments.
      args: arrays; their dtypes are those of op, `plain` gets them as f32.
      value_bound, gradient_bound: relative L2 errors allowed, below 1.
      key: for the random cotangents.
    """
    of_plain = lambda args: gradients(plain, [x.astype(jnp.float32) for x in args], key)
    of_args = of_plain(args)

    def check(out, grads, how, reference=of_args):
        expected, expected_gradients = reference
        for x, g in zip(args, grads):
            assert g.dtype == x.dtype and g.shape == x.shape, (
                f"{how}: gradient {g.dtype}{g.shape} of {x.dtype}{x.shape}"
            )
        assert_close(out, expected, value_bound, f"{how}: value")
        assert_close(list(grads), list(expected_gradients), gradient_bound, f"{how}: gradient ")

    run = lambda f: gradients(f, args, key)
    check(*run(op), "eager")
    check(*jax.jit(lambda *a: gradients(op, a, key))(*args), "jit")
    check(*run(jax.checkpoint(op)), "remat")
    scanned = lambda *a: jax.lax.scan(lambda c, _: (c, op(*a)), 0, None, length=1)[1][0]
    check(*run(scanned), "scan")
    other = [jnp.flip(x) for x in args]
    out, grads = jax.vmap(lambda *a: gradients(op, a, key))(*map(jnp.stack, zip(args, other)))
    for example, reference in enumerate((of_args, of_plain(other))):
        check(out[example], [g[example] for g in grads], "vmap of grad", reference)
