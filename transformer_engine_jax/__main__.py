"""What is installed and what runs here."""

import argparse

from transformer_engine_jax.support import report

argparse.ArgumentParser(prog="python -m transformer_engine_jax", description=__doc__).parse_args()
print(report())
