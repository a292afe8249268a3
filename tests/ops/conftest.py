"""What tests of several ops share."""

import pytest

from transformer_engine_jax.kernel import use_references


@pytest.fixture(params=["handler", "reference"])
def implementation(request):
    """Whose kernels compute: those in C++, or their references in JAX."""
    with use_references(request.param == "reference"):
        yield request.param
