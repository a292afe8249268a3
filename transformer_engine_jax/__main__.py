"""`python -m transformer_engine_jax`: what is installed and what runs here."""

from transformer_engine_jax.support import report

print(report())
