"""Four layers, 200 steps: scanned or unrolled, rematerialised or not, the loss is the same in each recipe."""

import jax.numpy as jnp
import pytest
import trainings
from emulated import fp8_bound
from steps import CURRENT, DELAYED

from transformer_engine_jax import testing


@pytest.mark.parametrize("rec", [None, DELAYED, CURRENT], ids=["off", "delayed", "current"])
def test_scan_and_remat_change_nothing(rec):
    expected = trainings.losses(rec, scanned=False, remat=False)
    for scanned, remat in ((False, True), (True, False), (True, True)):
        trainings.assert_same_training(trainings.losses(rec, scanned=scanned, remat=remat), expected)


@pytest.mark.parametrize("rec", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_fp8_follows_the_curve_of_f32(rec):
    with_, without = (trainings.losses(r, scanned=True, remat=False) for r in (rec, None))
    # Each product is off by fp8_bound; a loss that falls a hundredfold is to be off by no more than twice that.
    error = testing.relative_error(with_[:100], without[:100])
    assert 1e-3 < error < 2 * fp8_bound(jnp.float8_e4m3fn, jnp.float8_e4m3fn)
